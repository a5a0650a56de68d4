"""Layers leave fp8 when it makes a step not finite: the cause is found, told, saved and kept."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.config import load
from jaxfound.config.layer_formats import check_precision, stacks_of
from jaxfound.config.model import ModelConfig
from jaxfound.config.precision import PrecisionConfig, PrecisionRule
from jaxfound.models import describe
from jaxfound.models.build import Arrays, Frame
from jaxfound.models.execution import Execution
from jaxfound.parallelism import build_mesh, make_plan
from jaxfound.resources.checkpoint import CheckpointManager
from jaxfound.training.demote import cause_of, demoted_patterns, make_is_finite, with_demoted
from jaxfound.training.run import run_directory
from tests.models.tiny import model_config, on_device, packed_batch, run_config, weights_of
from tests.training.tiny import DENSE, run, tiny
from tests.training.written import save_run

# One operation, which compiles in a fraction of the time of all.
GATE = PrecisionRule(pattern="layers.ffn.gate", format="fp8")
IN_FP8 = PrecisionConfig(compute="float32", rules=(GATE,))
SPOILT, LEFT = 1, "layers.1.ffn.gate"


def spoilt(arrays):
    """Weights with which fp8 alone is not finite, in the feed-forward of one layer.

    Its input has a channel of 1e30 whose weights are 0, and its weights have a row of 1e30 whose
    input is 0. The product of both scales is beyond float32, and times 0 it is NaN.
    """
    params = dict(arrays.params)
    scale = params["layers.ffn_norm.scale"]
    params["layers.ffn_norm.scale"] = scale.at[SPOILT, 0].set(1e30).at[SPOILT, 1].set(0.0)
    for name in ("gate", "up"):
        kernel = params[f"layers.ffn.{name}.kernel"]
        kernel = kernel.at[SPOILT, 0].set(0.0).at[SPOILT, 1].set(1e30)
        params[f"layers.ffn.{name}.kernel"] = kernel
    # So that gradients, which meet both, stay within float32.
    down = params["layers.ffn.down.kernel"]
    params["layers.ffn.down.kernel"] = down.at[SPOILT].multiply(1e-24)
    return Arrays(params, arrays.buffers)


def scaled_after(a, b, *, out_dtype, precision):
    """The 8-bit product as Hopper's kernel takes it: sums of each 128, times both scales."""
    parts = [x.values.astype(jnp.float32).reshape(*x.values.shape[:-1], -1, 128) for x in (a, b)]
    sums = jnp.einsum("...mkc,nkc->...mnk", *parts, precision=precision)
    rows, _ = b.format.block
    scales = jnp.einsum("...mk,nk->...mnk", a.scales, jnp.repeat(b.scales, rows, axis=0))
    return (sums * scales).sum(axis=-1)[..., : a.rows, : b.rows].astype(out_dtype)


def test_the_layer_is_found_on_the_batch_of_the_bad_step(monkeypatch):
    monkeypatch.setattr("pallas_kernels.fp8_matmul.reference.fp8_matmul", scaled_after)
    cfg = run_config(ModelConfig.model_validate(DENSE), rows=2)
    frame = Frame(cfg.model, execution=Execution(precision=IN_FP8))
    mesh = build_mesh(make_plan(cfg, 1, params=describe(cfg.model)), devices=jax.devices()[:1])
    batch = on_device(packed_batch([[16], [9, 7]], length=16))
    arrays = spoilt(weights_of(frame, seed=1))
    is_finite = make_is_finite(frame, arrays, batch, cfg=cfg, mesh=mesh)
    assert cause_of([0, SPOILT], is_finite) == ((SPOILT,), True)


@pytest.fixture(scope="module")
def demoted(tmp_path_factory):
    """A run that started from spoilt weights with both layers in fp8, and its events."""
    folder = tmp_path_factory.mktemp("demote")
    before = tiny(folder, "name=before", model=DENSE)
    source = save_run(before, spoilt(weights_of(Frame(before.model), seed=1)))
    keys = ("train.steps=6", "optimizer.learning_rate=1e-30", "train.eval_every=3")
    cfg = tiny(folder, f"train.init_from={source}", "train.non_finite=demote", *keys, model=DENSE)
    cfg = cfg.model_copy(update={"precision": IN_FP8})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pallas_kernels.fp8_matmul.reference.fp8_matmul", scaled_after)
        first = run(cfg, stop_after=4)
        return cfg, first, run(cfg)


def of(events, kind):
    return [(e.step, dict(e.values)) for e in events if e.kind == kind]


@pytest.mark.slow
def test_the_layer_whose_fp8_is_not_finite_leaves_it_and_the_run_goes_on(demoted):
    _, events, _ = demoted
    ((step, told),) = of(events, "demoted")
    assert told["patterns"] == [LEFT]
    assert (told["format"], told["bad_step"]) == ("float32", 1)
    assert told["reason"] == "step 1 is not finite with these in fp8, and is without"
    # The second step was on its way in the formats of before.
    assert [n for n, _ in of(events, "non_finite")] == [1, 2]
    assert step == 2
    assert [values["skipped"] for _, values in of(events, "step")] == [True, True, False, False]
    assert np.isfinite(of(events, "eval")[0][1]["eval_loss"])


@pytest.mark.slow
def test_the_record_the_config_and_the_checkpoint_have_the_new_rules(demoted):
    cfg, *_ = demoted
    there = run_directory(cfg)
    kinds = [json.loads(line)["event"] for line in there.metrics.read_text().splitlines()]
    assert kinds.count("demoted") == 1
    rules = load(there.config).precision.rules
    assert [(r.pattern, r.format) for r in rules] == [
        (LEFT, "float32"),
        ("layers.ffn.gate", "fp8"),
    ]
    with CheckpointManager(there.checkpoints, keep=0) as checkpoints:
        assert checkpoints.metadata(4)["demoted"] == [LEFT]


@pytest.mark.slow
def test_a_resumed_run_has_the_rules_that_the_checkpoint_has(demoted):
    """From the config that it was started with, in which both layers are in fp8."""
    cfg, _, resumed = demoted
    assert cfg.precision == IN_FP8
    assert of(resumed, "resume")[0][0] == 4
    assert of(resumed, "non_finite") == of(resumed, "demoted") == []
    assert [values["skipped"] for _, values in of(resumed, "step")] == [False, False]


@pytest.mark.parametrize(
    ("guilty", "expected"),
    [
        (lambda layers: 2 in layers or 5 in layers, (2, 5)),
        # Two layers together: the later one leaves.
        (lambda layers: {1, 4} <= layers, (4,)),
        (lambda layers: len(layers) > 3, (3, 4, 5)),
        (lambda layers: False, ()),
    ],
)
def test_layers_are_put_into_fp8_one_after_another_until_the_step_is_not_finite(guilty, expected):
    cause = cause_of(range(6), lambda layers: not guilty(layers))
    assert cause == (expected, True)


def test_a_cause_outside_fp8_is_told_from_one_inside():
    assert cause_of(range(6), lambda layers: False) == ((), False)


def policy(*rules):
    made = [PrecisionRule(pattern=pattern, format=format) for pattern, format in rules]
    return PrecisionConfig(rules=tuple(made))


@pytest.mark.parametrize(
    ("rules", "layers", "expected"),
    [
        ([("layers.*", "fp8")], [2, 3], ("layers.2-3.*",)),
        # Five segments become three, or one.
        ([("layers.*", "fp8")], [1, 3], ("layers.1-3.*",)),
        ([("layers.0.*", "float32"), ("layers.2.*", "float32"), ("layers.*", "fp8")], [4],
         ("layers.1.*", "layers.3-7.*")),
        # What is in float32 stays there.
        ([("layers.ffn.*", "float32"), ("layers.*", "fp8")], [7],
         ("layers.7.mixer.key", "layers.7.mixer.out", "layers.7.mixer.query",
          "layers.7.mixer.value")),
    ],
)  # fmt: skip
def test_patterns_take_layers_out_of_fp8_in_few_segments(rules, layers, expected):
    table = describe(model_config("gqa", num_layers=8))
    (stack,) = stacks_of(table)
    before = policy(*rules)
    patterns = demoted_patterns(before, layers, [stack])
    assert sorted(patterns) == sorted(expected)
    after = with_demoted(before, patterns)
    check_precision(after, table)
    for n in stack.layers:
        for path in stack.operations:
            was, now = before.format_of(path, n), after.format_of(path, n)
            assert now == was or (was, now) == ("fp8", "bfloat16")
            assert now != "fp8" or n not in layers


def test_a_pipeline_demotes_nothing():
    parallel = {"pipeline": 2, "num_microbatches": 2}
    with pytest.raises(ValueError, match=r"non_finite=demote takes layers .*pipeline=2"):
        run_config(model_config("gqa"), parallel=parallel, train={"non_finite": "demote"})
