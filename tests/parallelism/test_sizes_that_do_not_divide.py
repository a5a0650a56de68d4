"""Sizes that the tensor axis does not divide and that are not refused give the same numbers."""

import json

import pytest

from tests.models.published import DATA
from tests.models.tiny import model_config, packed_batch, relative_error
from tests.parallelism.layouts import on_layout

S25 = json.loads((DATA / "S25" / "layouts.json").read_text())
CASES = {
    **{
        f"{kv} key/value heads on {n} devices": (
            n,
            {"num_heads": kv * n if kv > 1 else 4, "gqa": {"num_kv_heads": kv, "head_dim": 8}},
        )
        for kv, n in S25["kv_heads_tp"]
    },
    **{
        f"{size} ids on {n} devices": (n, {"vocab_size": size, "vocab_multiple": 8})
        for size, n in S25["vocab_tp"]
    },
}
# Heads that divide are in the layouts, and a vocabulary is padded alike for any number of devices.
SLOW = ("2 key/value heads on 2 devices", "250 ids on 4 devices")


@pytest.mark.multidevice
@pytest.mark.parametrize(
    ("num_devices", "changes"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, case in CASES.items()
    ],
)
def test_loss_and_gradients_are_those_of_one_device(num_devices, changes):
    model = model_config("gqa", num_layers=1, **changes)
    batch = packed_batch([[5, 3], [6]], length=8, vocab=model.vocab_size)
    one = on_layout(model, {}, batch)
    many = on_layout(model, {"tensor": num_devices}, batch)
    assert many.loss == pytest.approx(one.loss, rel=1e-5)
    errors = {path: relative_error(grad, one.grads[path]) for path, grad in many.grads.items()}
    assert {path: e for path, e in errors.items() if e > 1e-5} == {}
