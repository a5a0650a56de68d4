"""Sharded kernels as eight H200s that are not there would run them, in a shard_map over stages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import deviceless
from pallas_kernels.flash_attention import cudnn_call, flash_attention
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.linear import linear
from pallas_kernels.mla_decode import mla_decode

REASON = deviceless.missing()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.usefixtures("optimized"),
]

# One case of each kind in the default run; a step for eight devices takes seconds to compile.
SLOW = pytest.mark.slow
AXES = ("data", "stage", "tensor")
# Placement of x, w and the gradient on data x tensor → shapes of A in the three local products.
STEPS = {
    "columns": ((P("data"), P(None, "tensor"), P("data", None, "tensor")), {"2048,1024"}),
    "rows": (
        (P("data", None, "tensor"), P("tensor"), P("data")),
        {"2048,512", "512,2048", "2048,2048"},
    ),
}


def make_mesh(kind):
    devices = np.array(deviceless.topology("NVIDIA H200", devices_per_host=8)).reshape(2, 2, 2)
    return Mesh(devices, AXES, axis_types=(kind,) * 3)


def compiled_text(step, mesh, operands, *, staged=True):
    """The program for 8 devices; `staged` gives each stage its own part, by a shard_map."""
    if staged:

        @functools.partial(
            jax.shard_map, in_specs=P("stage"), out_specs=P("stage"), axis_names={"stage"}
        )
        def run(*operands):
            return jax.tree.map(lambda x: x[None], step(*(x[0] for x in operands)))

    structs = [
        jax.ShapeDtypeStruct(
            (2, *shape) if staged else shape,
            dtype,
            sharding=NamedSharding(mesh, P("stage", *spec) if staged else spec),
        )
        for shape, dtype, spec in operands
    ]
    with jax.set_mesh(mesh), deviceless.without_cache():
        return jax.jit(run if staged else step).lower(*structs).compile().as_text()


def first_operands(text):
    """The type of the first operand of each Mosaic call."""
    calls = [line for line in text.splitlines() if 'custom_call_target="mosaic_gpu' in line]
    return [line.split("operand_layout_constraints={")[1].split("{")[0] for line in calls]


def linear_step(x, w, grad):
    out, vjp = jax.vjp(lambda x, w: linear(x, w, precision="fp8"), x, w)
    return out, vjp(grad)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("columns", AxisType.Auto),
        ("rows", AxisType.Explicit),
        pytest.param("columns", AxisType.Explicit, marks=SLOW),
        pytest.param("rows", AxisType.Auto, marks=SLOW),
    ],
)
def test_a_stage_of_a_pipeline_multiplies_its_shards_and_gathers_no_operand(name, kind):
    places, local = STEPS[name]
    shapes = ((8, 512, 1024), (1024, 2048), (8, 512, 2048))
    dtypes = (jnp.bfloat16, jnp.float32, jnp.bfloat16)
    operands = list(zip(shapes, dtypes, places, strict=True))
    text = compiled_text(linear_step, make_mesh(kind), operands)
    assert "all-gather" not in text
    found = first_operands(text)
    assert len(found) == 3
    assert {f"f8e4m3fn[{shape}]" for shape in local} <= set(found)
    # One sum over the inner dim's axis, one over the tokens' axis.
    for axis in ("data", "tensor"):
        sums = [x for x in text.splitlines() if " all-reduce" in x and f"{{'{axis}'}}" in x]
        assert any("replica_groups=" in line for line in sums), axis


@pytest.mark.parametrize(
    "staged",
    [pytest.param(True, id="in a stage"), pytest.param(False, id="on the whole mesh", marks=SLOW)],
)
def test_latent_decode_keeps_sequences_and_heads_on_their_devices(staged):
    text = compiled_text(
        lambda q, cache, table, lengths: mla_decode(
            q, cache, block_table=table, lengths=lengths, latent=512, sm_scale=0.1352
        ),
        make_mesh(AxisType.Auto if staged else AxisType.Explicit),
        [
            ((16, 1, 128, 576), jnp.bfloat16, P("data", None, "tensor")),
            ((1024, 64, 576), jnp.bfloat16, P()),
            ((16, 64), jnp.int32, P("data")),
            ((16,), jnp.int32, P("data")),
        ],
        staged=staged,
    )
    assert "all-gather" not in text
    assert first_operands(text)[0] == "bf16[8,64,576]"


# Placement of x, w [G, K, N] and the gradient on tensor → the experts' local shape, up and down.
EXPERTS = {
    "columns": ((P(), P(None, None, "tensor"), P(None, "tensor")), ("8,768,2048", "8,2048,768")),
    "rows": ((P(None, "tensor"), P(None, "tensor"), P()), ("8,1536,1024", "8,1024,1536")),
}


@pytest.mark.parametrize(
    ("name", "precision", "staged"),
    [
        ("columns", "fp8", True),
        pytest.param("rows", "fp8", False, marks=SLOW),
        pytest.param("rows", "bfloat16", True, marks=SLOW),
    ],
)
def test_experts_cut_over_tensor_are_multiplied_where_they_lie(name, precision, staged):
    places, local = EXPERTS[name]

    def step(x, w, grad, sizes):
        out, vjp = jax.vjp(
            lambda x, w: grouped_matmul(x, w, group_sizes=sizes, precision=precision), x, w
        )
        return out, *vjp(grad)

    shapes = ((4096, 2048), (8, 2048, 1536), (4096, 1536))
    operands = [(s, jnp.bfloat16, p) for s, p in zip(shapes, places, strict=True)]
    operands.append(((8,), jnp.int32, P()))
    text = compiled_text(step, make_mesh(AxisType.Auto), operands, staged=staged)
    assert "all-gather" not in text
    calls = [line for line in text.splitlines() if 'custom_call_target="mosaic_gpu' in line]
    assert len(calls) == 3
    layouts = "".join(line.split("operand_layout_constraints=")[1] for line in calls)
    element = "f8e4m3fn" if precision == "fp8" else "bf16"
    assert any(f"{element}[{shape}]" in layouts for shape in local)
    assert f"{element}[8,2048,1536]" not in layouts


@pytest.mark.skipif(
    cudnn_call.refuses_version() is not None, reason=str(cudnn_call.refuses_version())
)
@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=SLOW)])
def test_attention_in_a_stage_keeps_rows_and_heads_on_their_devices(kind):
    def step(q, k, v, ids):
        return flash_attention(
            q, k, v, segment_ids=ids, causal=True, scale=0.1, packed="runs", backend="cudnn"
        )

    heads = ((4, 512, n, 128) for n in (8, 4, 4))
    operands = [(shape, jnp.bfloat16, P("data", None, "tensor")) for shape in heads]
    operands.append(((4, 512), jnp.int32, P("data")))
    text = compiled_text(step, make_mesh(kind), operands)
    assert "all-gather" not in text
    call = next(x for x in text.splitlines() if 'custom_call_target="__cudnn$fmha' in x)
    assert "bf16[2,512,4,128]" in call.split("operand_layout_constraints=")[1]
