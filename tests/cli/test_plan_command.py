"""`jaxfound plan`: every YAML in configs/ explained on its cluster, and the exit codes."""

import json
from pathlib import Path

import pytest

from jaxfound.cli.main import main
from jaxfound.config import load
from jaxfound.face import make_plan
from jaxfound.parallelism.search import meshes_of
from jaxfound.resources.topology import Topology

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
# Golden file: config, topology, overrides.
PLANS = {
    "tiny-dense": ("tiny-dense", "8:cpu", ()),
    "tiny-mla-moe": ("tiny-mla-moe", "8:cpu", ()),
    "smollm2-135m": ("smollm2-135m", "8:h200", ()),
    "llama3-8b": ("llama3-8b", "8:h200", ()),
    "deepseek-v2-lite": ("deepseek-v2-lite", "8:h200", ()),
    "deepseek-v3": ("deepseek-v3", "32x8:h200:ib400", ()),
    "dense-1.3b": ("dense-1.3b", "1:h200", ()),
    "dense-2.7b": ("dense-2.7b", "1:h200", ()),
    "moe-2.8b": ("moe-2.8b", "1:h200", ()),
    "moe-2.8b-dense": ("moe-2.8b-dense", "1:h200", ()),
    "dense-100m": ("dense-100m", "1:h200", ()),
    "dense-7b-width": ("dense-7b-width", "1:h200", ()),
    "50b": ("50b", "3x8:h200:ib400", ()),
    "50b-3x8": ("50b-3x8", "3x8:h200:ib400", ()),
    "50b-3x8-zero": ("50b-3x8-zero", "3x8:h200:ib400", ()),
    "50b-3x8-25gbe": ("50b-3x8-zero", "3x8:h200:eth25", ()),
}


def plan_of(name):
    config, topology, overrides = PLANS[name]
    cfg = load(ROOT / "configs" / f"{config}.yaml", overrides)
    return make_plan(cfg, Topology.parse(topology))


@pytest.mark.parametrize("name", PLANS)
def test_a_configs_explanation_is_the_golden_one(name):
    assert plan_of(name).explain() + "\n" == (GOLDEN / f"plan-{name}.txt").read_text()


def test_every_config_has_a_golden_explanation():
    planned = {config for config, _, _ in PLANS.values()}
    assert planned == {path.stem for path in (ROOT / "configs").glob("*.yaml")}


def run(monkeypatch, capsys, *args):
    """What is printed, what is complained of, and the exit code."""
    # The root logger belongs to the test runner here.
    monkeypatch.setattr("jaxfound.resources.logs.configure_logging", lambda level: None)
    with pytest.raises(SystemExit) as left:
        main(["plan", *map(str, args)])
    printed = capsys.readouterr()
    return printed.out, printed.err, left.value.code


LAUNCH = ROOT / "configs" / "50b-3x8.yaml"
WITHOUT_STAGES = ROOT / "configs" / "50b-3x8-zero.yaml"
TINY = ROOT / "configs" / "tiny-dense.yaml"


def test_the_command_prints_the_plans_explanation(monkeypatch, capsys):
    out, _, code = run(monkeypatch, capsys, LAUNCH, "--topology", "3x8:h200:ib400")
    assert code == 0
    assert out == (GOLDEN / "plan-50b-3x8.txt").read_text()


def test_a_plan_that_does_not_fit_exits_with_one(monkeypatch, capsys):
    out, _, code = run(monkeypatch, capsys, LAUNCH, "--topology", "3x8:h100:ib400")
    assert code == 1
    assert "verdict: does not fit" in out
    assert "way out: more devices" in out


def test_a_layout_that_is_not_legal_exits_with_two(monkeypatch, capsys):
    _, err, code = run(monkeypatch, capsys, LAUNCH, "parallel.tensor=3", "--topology",
                       "3x8:h200:ib400")  # fmt: skip
    assert code == 2
    assert "error: " in err


def test_an_unknown_kind_of_device_exits_with_two(monkeypatch, capsys):
    _, err, code = run(monkeypatch, capsys, TINY, "--topology", "8:h20O0")
    assert code == 2
    assert "Did you mean h200?" in err


def test_the_json_is_the_plan_with_its_version(monkeypatch, capsys):
    out, _, code = run(monkeypatch, capsys, LAUNCH, "--topology", "3x8:h200:ib400", "--json")
    assert code == 0
    said, plan = json.loads(out), plan_of("50b-3x8")
    assert said["format_version"] == plan.format_version
    assert said["mesh"] == {"pipeline": 4, "data": 1, "fsdp": 3, "expert": 1, "context": 1,
                            "tensor": 2}  # fmt: skip
    assert said["schedule"] == "paired_1f1b"
    assert said["pipeline"]["ticks"] == 14
    assert said["memory_bytes"]["parameters"] == plan.ledger.of("parameters")
    assert said["memory_bytes"]["total"] == plan.ledger.total_bytes
    assert said["argument_bytes"] == plan.ledger.argument_bytes
    assert said["fits"] is True
    assert [(w["axis"], w["collective"]) for w in said["wires"]] == [
        (w.axis, w.collective) for w in plan.wires
    ]
    assert said["topology"]["network"]["name"] == "ib400"


SEARCHED = (TINY, "precision.compute=bfloat16", "--topology", "4:h200", "--search")


def test_a_search_ranks_every_mesh(monkeypatch, capsys):
    out, _, code = run(monkeypatch, capsys, *SEARCHED, "--json")
    assert code == 0
    said = json.loads(out)
    assert said["format_version"] == 1
    cfg = load(TINY)
    wanted = {tuple(m.values()) for m in meshes_of(cfg, 4)}
    axes = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
    assert {tuple(one["change"][a] for a in axes) for one in said["layouts"]} == wanted


def test_a_search_shows_the_first_ranks(monkeypatch, capsys):
    out, _, code = run(monkeypatch, capsys, *SEARCHED, "--top", "2")
    assert code == 0
    assert "1 host x 4 NVIDIA H200" in out
    assert "\n1. " in out
    assert "\n2. " in out
    assert "\n3. " not in out


def test_a_search_in_which_nothing_fits_exits_with_one(monkeypatch, capsys):
    out, _, code = run(monkeypatch, capsys, WITHOUT_STAGES, "--topology", "1x2:h200",
                       "--search")  # fmt: skip
    assert code == 1
    assert "0 fit" in out


def test_without_a_topology_the_plan_is_for_this_machine(monkeypatch, capsys):
    out, _, code = run(monkeypatch, capsys, TINY)
    assert code == 0
    assert "8 cpu (8 devices" in out


def test_a_cluster_that_nobody_named_is_asked_for(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(Path(__file__).parents[2] / "configs" / "50b-3x8.yaml")])
    assert ended.value.code == 2
    assert "--topology 3x8:h200:ib400" in " ".join(capsys.readouterr().err.split())
