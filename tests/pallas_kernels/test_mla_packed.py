"""MLA decode over the packed 8-bit cache on Hopper: interpreter, lowering, machine code."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.sharding import SingleDeviceSharding

from pallas_kernels import deviceless, hardware, mosaic
from pallas_kernels.accuracy import TOLERANCES, difference
from pallas_kernels.mla_decode import OP, mla_decode, pack
from pallas_kernels.mla_decode.cases import make_case
from pallas_kernels.registry import KernelError
from tests.pallas_kernels.latent_cache import by_numpy, make_batch, unpack
from tests.pallas_kernels.test_deviceless import assemble, check_clean

OPTIONS = {"latent": 512, "sm_scale": 0.1352}
NAN_BYTE = jnp.uint8(0xFF)
REASON = deviceless.missing()
needs_plugin = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def odd_factors(shape):
    """Factors between 1/2 and 2 for the scales of slots, none of them a power of two."""
    return np.random.default_rng(1).uniform(0.5, 2.0, (*shape, 4)).astype(np.float32)


def with_scales_times(packed, factors):
    """`packed` with every scale times its factor."""
    parts = packed[..., 512:528].reshape(*packed.shape[:-1], 4, 4)
    scales = lax.bitcast_convert_type(parts, jnp.float32) * factors
    found = lax.bitcast_convert_type(scales, jnp.uint8).reshape(*packed.shape[:-1], 16)
    return packed.at[..., 512:528].set(found)


@jax.jit
def packed_and_poisoned(cache, factors):
    """The cache in bytes; those of dead slots are NaN as latents, scales and rope."""
    packed = pack(jnp.nan_to_num(cache))
    packed = packed if factors is None else with_scales_times(packed, factors)
    return jnp.where(jnp.isnan(cache[..., :1]), NAN_BYTE, packed)


def make_packed(lengths, num_heads, *, num_queries=1, odd_scales=False):
    """A batch with a packed cache."""
    batch = make_batch(lengths, num_heads, num_queries=num_queries)
    factors = odd_factors(batch["cache"].shape[:-1]) if odd_scales else None
    packed = packed_and_poisoned(batch["cache"], factors)
    q = np.asarray(batch["q"]).astype(jnp.bfloat16)
    return {**batch, "q": jnp.asarray(q), "cache": packed}


def interpret(batch, *, split_len=None, detect_races=False):
    with mosaic.interpreted(detect_races=detect_races), hardware.target("NVIDIA H200"):
        return jax.jit(
            lambda batch: mla_decode(
                **batch, **OPTIONS, split_len=split_len, backend="mosaic_gpu_packed"
            )
        )(batch)


def check(found, batch):
    """The result is attention over the latents, and of latents rounded once nothing is missing."""
    exact = unpack(batch["cache"])
    for latents, lse_rtol in ((exact, 2e-3), (np.asarray(exact).astype(jnp.bfloat16), 2e-5)):
        out, lse = by_numpy({**batch, "cache": latents}, **OPTIONS)
        measured = difference(np.asarray(found.out, np.float64), out)
        assert measured.within(TOLERANCES["mla_decode", "bfloat16"]), measured
        np.testing.assert_allclose(found.lse, lse, rtol=lse_rtol, atol=1e-5)


# Lengths, heads, query tokens, tokens of a part, scales of any float32: ragged ends, an empty
# sequence, a part behind the end, rows that fill no block, two blocks, rows that see nothing.
INTERPRETED = [
    ([130, 0, 64], 16, 1, 128, False),
    ([5, 100], 70, 1, None, True),
    ([2, 70], 10, 4, 64, False),
]


@pytest.mark.parametrize(("lengths", "heads", "queries", "split_len", "odd_scales"), INTERPRETED)
def test_the_packed_kernel_equals_the_reference(lengths, heads, queries, split_len, odd_scales):
    batch = make_packed(lengths, heads, num_queries=queries, odd_scales=odd_scales)
    check(interpret(batch, split_len=split_len), batch)


def one_token_of_every_byte(odd_scales):
    """A sequence of one token that holds every e4m3 number twice, and what it holds, rounded."""
    codes = np.arange(256, dtype=np.uint8)
    # 0x7f and 0xff are NaN.
    codes = np.where(codes % 128 == 127, np.uint8(1), codes)
    batch = make_packed([1], 3)
    page = int(batch["block_table"][0, 0])
    packed = np.array(batch["cache"])
    packed[page, 0, :512] = np.tile(codes, 2)
    scales = np.asarray([2.0**-9, 1.0, 2.0**5, 2.0**-20], np.float32)
    packed[page, 0, 512:528] = scales.view(np.uint8)
    factors = odd_factors(packed.shape[:-1])
    packed = jax.jit(with_scales_times)(packed, factors) if odd_scales else jnp.asarray(packed)
    held = np.asarray(unpack(packed[page, 0]))[:512].astype(jnp.bfloat16)
    q = np.asarray(batch["q"]) / jnp.bfloat16(64)
    return {**batch, "q": jnp.asarray(q), "cache": packed}, held


def check_every_byte(found, held, odd_scales):
    """The only token's weight is 1, so its latents are the result."""
    out, held = (np.asarray(x, np.float32) for x in (found.out[0, 0], held))
    if not odd_scales:
        np.testing.assert_array_equal(out, np.broadcast_to(held, out.shape))
    # A tie of the exact product may be rounded either way.
    assert (out == held).mean() > 0.99
    np.testing.assert_allclose(out, np.broadcast_to(held, out.shape), rtol=2**-7)


@pytest.mark.parametrize("odd_scales", [False, True])
def test_every_number_of_eight_bits_comes_through(odd_scales):
    batch, held = one_token_of_every_byte(odd_scales)
    check_every_byte(interpret(batch), held, odd_scales)


def test_no_warpgroup_reads_what_another_may_still_write():
    """Three pages: every slot and every barrier is used again."""
    batch = make_packed([150], 4)
    check(interpret(batch, detect_races=True), batch)
    assert not get_races().races_found


def test_scores_that_shrink_or_do_not_depend_on_the_products_are_served():
    batch = make_packed([3], 2)
    for sm_scale in (0.0, -0.3):
        with mosaic.interpreted(), hardware.target("NVIDIA H200"):
            found = jax.jit(lambda b, s=sm_scale: mla_decode(**b, latent=512, sm_scale=s))(batch)
        exact = {**batch, "cache": unpack(batch["cache"])}
        out, lse = by_numpy(exact, latent=512, sm_scale=sm_scale)
        measured = difference(np.asarray(found.out, np.float64), out)
        assert measured.within(TOLERANCES["mla_decode", "bfloat16"]), measured
        np.testing.assert_allclose(found.lse, lse, rtol=2e-4, atol=1e-5)


def test_a_nan_that_a_live_token_holds_is_seen_in_its_sequence_only():
    batch = make_packed([3, 3], 2)
    page = batch["block_table"][0, 0]
    found = interpret({**batch, "cache": batch["cache"].at[page, 1, 200].set(NAN_BYTE)})
    assert jnp.isnan(found.out[0]).any()
    assert jnp.isfinite(found.out[1]).all()


def test_each_cache_has_its_kernel_and_says_why_the_other_one_refuses():
    case = make_case(2, 16, 128, hardware=hardware.find("NVIDIA H200"))
    packed = replace(case, cache_dtype="uint8")
    assert OP.choose(case).name == "mosaic_gpu"
    assert OP.choose(packed).name == "mosaic_gpu_packed"
    with pytest.raises(KernelError, match="bfloat16; this kernel reads packed bytes"):
        OP.choose(case, backend="mosaic_gpu_packed")


def shapes(batch, num_heads, num_queries, max_pages):
    return (
        ((batch, num_queries, num_heads, 576), jnp.bfloat16),
        ((batch * max_pages, 64, 656), jnp.uint8),
        ((batch, max_pages), jnp.int32),
        ((batch,), jnp.int32),
    )


def decode(split_len):
    return lambda q, cache, table, lengths: mla_decode(
        q, cache, block_table=table, lengths=lengths, **OPTIONS, split_len=split_len
    )


@pytest.mark.parametrize(
    ("num_heads", "num_queries"),
    [(3, 2), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in (1, 126))],
)
def test_the_packed_kernel_compiles_at_odd_numbers_of_heads(num_heads, num_queries):
    arguments = [jax.ShapeDtypeStruct(*s) for s in shapes(3, num_heads, num_queries, 5)]
    with hardware.target("NVIDIA H200"):
        lowered = jax.jit(decode(128)).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@needs_plugin
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("num_heads", "num_queries"),
    [(128, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((16, 1), (64, 2)))],
)
def test_packed_decode_assembles_without_spills(num_heads, num_queries, capfd):
    place = SingleDeviceSharding(deviceless.topology("NVIDIA H200")[0])
    with hardware.target("NVIDIA H200"):
        report = assemble(
            decode(1024), *shapes(16, num_heads, num_queries, 64), place=place, capfd=capfd
        )
    # One kernel for the parts, one that merges them.
    check_clean(report, num_kernels=2)


@needs_plugin
@pytest.mark.usefixtures("optimized")
def test_the_packed_cache_is_never_copied_and_shards_stay_where_they_are():
    devices = np.array(deviceless.topology("NVIDIA H200", devices_per_host=8)).reshape(2, 4)
    mesh = jax.sharding.Mesh(
        devices, ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    places = (("data", None, "tensor"), (), ("data",), ("data",))
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P(*spec)))
        for (shape, dtype), spec in zip(shapes(16, 128, 1, 64), places, strict=True)
    ]
    with jax.set_mesh(mesh), deviceless.without_cache():
        compiled: Any = jax.jit(decode(4096)).lower(*arguments).compile()
    text = compiled.as_text()
    assert "all-gather" not in text
    # 32 heads of 8 sequences a device, padded to one block of rows.
    assert "operand_layout_constraints={bf16[8,64,576]" in text
    made = re.findall(r" = \w+\[1024,64,\d+\]\S* (\S+)\(", text)
    assert set(made) == {"parameter", "bitcast"}
    assert compiled.memory_analysis().temp_size_in_bytes < 1024 * 64 * 656
