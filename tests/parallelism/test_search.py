"""A search looks at every legal layout once, ranks by the plan's own seconds, and gives reasons."""

from dataclasses import replace

import pytest

from jaxfound.config.parallel import AXES
from jaxfound.config.params import ParamSpec, ParamTable
from jaxfound.config.run import divisors
from jaxfound.parallelism import PlanError, make_plan
from jaxfound.parallelism.memory import adam_slots
from jaxfound.parallelism.search import meshes_of, ranking_lines, search
from jaxfound.resources.topology import Topology
from tests.models.tiny import model_config, run_config

# Wide enough for every split of four, and heavy enough for the memory to matter.
TABLE = ParamTable(
    (
        ParamSpec("embedding.table", (64, 32), "float32", ("vocab", "embed")),
        ParamSpec("layers.ffn.up.kernel", (2, 32, 4096), "float32", ("layers", "embed", "ffn")),
        ParamSpec("layers.mixer.out.kernel", (2, 4, 8, 32), "float32",
                  ("layers", "heads", "head_dim", "embed")),
        ParamSpec("layers.mixer_norm.scale", (2, 32), "float32", ("layers", None)),
    )
)  # fmt: skip
SLOTS = adam_slots(TABLE)
FOUR = Topology.parse("2x2:h200:ib400")


def config(*, rows=8, length=16, **sections):
    sections = {"precision": {"compute": "bfloat16"}, **sections}
    return run_config(model_config("gqa"), rows=rows, length=length, **sections)


def small(memory_bytes):
    return replace(FOUR, memory_bytes=memory_bytes)


def found(topology=FOUR, **changes):
    return search(config(**changes), topology, params=TABLE, slots=SLOTS)


def of(outcome, candidates):
    return [c for c in candidates if c.outcome == outcome]


def test_every_mesh_of_the_devices_is_looked_at_once():
    meshes = [tuple(m[a] for a in AXES) for m in meshes_of(config(), 12)]
    # data x fsdp x tensor = 12, a dense model having no experts.
    expected = [(1, d, f, 1, 1, t) for d in divisors(12) for f in divisors(12 // d)
                for t in [12 // d // f]]  # fmt: skip
    assert sorted(meshes) == sorted(expected)
    assert len(set(meshes)) == len(meshes)


def test_axes_that_are_not_varied_keep_the_configs_degree():
    fixed = list(meshes_of(config(parallel={"context": 2}), 8))
    assert {m["context"] for m in fixed} == {2}
    assert list(meshes_of(config(parallel={"context": 3}), 8)) == []


@pytest.mark.parametrize("which", [0, 3, -1])
def test_the_rank_is_by_the_seconds_of_the_layouts_own_plan(which):
    ranked = of("ranked", found())
    assert [c.step_s for c in ranked] == sorted(c.step_s for c in ranked)
    one = ranked[which]
    plan = make_plan(config(parallel=dict(one.change)), FOUR, params=TABLE, optimizer_slots=SLOTS)
    assert one.step_s == pytest.approx(plan.compute_s + plan.wire_s, rel=1e-12)
    assert one.total_bytes == plan.ledger.total_bytes
    assert plan.ledger.fits


def test_where_all_fits_no_batch_is_cut_that_need_not_be():
    assert {c.change["num_microbatches"] for c in of("ranked", found())} == {1}


def test_a_loser_says_what_it_spends_its_seconds_on():
    first, *others = of("ranked", found())
    assert first.why == ""
    for other in others:
        more = {k: other.seconds.get(k, 0) - first.seconds.get(k, 0) for k in other.seconds}
        worst = max(more, key=more.__getitem__)
        assert other.why == "as fast" or (other.why.startswith("slower by ") and worst in other.why)


def test_a_layout_that_is_too_large_says_by_how_much_and_of_what():
    tight = found(small(3_000_000))
    large = of("too large", tight)
    assert large
    assert of("ranked", tight)
    for one in large:
        assert one.why.startswith("does not fit by ")
        assert "most is " in one.why
        assert one.total_bytes > 3_000_000
    assert [c.total_bytes for c in large] == sorted(c.total_bytes for c in large)


def test_micro_batches_are_cut_until_they_fit():
    # Rows enough for activations to outweigh the second set of gradients.
    long = {"rows": 64, "length": 128}
    roomy = {c.text(): c for c in of("ranked", found(**long))}
    least = min(c.total_bytes for c in roomy.values()) - int(0.05 * FOUR.memory_bytes)
    for one in of("ranked", found(small(int(least / 0.95) - 1000), **long)):
        assert one.change["num_microbatches"] > 1
        fewer = {**one.change, "num_microbatches": one.change["num_microbatches"] // 2}
        plan = make_plan(config(**long, parallel=fewer), small(int(least / 0.95) - 1000),
                         params=TABLE, optimizer_slots=SLOTS)  # fmt: skip
        assert plan.ledger.fits is False


def test_an_illegal_mesh_gives_the_rule():
    why = {c.text(): c.why for c in of("illegal", found(rows=2))}
    assert "train.batch_size=2 rows do not divide over data=4" in why["parallel.data=4"]
    assert (
        "parallel.tensor=4 does not stay inside a host of 2"
        in (why["parallel.data=1 parallel.tensor=4"])
    )


@pytest.mark.parametrize(
    ("topology", "missing"),
    [
        (Topology.parse("4:cpu"), "peak of cpu"),
        (Topology(1, 4, "NVIDIA H200", 0), "memory"),
        (Topology(2, 2, "NVIDIA H200", 10**9), "network"),
    ],
)
def test_a_topology_without_figures_cannot_be_searched(topology, missing):
    with pytest.raises(PlanError, match=missing):
        found(topology)


def test_the_text_shows_the_best_the_nearest_and_the_refused():
    lines = list(ranking_lines(found(small(3_000_000)), top=2))
    counted = lines[0]
    assert "layouts:" in counted
    assert "fit," in counted
    assert lines[1].startswith("1. ")
    assert "parallel.data=" in lines[2]
    assert sum(line.startswith(("1. ", "2. ", "3. ")) for line in lines) == 2
    assert "too large, the nearest first:" in lines
    assert "refused:" in lines
