import tomllib
from pathlib import Path

import pytest

from jaxfound.resources.preflight import host as preflight

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_ranges_are_those_of_the_project_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [d for d in project["dependencies"] if d.split(">")[0] in preflight.VERSION_RANGES]
    ranges = preflight.VERSION_RANGES.items()
    assert declared == [f"{name}>={low},<{high}" for name, (low, high) in ranges]
    assert project["requires-python"] == ">=" + ".".join(map(str, preflight.MIN_PYTHON))


@pytest.mark.parametrize(
    ("found", "ok"),
    [
        ("0.11.1", False),
        ("0.11.2", True),
        ("0.11.10", True),
        ("0.11.2.dev20260101", True),
        ("0.12.0rc1", False),
        ("0.12", False),
        ("1.0", False),
        ("unknown", False),
    ],
)
def test_a_version_is_compared_as_numbers(found, ok):
    check = preflight.check_versions({"jax": found})[0]
    assert (check.name, check.ok) == ("jax", ok)
    assert check.value == found
    assert check.remedy == ("" if ok else 'install it: pip install "jax>=0.11.2,<0.12"')


def test_a_package_that_is_not_installed_is_said_to_be_so():
    assert preflight.check_versions({})[1].value == "not installed"


@pytest.mark.parametrize(("found", "ok"), [((3, 11, 9), False), ((3, 12, 0), True), ((4, 0), True)])
def test_an_old_interpreter_is_refused(found, ok):
    assert preflight.check_python(found).ok is ok


def test_this_environment_passes_every_check(tmp_path):
    checks = preflight.check_host(tmp_path / "runs" / "new", needed_bytes=1)
    assert [check for check in checks if not check.ok] == []
    assert not (tmp_path / "runs").exists(), "a check leaves nothing behind"


def test_a_folder_that_cannot_hold_files_is_found_by_trying():
    # /proc refuses new files to everyone, root included.
    check = preflight.check_writable(Path("/proc/self"))
    assert not check.ok
    assert "runs_dir" in check.remedy


def test_a_full_disk_is_found_before_the_run(tmp_path):
    check = preflight.check_free_disk(tmp_path, needed_bytes=10**18)
    assert not check.ok
    assert "the run needs 931322574.62 GiB" in check.text()
    assert preflight.check_free_disk(tmp_path / "new" / "run", needed_bytes=0).ok


@pytest.mark.parametrize(("asked", "ok"), [(8, True), (4, False), (16, False)])
def test_the_layout_has_as_many_devices_as_there_are(asked, ok):
    check = preflight.check_devices(asked, found=8, kind="cpu")
    assert check.ok is ok
    assert f"asks for {asked} devices, here are 8 (cpu)" in check.value
