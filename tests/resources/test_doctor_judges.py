"""Verdicts of the doctor on planted facts: what is wrong is named with its host and its remedy."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxfound.resources.clock import Offset, measure_offset
from jaxfound.resources.control import LocalStore
from jaxfound.resources.preflight import agree, disk, gpu, host, libraries, network, numerics
from jaxfound.resources.preflight.check import Check, check
from jaxfound.resources.preflight.doctor import shifts
from jaxfound.resources.preflight.identity import should_agree

GIGABIT = network.GIGABIT
FAST = network.Route("b", "10.0.0.2", "10.0.0.1", "ib0", 400 * GIGABIT, 4092)


def test_an_absent_process_and_one_that_stopped_answering_are_named() -> None:
    well = agree.check_peers(3, present=[0, 1, 2], lost={})
    assert (well.verdict, well.value, well.remedy) == ("ok", "all 3 came", "")
    bad = agree.check_peers(4, present=[0, 2, 3], lost={3: "flow 1"})
    assert bad.verdict == "fail"
    assert bad.value == "process 1 is absent; process 3 came, but not to 'flow 1'"


def test_the_odd_one_out_is_told_to_come_in_line() -> None:
    told = {0: {"jax": "0.11.2", "numpy": "2.3"}, 1: {"jax": "0.11.2", "numpy": "2.3"}}
    assert [c.verdict for c in agree.check_equal(told, otherwise="fail", title="software")] == [
        "ok"
    ]
    told[2] = {"jax": "0.11.1", "numpy": "2.3"}
    differs, same = agree.check_equal(told, otherwise="fail", title="software")
    assert (differs.name, differs.verdict) == ("jax", "fail")
    assert differs.value == "0.11.2 on processes [0, 1]; 0.11.1 on processes [2]"
    assert differs.remedy == "bring process 2 in line with the others"
    assert same.value == "numpy 2.3"


def test_a_value_that_one_host_lacks_is_a_difference() -> None:
    (differs,) = agree.check_equal(
        {0: {"config": "ab"}, 1: {}}, otherwise="warn", title="variables"
    )
    assert (differs.verdict, differs.value) == (
        "warn",
        "ab on processes [0]; none on processes [1]",
    )


@pytest.mark.parametrize(
    ("offset", "verdict"),
    [
        (Offset(0.0, 0.0), "ok"),
        (Offset(0.09, 0.001), "ok"),
        (Offset(-0.2, 0.01), "warn"),
        # The measurement itself was too slow to tell.
        (Offset(-0.2, 0.15), "ok"),
        (Offset(1.5, 0.01), "fail"),
        (None, "skip"),
    ],
)
def test_a_clock_is_wrong_when_it_is_further_off_than_the_measurement(offset, verdict) -> None:
    found = agree.check_clocks({0: Offset(0.0, 0.0), 1: offset})
    assert found.verdict == verdict


@pytest.mark.parametrize("ahead_s", [0.0, 7.5, -3600.0])
def test_the_offset_of_a_clock_is_found_within_the_error_it_states(ahead_s) -> None:
    import time

    store = LocalStore()
    clocks = {0: time.time, 1: lambda: time.time() + ahead_s, 2: time.time}
    with ThreadPoolExecutor(3) as pool:
        found = list(
            pool.map(
                lambda p: measure_offset(store, process=p, peers=[1, 2], clock=clocks[p]), clocks
            )
        )
    assert found[0] == Offset(0.0, 0.0)
    assert found[1] is not None
    assert abs(found[1].offset_s + ahead_s) <= found[1].error_s < 1


def test_a_clock_without_an_answer_is_not_measured() -> None:
    assert measure_offset(LocalStore(), process=1, peers=[1], limit_s=0.01) is None


def test_verdicts_are_one_where_hosts_agree_and_named_where_they_do_not() -> None:
    fine = check("disk", "ok", "9 GiB", remedy="")
    full = check("disk", "fail", "0 GiB", remedy="free some")
    hosts = {0: "a", 1: "b"}
    assert agree.merged({0: [fine], 1: [fine]}, hosts) == [fine]
    assert agree.merged({0: [full], 1: [full]}, hosts) == [full]
    assert agree.merged({0: [fine], 1: [full]}, hosts) == [full._replace(where="process 1 (b)")]


@pytest.mark.parametrize(
    ("route", "alone", "verdict"),
    [
        (FAST, False, "ok"),
        (FAST._replace(nic_bps=GIGABIT), False, "fail"),
        (FAST._replace(nic_bps=0.0), False, "ok"),
        (FAST._replace(address="127.0.1.1", nic="lo"), False, "fail"),
        (FAST._replace(address="127.0.0.1", nic="lo"), True, "ok"),
        (FAST._replace(address=""), False, "fail"),
        (FAST._replace(source=""), False, "fail"),
    ],
)
def test_a_management_nic_and_loopback_are_no_way_to_another_host(route, alone, verdict) -> None:
    assert network.check_route(route, alone=alone).verdict == verdict


def test_the_way_to_this_host_goes_over_loopback() -> None:
    route = network.route_to("127.0.0.1")
    assert (route.source, route.nic, route.is_loopback) == ("127.0.0.1", "lo", True)
    assert network.route_to("no-such-host.invalid").address == ""


def test_what_was_sent_through_a_socket_has_arrived() -> None:
    with network.Sink() as sink:
        assert network.blast("127.0.0.1", sink.port, seconds=0.01) > 0
    with pytest.raises(OSError, match="refused"):
        network.blast("127.0.0.1", sink.port)


def test_a_slow_host_is_told_from_a_slow_pair() -> None:
    fast, slow = 20 * GIGABIT, 0.1 * GIGABIT
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    one = [network.Flow(a, b, slow if 2 in (a, b) else fast) for a, b in pairs]
    checks = network.check_flows(one, min_bps=GIGABIT)
    assert len(checks) == 6
    assert {c.remedy for c in checks} == {
        "every stream of process 2 is slow: look at its NIC, cable and port"
    }
    pair = [network.Flow(a, b, slow if {a, b} == {1, 2} else fast) for a, b in pairs]
    checks = network.check_flows(pair, min_bps=GIGABIT)
    assert [c.name for c in checks] == ["bandwidth 1 -> 2", "bandwidth 2 -> 1"]
    assert "both NICs" in checks[0].remedy
    (well,) = network.check_flows([network.Flow(0, 1, fast)], min_bps=GIGABIT)
    assert well.verdict == "ok"


def test_every_host_sends_to_every_other_or_to_a_few_of_very_many() -> None:
    assert shifts(4) == (1, 2, 3)
    assert shifts(100) == (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize(
    ("folder", "kind", "networked"),
    [("none/runs", "ext4", False), ("net/runs", "nfs4", True), ("network", "ext4", False)],
)
def test_the_file_system_of_a_folder_is_that_of_the_nearest_mount(
    folder, kind, networked, tmp_path
) -> None:
    for name in ("net", "network"):
        (tmp_path / name).mkdir()
    mounts = f"/dev/sda1 / ext4 rw 0 0\nserver:/net {tmp_path}/net nfs4 rw 0 0\n"
    found = disk.file_system(tmp_path / folder, mounts=mounts)
    assert (found, disk.is_networked(found)) == (kind, networked)
    assert disk.is_networked("fuse.sshfs")


def test_a_local_disk_that_others_see_is_not_local() -> None:
    assert disk.check_local("/nvme", "xfs", others_seen=()).verdict == "ok"
    assert disk.check_local("/nvme", "xfs", others_seen=(3,)).verdict == "fail"
    assert disk.check_local("/nvme", "lustre", others_seen=()).verdict == "fail"


def test_a_shared_disk_that_one_host_does_not_see_is_named() -> None:
    assert disk.check_shared("/s", {0: (0, 1), 1: (0, 1)}).verdict == "ok"
    bad = disk.check_shared("/s", {0: (0,), 1: (0, 1)})
    assert (bad.verdict, bad.value) == ("fail", "/s: process 0 does not see those of [1]")


def test_hosts_that_disturb_each_other_on_the_shared_disk_are_told() -> None:
    fair = {0: disk.Writes(1e9, 0.5e9), 1: disk.Writes(0.0, 0.5e9)}
    assert disk.check_writes(fair).verdict == "ok"
    choked = {0: disk.Writes(1e9, 0.2e9), 1: disk.Writes(0.0, 0.2e9)}
    assert disk.check_writes(choked).verdict == "warn"


def test_marks_are_seen_by_all_who_see_the_folder(tmp_path) -> None:
    for process in (0, 12):
        disk.leave_mark(tmp_path, token="t", process=process)
    assert disk.marks(tmp_path, token="t") == (0, 12)
    disk.remove_mark(tmp_path, token="t", process=0)
    assert disk.marks(tmp_path, token="t") == (12,)
    assert disk.write_speed(tmp_path, process=0, num_bytes=2**20) > 0
    assert len(list(tmp_path.iterdir())) == 1, "what was written is removed"


def verdicts(checks: tuple[Check, ...]) -> list[tuple[str, str]]:
    return [(c.verdict, c.name) for c in checks]


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({}, ("ok", "gpu 0")),
        ({"ecc_errors": 2}, ("fail", "gpu 0: memory errors")),
        ({"rows_pending": True}, ("fail", "gpu 0: memory rows")),
        ({"rows_failed": True}, ("fail", "gpu 0: memory rows")),
        ({"slowed": 0x40 | 0x1}, ("fail", "gpu 0: clocks")),
        # Idle (0x1) and a power cap (0x4) are not illnesses.
        ({"slowed": 0x1 | 0x4}, ("ok", "gpu 0")),
        ({"celsius": 92}, ("warn", "gpu 0: temperature")),
        ({"persistent": False}, ("warn", "gpu 0: persistence")),
        ({"foreign": (123,)}, ("warn", "gpu 0: other processes")),
        ({"links_up": 17, "links_down": 1}, ("fail", "gpu 0: nvlink")),
        ({"links_up": 0, "links_down": 12}, ("ok", "gpu 0")),
    ],
)
def test_what_ails_a_card_is_named(facts, named) -> None:
    assert verdicts(gpu.check_gpu(gpu.Gpu("gpu 0", **facts))) == [named]


@pytest.mark.parametrize(
    ("library", "module", "built_for", "verdict"),
    [
        ("", "", (), "ok"),
        ("580.1", "580.1", (), "ok"),
        ("580.1", "580.1", ("6.8.0-1",), "ok"),
        ("580.1", "580.1", ("6.8.0-0",), "warn"),
        ("580.1", "570.2", (), "fail"),
        ("", "580.1", (), "fail"),
    ],
)
def test_library_module_and_kernel_of_a_driver_belong_together(
    library, module, built_for, verdict
) -> None:
    found = gpu.check_driver(library=library, module=module, kernel="6.8.0-1", built_for=built_for)
    assert found.verdict == verdict


def test_two_files_of_one_library_are_told_and_two_in_one_process_are_refused(tmp_path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "libcudnn.so.9").touch()
    (tmp_path / "a" / "libcudnn.so").symlink_to("libcudnn.so.9")
    there = libraries.library_paths([tmp_path / "a", tmp_path / "b"])
    assert {name: len(paths) for name, paths in there.items()} == {"cudnn": 2}
    maps = (
        f"7f00-7f01 r-xp 0 08:01 1  {there['cudnn'][0]}\n7f02-7f03 r-xp 0 08:01 1  /x/libm.so.6\n"
    )
    loaded = libraries.loaded_libraries(maps)
    assert verdicts(libraries.check_libraries(there, loaded)) == [("warn", "libcudnn")]
    both = {"cudnn": there["cudnn"]}
    assert verdicts(libraries.check_libraries(there, both)) == [("fail", "libcudnn")]


def test_two_cuda_plugins_are_refused() -> None:
    assert libraries.check_plugins(["jax-cuda13-plugin", "jax"]).verdict == "ok"
    assert libraries.check_plugins(["jax-cuda13-plugin", "jax-cuda12-plugin"]).verdict == "fail"


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (host.check_open_files(65536), "ok"),
        (host.check_open_files(1024), "warn"),
        (host.check_locked_memory(-1), "ok"),
        (host.check_locked_memory(65536), "warn"),
        (host.check_shared_memory(64 * 2**20), "warn"),
        (host.check_memory_cap(None, physical=2**40), "ok"),
        (host.check_memory_cap(2**30, physical=2**40), "warn"),
        (host.check_governor("powersave"), "warn"),
    ],
)
def test_limits_that_a_job_will_hit_are_warned_of(found, verdict) -> None:
    assert found.verdict == verdict
    assert bool(found.remedy) is (verdict != "ok")


def test_devices_know_the_answers_and_one_that_does_not_is_named() -> None:
    burned = numerics.burn_in(seconds=0)
    (well,) = numerics.check_burned(burned)
    assert well.verdict == "ok"
    bad = [*burned[:-1], burned[-1]._replace(wrong=1)]
    (named,) = numerics.check_burned(bad)
    assert (named.verdict, named.name) == ("fail", f"arithmetic of {burned[-1].device}")


def test_one_wrong_bit_in_a_product_is_counted() -> None:
    import numpy as np

    rng = np.random.default_rng(1)
    left, right = rng.integers(-4, 5, size=(2, 64, 64)).astype(np.float32)
    answer = left @ right
    assert int(numerics.wrong_entries()(left, right, answer)) == 0
    answer[3, 5] = np.nextafter(answer[3, 5], np.float32(1e9))
    assert int(numerics.wrong_entries()(left, right, answer)) == len(numerics.FORMATS)


def test_variables_of_single_processes_need_not_agree() -> None:
    found = should_agree({"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0", "HOME": "/x"})
    assert found.keys() == {"kernel", "machine", "NCCL_DEBUG"}
