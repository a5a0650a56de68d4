"""Attention as eight H200s that are not there would run it: rows and heads stay local."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from pallas_kernels import deviceless
from pallas_kernels.flash_attention import cudnn_call
from tests.pallas_kernels.attention_cases import with_gradients

REASON = deviceless.missing() or cudnn_call.refuses_version()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.usefixtures("optimized"),
]

# (B, T, N, K, H, V), with segments?
STEPS = {
    "packed, grouped heads": ((4, 512, 8, 4, 128, 128), True),
    "unpacked, latent heads": ((4, 512, 8, 8, 192, 128), False),
}


@pytest.mark.parametrize(
    "name",
    ["packed, grouped heads", pytest.param("unpacked, latent heads", marks=pytest.mark.slow)],
)
def test_a_sharded_step_calls_cudnn_on_its_shards_and_moves_nothing(name):
    (b, t, n, k, h, v), packed = STEPS[name]
    devices = np.array(deviceless.topology("NVIDIA H200", devices_per_host=8)).reshape(2, 4)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def struct(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, jax.P(*axes)))

    operands = [
        struct((b, t, heads, dim), jnp.bfloat16, "data", None, "tensor")
        for heads, dim in ((n, h), (k, h), (k, v), (n, v))
    ]
    ids = struct((b, t), jnp.int32, "data") if packed else None

    def step(q, k, v, grad, ids):
        given = {"packed": "runs", "backend": "cudnn", "causal": True}
        return with_gradients(q, k, v, grad, ids, None, **given)

    with jax.set_mesh(mesh), deviceless.without_cache():
        text = jax.jit(step).lower(*operands, ids).compile().as_text()
    for movement in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert movement not in text
    calls = [line for line in text.splitlines() if 'custom_call_target="__cudnn$fmha' in line]
    # Packed rows: for those that are one document each, and for runs.
    assert len(calls) == (4 if packed else 2)
    local_q = f"bf16[{b // 2},{t},{n // 4},{h}]"
    assert all(local_q in line.split("operand_layout_constraints=")[1] for line in calls)
