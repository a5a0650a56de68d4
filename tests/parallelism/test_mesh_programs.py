"""What every program on a mesh is compiled with, by platform."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.parallelism.mesh import PASSES_FLAG, PROMOTION, jit_on_mesh, program_options


def mesh_of(platform, size):
    devices = np.array([SimpleNamespace(platform=platform)] * size)
    return SimpleNamespace(size=size, devices=devices)


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        (None, {}),
        (mesh_of("cpu", 1), {}),
        (mesh_of("gpu", 8), {}),
        (mesh_of("cpu", 2), {PASSES_FLAG: PROMOTION}),
    ],
)
def test_several_cpu_devices_leave_out_the_pass_that_aborts(mesh, expected):
    assert program_options(mesh) == expected


@pytest.mark.multidevice
def test_shards_add_up_bfloat16_without_that_pass():
    """Where XLA would end the process is `tests/training/test_verify.py`'s run as it is."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    cut, whole = jax.P("data"), jax.P()
    total = jax.shard_map(
        lambda x: jax.lax.psum(x.sum(keepdims=True), "data"),
        mesh=mesh,
        in_specs=cut,
        out_specs=whole,
    )
    given = jnp.arange(8, dtype=jnp.bfloat16)
    found = jit_on_mesh(total, mesh, out_shardings=jax.NamedSharding(mesh, whole))(given)
    assert found.dtype == jnp.bfloat16
    assert float(found[0]) == 28.0
