"""Topologies as text, as files and of devices; every figure of a link says where it is from."""

import pytest

from jaxfound.config.schema import ConfigError
from jaxfound.resources.links import INSIDE, NETWORKS, OTHER_INSIDE
from jaxfound.resources.topology import Topology, equal_parts
from jaxfound.resources.topology_text import kind_names
from pallas_kernels.hardware import HARDWARE

# Text: hosts, devices a host, kind, network, NICs a host, bytes/s a device over the network.
TEXTS = {
    "3x8:h200:ib400": (3, 8, "NVIDIA H200", "ib400", 8, 50e9),
    "8:h200": (1, 8, "NVIDIA H200", None, 0, 0.0),
    "1x8:H200": (1, 8, "NVIDIA H200", None, 0, 0.0),
    "2x8:a100:ib200": (2, 8, "NVIDIA A100-SXM4-80GB", "ib200", 8, 25e9),
    "2x8:a100-sxm4-40gb:4xib200": (2, 8, "NVIDIA A100-SXM4-40GB", "ib200", 4, 12.5e9),
    "3x8:h100:eth25": (3, 8, "NVIDIA H100 80GB HBM3", "eth25", 1, 3.125e9 / 8),
    "16x4:b200:8xroce100": (16, 4, "NVIDIA B200", "roce100", 8, 25e9),
    "2x1:cpu:eth10": (2, 1, "cpu", "eth10", 1, 1.25e9),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_hosts_devices_kind_and_network(text):
    found = Topology.parse(text)
    hosts, devices, kind, network, nics, bps = TEXTS[text]
    assert (found.hosts, found.devices_per_host, found.device_kind) == (hosts, devices, kind)
    assert found.num_devices == hosts * devices
    assert found.memory_bytes == HARDWARE[kind].memory_bytes
    assert (found.network.name if found.network else None) == network
    assert (found.num_nics, found.network_bps) == (nics, bps)


REFUSED = {
    "8": ["[HOSTSx]DEVICES:KIND", "3x8:h200:ib400"],
    "x8:h200": ["[HOSTSx]DEVICES:KIND"],
    "0x8:h200": ["no devices"],
    "8:h2000": ["no kind of device is called 'h2000'", "Did you mean h200?"],
    "8:b20": ["Did you mean b200?"],
    "3x8:h200": ["3 hosts need a network", "ib400"],
    "3x8:h200:ib40": ["no network is called 'ib40'", "Did you mean ib400?"],
    "8:h200:ib400": ["one host has no network"],
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_wrong_text_is_answered_with_the_nearest_right_one(text):
    with pytest.raises(ConfigError) as refusal:
        Topology.parse(text)
    assert [w for w in REFUSED[text] if w not in str(refusal.value)] == []


def test_every_kind_of_the_hardware_table_has_a_short_name():
    assert set(kind_names().values()) == set(HARDWARE)
    assert all(name == name.lower() and " " not in name for name in kind_names())


FILE = """
hosts: 3
devices_per_host: 8
kind: h200
network: {name: our fabric, bandwidth_bps: 45e9, latency_s: 9e-6}
inside: pcie5
nics_per_host: 4
"""


def test_a_file_gives_figures_of_its_own(tmp_path):
    path = tmp_path / "ours.yaml"
    path.write_text(FILE)
    found = Topology.from_file(path)
    assert found == Topology.parse(str(path))
    assert (found.hosts, found.devices_per_host, found.device_kind) == (3, 8, "NVIDIA H200")
    assert (found.network.name, found.network.source) == ("our fabric", "given")
    assert found.network_bps == 45e9 * 4 / 8
    assert found.inside_link is OTHER_INSIDE["pcie5"]
    assert "45 GB/s (given)" in found.text()


WRONG_FILES = {
    "memory: 5": ["memory: unknown key", "Did you mean memory_bytes?"],
    "network: {name: a, bandwith_bps: 1.0, latency_s: 0.0}": ["Did you mean bandwidth_bps?"],
    "network: ib4000": ["no network is called 'ib4000'", "Did you mean ib400?"],
    "inside: nvlink5": ["no link inside a host", "nvlink4"],
    "nics_per_host: many": ["nics_per_host", "integer"],
    "kind: [h200]": ["kind is a list"],
}


@pytest.mark.parametrize("line", WRONG_FILES)
def test_a_wrong_file_is_refused_by_key(tmp_path, line):
    path = tmp_path / "ours.yaml"
    given = ("hosts: 2", "devices_per_host: 8", "kind: h200", "network: ib400")
    kept = [entry for entry in given if entry.split(":")[0] != line.split(":")[0]]
    path.write_text("\n".join([*kept, line]))
    with pytest.raises(ConfigError) as refusal:
        Topology.from_file(path)
    assert str(path) in str(refusal.value) or "called" in str(refusal.value)
    assert [w for w in WRONG_FILES[line] if w not in str(refusal.value)] == []


def test_a_file_of_several_hosts_says_what_joins_them(tmp_path):
    path = tmp_path / "ours.yaml"
    path.write_text("hosts: 2\ndevices_per_host: 8\nkind: h200\n")
    with pytest.raises(ConfigError, match="hosts=2 need a network"):
        Topology.from_file(path)


@pytest.mark.parametrize("kind", INSIDE)
def test_a_link_is_of_a_kind_in_the_hardware_table_and_says_its_source(kind):
    assert kind in HARDWARE
    assert INSIDE[kind].source in ("measured", "datasheet")
    assert f"({INSIDE[kind].source})" in Topology(1, 8, kind, 1).text()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_the_line_rate_of_its_name(name):
    gigabits = int("".join(letter for letter in name if letter.isdigit()))
    assert NETWORKS[name].bandwidth_bps == gigabits * 1e9 / 8
    assert NETWORKS[name].source == "datasheet"


def test_only_what_was_measured_says_so():
    measured = {link.name for link in (*INSIDE.values(), *NETWORKS.values())
                if link.source == "measured"}  # fmt: skip
    assert measured == {"NVLink 4", "shared memory"}


def test_an_unknown_kind_has_no_link_and_no_peak():
    unknown = Topology(2, 8, "any", 16 * 2**30)
    assert unknown.inside_link is None
    assert unknown.peak_flops == {}
    assert "link not known" in unknown.text()
    assert "network not known" in unknown.text()


def test_a_cpu_has_no_published_peak():
    assert Topology.parse("8:cpu").peak_flops == {}
    assert Topology.parse("8:h200").peak_flops["bfloat16"] == 989.4e12


def test_processes_with_equal_parts_are_hosts():
    assert equal_parts([0, 0, 0, 0, 1, 1, 1, 1]) == (2, 4)


def test_processes_with_unequal_parts_are_refused():
    with pytest.raises(ValueError, match=r"\[3, 4\] of the 7 devices"):
        equal_parts([0, 0, 0, 0, 1, 1, 1])
