"""Every Hopper kernel at every tile becomes machine code for an H200 that is not there.

No spilled registers and no wgmma that waits: both halve the speed and neither changes a result.
"""

import os
from dataclasses import replace
from itertools import batched

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pallas_kernels import deviceless, hardware, tuning
from pallas_kernels.deviceless import DevicelessError, read_assembler
from pallas_kernels.fp8_matmul import mosaic_gpu
from pallas_kernels.fp8_matmul.mosaic_decode import DecodeTile, decode_product
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.hopper_product import Tile
from pallas_kernels.hopper_scaled import Operands, block_scaled_product
from pallas_kernels.linear import linear
from pallas_kernels.mla_decode import mla_decode

REASON = deviceless.missing()
needs_plugin = pytest.mark.skipif(REASON is not None, reason=str(REASON))
pytestmark = pytest.mark.usefixtures("optimized")
F8 = jnp.float8_e4m3fn

# The shipped table's tiles: what is left when the order of the walk is taken out.
TUNED = [dict(s) for (op, _), s in tuning.shipped("NVIDIA H200").entries if op == "fp8_matmul"]
PERSISTENT = sorted(
    {replace(Tile(**s), snake=1) for s in TUNED if "columns" in s} | {*mosaic_gpu.TILES}, key=str
)
# Few rows: the most that a wgmma takes need the most registers, and a single block of them none.
DECODE = [
    *(
        (tile, 128)
        for tile in sorted({DecodeTile(**s) for s in TUNED if "num_splits" in s}, key=str)
    ),
    *((tile, 8) for tile in mosaic_gpu.DECODE_TILES[::4]),
]

SPILLING = """ptxas info    : Function properties for kernel
    16 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"""


def test_the_assembler_report_counts_kernels_spills_and_serialised_products():
    report = read_assembler(SPILLING)
    assert (report.num_kernels, report.spill_bytes, len(report.serialized)) == (2, 40, 1)


def test_a_card_that_cannot_be_described_is_refused_by_name():
    with pytest.raises(DevicelessError, match=r"A100|aot"):
        deviceless.topology("NVIDIA A100")


@needs_plugin
@pytest.mark.parametrize("kind", deviceless.kinds())
def test_a_product_is_compiled_for_every_kind_that_can_be_described(kind):
    (device,) = deviceless.topology(kind)
    shape = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16, sharding=SingleDeviceSharding(device))
    with deviceless.without_cache():
        compiled = jax.jit(lambda x: x @ x).lower(shape).compile()
    assert device.device_kind == kind
    assert compiled.memory_analysis().argument_size_in_bytes == 128 * 128 * 2


@pytest.fixture(scope="module")
def place():
    return SingleDeviceSharding(deviceless.topology("NVIDIA H200")[0])


def assemble(function, *shapes, place, capfd):
    arguments = [jax.ShapeDtypeStruct(s, d, sharding=place) for s, d in shapes]
    capfd.readouterr()
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    try:
        with deviceless.without_cache():
            jax.jit(function).lower(*arguments).compile()
    finally:
        del os.environ["MOSAIC_GPU_DUMP_PTXAS"]
    return read_assembler("".join(capfd.readouterr()))


def check_clean(report, *, num_kernels=1):
    assert report.num_kernels == num_kernels
    assert report.spill_bytes == 0
    assert not report.serialized


@needs_plugin
@pytest.mark.parametrize("by_row", [False, True], ids=["weights", "wgrad"])
@pytest.mark.parametrize("tile", PERSISTENT, ids=str)
def test_the_persistent_kernel_assembles_without_spills(tile, by_row, place, capfd):
    m, n, k = 512, 2112, 1024
    out_dtype = jnp.float32 if by_row else jnp.bfloat16
    scales = (k // 128, n) if by_row else (-(-n // 128), k // 128)
    report = assemble(
        lambda a, b, a_scales, b_scales: block_scaled_product(
            a,
            b,
            a_scales=a_scales,
            b_scales=b_scales,
            b_scales_by_row=by_row,
            num_columns=n,
            tile=tile,
            num_cores=132,
            out_dtype=out_dtype,
        ),
        ((m, k), F8),
        ((n, k), F8),
        ((k // 128, m), jnp.float32),
        (scales, jnp.float32),
        place=place,
        capfd=capfd,
    )
    check_clean(report)


@needs_plugin
def test_a_sum_of_products_assembles_without_spills(place, capfd):
    m, n, ks = 512, 2112, (1024, 256, 384)

    def run(*arrays):
        operands = [Operands(*each) for each in batched(arrays[:-1], 3)]
        return block_scaled_product(
            *operands[0],
            b_scales=arrays[-1],
            b_scales_by_row=False,
            num_columns=n,
            tile=mosaic_gpu.TILES[0],
            num_cores=132,
            out_dtype=jnp.bfloat16,
            added=operands[1:],
        )

    shapes = [
        ((rows, columns), dtype)
        for k in ks
        for rows, columns, dtype in ((m, k, F8), (n, k, F8), (k // 128, m, jnp.float32))
    ]
    b_scales = ((-(-n // 128), sum(ks) // 128), jnp.float32)
    check_clean(assemble(run, *shapes, b_scales, place=place, capfd=capfd))


@needs_plugin
@pytest.mark.parametrize(("tile", "m"), DECODE, ids=str)
def test_the_decode_kernel_assembles_without_spills(tile, m, place, capfd):
    n, k = 2176, 7168
    report = assemble(
        lambda a, b, a_scales, b_scales: decode_product(
            a,
            b,
            a_scales=a_scales,
            b_scales=b_scales,
            num_columns=n,
            tile=tile,
            num_cores=132,
            out_dtype=jnp.bfloat16,
        ),
        ((m, k), F8),
        ((n, k), F8),
        ((k // 128, m), jnp.float32),
        ((n // 128, k // 128), jnp.float32),
        place=place,
        capfd=capfd,
    )
    check_clean(report)


def check_grouped(precision, place, capfd):
    m, n, k, num_groups = 1024, 1536, 2048, 8

    def run(x, w, grad, sizes):
        out, vjp = jax.vjp(
            lambda x, w: grouped_matmul(x, w, group_sizes=sizes, precision=precision), x, w
        )
        return out, *vjp(grad)

    with hardware.target("NVIDIA H200"):
        report = assemble(
            run,
            ((m, k), jnp.bfloat16),
            ((num_groups, k, n), jnp.bfloat16),
            ((m, n), jnp.bfloat16),
            ((num_groups,), jnp.int32),
            place=place,
            capfd=capfd,
        )
    assert report.num_kernels == 3
    assert report.spill_bytes == 0
    assert not report.serialized


@needs_plugin
@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_grouped_products_assemble_without_spills_forward_and_backward(precision, place, capfd):
    check_grouped(precision, place, capfd)


@needs_plugin
@pytest.mark.parametrize(
    ("num_heads", "num_queries"),
    [(128, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((16, 1), (64, 2)))],
)
def test_latent_decode_assembles_without_spills(num_heads, num_queries, place, capfd):
    batch, max_pages = 16, 64
    with hardware.target("NVIDIA H200"):
        report = assemble(
            lambda q, cache, table, lengths: mla_decode(
                q,
                cache,
                block_table=table,
                lengths=lengths,
                latent=512,
                sm_scale=0.1352,
                split_len=1024,
            ),
            ((batch, num_queries, num_heads, 576), jnp.bfloat16),
            ((batch * max_pages, 64, 576), jnp.bfloat16),
            ((batch, max_pages), jnp.int32),
            ((batch,), jnp.int32),
            place=place,
            capfd=capfd,
        )
    # One kernel for the parts, one that merges them.
    check_clean(report, num_kernels=2)


# Placement of x, w and the gradient on data x tensor → shapes of A in the three local products.
SHARDED = {
    "columns": (("data",), (None, "tensor"), ("data", None, "tensor"), {"2048,1024", "2048,512"}),
    "rows": (("data", None, "tensor"), ("tensor",), ("data",), {"2048,256", "2048,2048"}),
}


@needs_plugin
# By default, rows and latent decode run in a stage of a pipeline: test_sharded_deviceless.py.
@pytest.mark.parametrize("name", ["columns", pytest.param("rows", marks=pytest.mark.slow)])
def test_a_sharded_step_multiplies_its_shards_and_gathers_no_operand(name):
    *places, local = SHARDED[name]
    devices = np.array(deviceless.topology("NVIDIA H200", devices_per_host=8)).reshape(2, 4)
    mesh = jax.sharding.Mesh(
        devices, ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    shapes = [((8, 512, 1024), jnp.bfloat16), ((1024, 2048), jnp.float32)]
    shapes.append(((8, 512, 2048), jnp.bfloat16))
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P(*spec)))
        for (shape, dtype), spec in zip(shapes, places, strict=True)
    ]

    def step(x, w, grad):
        out, vjp = jax.vjp(lambda x, w: linear(x, w, precision="fp8"), x, w)
        return out, vjp(grad)

    with jax.set_mesh(mesh), deviceless.without_cache():
        text = jax.jit(step).lower(*arguments).compile().as_text()
    assert "all-gather" not in text
    calls = [line for line in text.splitlines() if 'custom_call_target="mosaic_gpu' in line]
    assert len(calls) == 3
    layouts = "".join(line.split("operand_layout_constraints=")[1] for line in calls)
    assert all(f"f8e4m3fn[{shape}]" in layouts for shape in local)


@needs_plugin
@pytest.mark.slow
def test_latent_decode_keeps_sequences_and_heads_on_their_devices():
    devices = np.array(deviceless.topology("NVIDIA H200", devices_per_host=8)).reshape(2, 4)
    mesh = jax.sharding.Mesh(
        devices, ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    place = lambda *names: jax.NamedSharding(mesh, jax.P(*names))
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype, sharding in (
            ((16, 1, 128, 576), jnp.bfloat16, place("data", None, "tensor")),
            ((1024, 64, 576), jnp.bfloat16, place()),
            ((16, 64), jnp.int32, place("data")),
            ((16,), jnp.int32, place("data")),
        )
    ]
    with jax.set_mesh(mesh), deviceless.without_cache():
        step = jax.jit(
            lambda q, cache, table, lengths: mla_decode(
                q, cache, block_table=table, lengths=lengths, latent=512, sm_scale=0.1352
            )
        )
        text = step.lower(*arguments).compile().as_text()
    assert "all-gather" not in text
    # 32 heads of 8 sequences a device, padded to one block of rows.
    assert "operand_layout_constraints={bf16[8,64,576]" in text
