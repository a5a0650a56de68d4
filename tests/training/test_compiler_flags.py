"""The compiler's flags of a step: those of its platform, each with a reason, unless told other."""

import pytest

from jaxfound.config.load import load
from jaxfound.face import make_plan
from jaxfound.parallelism.mesh import PASSES_FLAG
from jaxfound.resources.topology import Topology
from jaxfound.training.compiler_flags import (
    FLAGS,
    PRODUCTS_FLAG,
    SCHEDULER_FLAG,
    SLOP_FLAG,
    options_for,
)

CONFIG = "configs/deepseek-v2-lite.yaml"
STAGES = ("parallel.pipeline=4", "parallel.expert=8", "parallel.schedule=dualpipe")
KEYS = ("model.num_layers=9", "parallel.num_microbatches=16", "train.batch_size=128")


def planned(*layout):
    cfg = load(CONFIG, [*KEYS, "parallel.fsdp=1", *layout])
    return make_plan(cfg, Topology.parse("4x8:h200:ib400"))


def options(plan, kind="NVIDIA H200"):
    return options_for(plan, kind)


@pytest.fixture(autouse=True)
def no_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def test_every_flag_says_why_and_every_platform_has_its_row():
    assert set(FLAGS) == {"cuda", "rocm", "tpu", "cpu"}
    flags = [flag for row in FLAGS.values() for flag in row]
    assert all(flag.reason and flag.name.startswith("xla_") for flag in flags)


def test_stages_that_send_tokens_to_experts_are_scheduled_with_95_percent_of_the_memory():
    plan = planned(*STAGES)
    found = options(plan)
    assert found[SCHEDULER_FLAG] is True
    arguments, capacity = plan.ledger.argument_bytes, plan.ledger.capacity_bytes
    # XLA aims at this many per cent of what arguments leave of four fifths of the memory.
    aim = arguments + found[SLOP_FLAG] * (0.8 * capacity - arguments) / 100
    assert aim == pytest.approx(0.95 * capacity, rel=0.01)
    assert aim <= 0.95 * capacity


def test_other_layouts_and_other_platforms_keep_the_compilers_defaults():
    assert options(planned("parallel.expert=8", "parallel.data=4", "train.batch_size=512")) == {}
    assert SCHEDULER_FLAG not in options(
        planned("parallel.pipeline=4", "parallel.data=8", "train.batch_size=128")
    )
    assert set(options(planned(*STAGES), kind="cpu")) == {PASSES_FLAG}


def test_on_one_gpu_cublas_multiplies_and_on_several_the_compiler_chooses():
    alone = make_plan(load("configs/dense-1.3b.yaml"), Topology.parse("1:h200"))
    assert options(alone) == {PRODUCTS_FLAG: False}
    assert options(alone, kind="cpu") == {}
    several = make_plan(load("configs/dense-1.3b.yaml"), Topology.parse("2:h200"))
    assert PRODUCTS_FLAG not in options(several)


def test_what_xla_flags_says_stands(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--{SLOP_FLAG}=110 --{SCHEDULER_FLAG}=false")
    assert options(planned(*STAGES)) == {}
