"""Loss and gradients are means over tokens, whatever rows, micro-batches and devices hold them.

The right values are of an independent implementation (case S01): four rows with 3, 7, 1 and 12
counted targets. A mean of the means of rows would be 6.478461.
"""

import json

import numpy as np
import pytest

from jaxfound.data.batch import Batch
from jaxfound.models.weights import load_weights, open_hub
from jaxfound.parallelism import PlanError
from tests.models.published import DATA, published
from tests.parallelism.layouts import on_layout

CASE = DATA / "S01"
LEGAL = [(4, 1), (4, 4), (2, 2), (1, 1)]
# Between those above.
LEGAL_TOO = [(4, 2), (2, 1)]
# Published name, and the layer inside our stack.
CHECKED = {
    "model.norm.weight": ("final_norm.scale", None),
    "model.layers.1.self_attn.k_proj.weight": ("layers.mixer.key.kernel", 1),
    "model.layers.2.post_attention_layernorm.weight": ("layers.ffn_norm.scale", 2),
}
pytestmark = pytest.mark.multidevice


@pytest.fixture(scope="module")
def model():
    hub = open_hub(published("S09/llama_base"))
    return hub.model, load_weights(hub)


@pytest.fixture(scope="module")
def rows():
    case = np.load(CASE / "rows.npz")
    counted = case["target_mask"].astype(bool)
    tokens = case["tokens"]
    return Batch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        positions=np.broadcast_to(np.arange(12, dtype=np.int32), (4, 12)),
        segment_ids=counted.astype(np.int32),
        loss_mask=counted,
    )


@pytest.fixture(scope="module")
def expected():
    return json.loads((CASE / "expected.json").read_text())


def run(model, batch, *, rows_at_once=4, data=1, **others):
    cfg, arrays = model
    pieces = len(batch.tokens) // rows_at_once
    parallel = {"data": data, "num_microbatches": pieces, **others}
    return on_layout(cfg, parallel, batch, arrays=arrays)


@pytest.mark.parametrize(
    ("rows_at_once", "data"),
    [*LEGAL, *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in LEGAL_TOO)],
)
def test_loss_and_gradients_are_the_published_token_means(
    model, rows, expected, rows_at_once, data
):
    check(run(model, rows, rows_at_once=rows_at_once, data=data), expected)


@pytest.mark.parametrize(
    "layout",
    [
        {"context": 2, "fsdp": 2, "zero_stage": 1},
        pytest.param({"context": 3, "data": 2}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "tensor": 2, "zero_stage": 2}, marks=pytest.mark.slow),
    ],
)
def test_they_are_when_other_axes_cut_rows_and_weights(model, rows, expected, layout):
    check(run(model, rows, rows_at_once=2, **layout), expected)


def check(result, expected):
    assert result.loss == pytest.approx(expected["loss"], abs=1e-4)
    assert result.norm == pytest.approx(expected["grad_global_norm"], abs=1e-4)
    published = np.load(CASE / "grads.npz")
    for name, (path, layer) in CHECKED.items():
        ours = result.grads[path] if layer is None else result.grads[path][layer]
        ours = ours.reshape(ours.shape[0], -1).T if ours.ndim == 3 else ours
        np.testing.assert_allclose(ours, published[name], rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(("rows_at_once", "data"), [(2, 4), (1, 2), (1, 4)])
def test_fewer_rows_at_once_than_devices_are_refused(model, rows, rows_at_once, data):
    with pytest.raises(PlanError, match=f"a micro-batch of {rows_at_once} rows"):
        run(model, rows, rows_at_once=rows_at_once, data=data)


def test_rows_and_microbatches_that_count_nothing_change_nothing(model, rows, expected):
    """Eight rows in micro-batches of two: four of them, so two whole micro-batches, are padding."""
    padded = Batch(*(np.concatenate([a, np.zeros_like(a)]) for a in rows))
    # Row i is in micro-batch i % 4: order the rows so that two micro-batches count nothing.
    order = [0, 1, 4, 5, 2, 3, 6, 7]
    result = run(model, Batch(*(a[order] for a in padded)), rows_at_once=2)
    assert result.loss == pytest.approx(expected["loss"], abs=1e-4)
    assert result.norm == pytest.approx(expected["grad_global_norm"], abs=1e-4)


def test_the_ids_of_padding_change_nothing(model, rows, expected):
    fill = np.random.default_rng(0).integers(0, 256, rows.tokens.shape, dtype=np.int32)
    other = rows._replace(
        tokens=np.where(rows.segment_ids > 0, rows.tokens, fill),
        targets=np.where(rows.loss_mask, rows.targets, fill),
    )
    before, after = run(model, rows), run(model, other)
    assert after.loss == before.loss
    assert after.norm == pytest.approx(before.norm, rel=1e-6)
    assert after.loss == pytest.approx(expected["loss"], abs=1e-4)
