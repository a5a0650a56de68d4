"""The full lattice of layouts: which there are, and, slowly, that each equals one device."""

import json
from pathlib import Path

import jax
import pytest

from jaxfound.config import load
from jaxfound.parallelism.pipeline.builders import SCHEDULES
from jaxfound.training.lattice import (
    DEFAULT_SCHEDULE,
    in_slice,
    layouts,
    verify_lattice,
    write_lattice,
)
from jaxfound.training.verify import Finding

ROOT = Path(__file__).parent.parent.parent
# Of the tiny models: what a slice costs is a few minutes on two cores.
NUM_SLICES = 32
NAMES = ("tiny-mla-moe", "tiny-dense")


def config(name):
    return load(ROOT / "configs" / f"{name}.yaml")


@pytest.mark.parametrize(
    ("name", "num_meshes", "num_with_fsdp"), [("tiny-mla-moe", 25, 11), ("tiny-dense", 14, 7)]
)
def test_every_mesh_has_every_stage_and_micro_batch_once(name, num_meshes, num_with_fsdp):
    found = [one for one in layouts(config(name)) if "pipeline" not in one]
    assert len(found) == 2 * (num_meshes - num_with_fsdp + 4 * num_with_fsdp)
    assert len({tuple(sorted(one.items())) for one in found}) == len(found)


@pytest.mark.parametrize(
    ("name", "num_meshes", "num_with_fsdp"), [("tiny-mla-moe", 16, 5), ("tiny-dense", 11, 4)]
)
def test_every_mesh_with_stages_has_every_schedule(name, num_meshes, num_with_fsdp):
    found = [one for one in layouts(config(name)) if "pipeline" in one]
    of_stages = [one for one in found if one["zero_stage"] != 2]
    assert len(found) - len(of_stages) == len(SCHEDULES) * num_meshes
    assert len(of_stages) == 2 * num_with_fsdp
    assert {one["schedule"] for one in of_stages} == {DEFAULT_SCHEDULE}
    assert len({tuple(sorted(one.items())) for one in found}) == len(found)


def test_slices_share_all_layouts_and_no_layout():
    items = list(range(23))
    slices = [in_slice(items, (number, 5)) for number in range(1, 6)]
    assert sorted(item for some in slices for item in some) == items
    with pytest.raises(ValueError, match="6/5"):
        in_slice(items, (6, 5))


def test_results_of_slices_stand_side_by_side_and_name_what_failed(tmp_path):
    path = tmp_path / "lattice.json"
    good, bad = Finding("loss", True, ""), Finding("fsdp=2 is real", False, "nothing cross it")
    for number in (1, 2):
        write_lattice([({"fsdp": 2}, [good, bad])], path, name="tiny", part=(number, 2))
    slices = json.loads(path.read_text())["slices"]
    assert [one["slice"] for one in slices] == ["1/2", "2/2"]
    (layout,) = slices[0]["layouts"]
    assert layout == {
        "layout": "parallel.fsdp=2",
        "devices": 2,
        "fails": ["fsdp=2 is real: nothing cross it"],
    }
    assert "commit" in slices[0]


@pytest.mark.slow
@pytest.mark.multidevice
@pytest.mark.parametrize("number", range(1, NUM_SLICES + 1))
@pytest.mark.parametrize("name", NAMES)
def test_every_layout_is_equal_to_one_device_and_really_parallel(name, number):
    """Results are added to runs/lattice.json, each slice with its commit."""
    part = (number, NUM_SLICES)
    found = list(verify_lattice(config(name), part=part, devices=jax.devices()))
    write_lattice(found, ROOT / "runs" / "lattice.json", name=name, part=part)
    assert [(layout, f) for layout, some in found for f in some if not f.holds] == []
