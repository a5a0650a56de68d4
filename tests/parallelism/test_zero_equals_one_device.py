"""ZeRO changes who keeps which part, never a number: each stage against one device."""

import pytest

from jaxfound.communication import axes_crossed, collectives
from jaxfound.config.parallel import AXES
from jaxfound.models import describe
from tests.models.tiny import relative_error
from tests.parallelism.zero_stages import LAYOUTS, STAGES, model_of, result_of

pytestmark = pytest.mark.multidevice

# Of the small model the first stage and the last. Latent attention and experts have every stage in
# test_every_pair_of_axes.py, and layouts of three axes stage 3.
QUICK = [("dense", 1), ("dense", 3), ("three_layers", 3)]


def cases(*models):
    return [
        pytest.param(model, stage, marks=[] if (model, stage) in QUICK else [pytest.mark.slow])
        for model in models
        for stage in STAGES
    ]


each_case = pytest.mark.parametrize(("model", "stage"), cases(*LAYOUTS))
# float32 sums in another order.
ROUNDING = 1e-5
# An update is element by element; only the norm that clips is summed in another order.
UPDATE = 1e-6


def crossed(result):
    sizes = dict(zip(AXES, result.plan.degrees, strict=True))
    found = [(c, axes_crossed(c, sizes)) for c in collectives(result.text)]
    return {(c.kind, axes) for c, axes in found if not c.is_local}


@each_case
def test_loss_norm_and_every_gradient_are_those_of_one_device(model, stage):
    ours, one = result_of(model, stage), result_of(model, None)
    assert ours.loss == pytest.approx(one.loss, rel=ROUNDING)
    assert ours.norm == pytest.approx(one.norm, rel=ROUNDING)
    errors = {path: relative_error(grad, one.grads[path]) for path, grad in ours.grads.items()}
    assert {path: e for path, e in errors.items() if e > ROUNDING} == {}


@each_case
def test_identical_gradients_move_parameters_and_moments_alike(model, stage):
    ours, one = result_of(model, stage), result_of(model, None)
    errors = {path: relative_error(p, one.params[path]) for path, p in ours.params.items()}
    assert {path: e for path, e in errors.items() if e > UPDATE} == {}
    for a, b in zip(ours.moments, one.moments, strict=True):
        assert relative_error(a, b) <= UPDATE


def elements(model, *, over_fsdp):
    """Elements of the parameters on one device, by hand."""
    degrees = LAYOUTS[model]
    total = 0
    for spec in (s for s in describe(model_of(model)) if s.kind == "param"):
        cut = 1
        if over_fsdp and {"embed", "latent"} & set(spec.dims):
            cut *= degrees["fsdp"]
        if {"vocab", "heads", "kv_heads", "ffn"} & set(spec.dims):
            cut *= degrees.get("tensor", 1)
        total += spec.size // cut
    return total


@pytest.mark.parametrize(("model", "stage"), cases("dense", "experts"))
def test_each_device_keeps_what_the_stage_leaves_it_to_the_byte(model, stage):
    whole, shared = (4 * elements(model, over_fsdp=cut) for cut in (False, True))
    assert result_of(model, stage).bytes == {
        "parameters": shared if stage >= 3 else whole,
        "gradients": shared if stage >= 2 else whole,
        "moments": 2 * (shared if stage >= 1 else whole),
    }
    assert shared < 0.6 * whole


@pytest.mark.parametrize(("model", "stage"), cases("three_layers"))
def test_where_channels_do_not_divide_the_hidden_ones_or_the_layers_do(model, stage):
    ffn, attention, rest = 3 * 3 * 32 * 48, 3 * 32 * (2 * 32 + 2 * 16), 64 * 32 + 7 * 32
    whole = 4 * (ffn + attention + rest)
    shared = 4 * (ffn // 3 + attention // 3 + rest)
    assert result_of(model, stage).bytes == {
        "parameters": 4 * (ffn // 3 + attention + rest) if stage >= 3 else whole,
        "gradients": shared if stage >= 2 else whole,
        "moments": 2 * (shared if stage >= 1 else whole),
    }


@pytest.mark.parametrize(("model", "stage"), cases("dense"))
def test_this_backend_sums_whole_and_takes_its_part(model, stage):
    """The CPU's compiler has no reduce_scatter for a partitioned program; a GPU's does."""
    kinds = {kind for kind, axes in crossed(result_of(model, stage)) if axes == ("fsdp",)}
    assert kinds == {"all_reduce"} | ({"all_gather"} if stage else set())
