"""MLA decode: lengths from zero, dead slots of NaN, junk tables; reference, op and interpreter."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hardware, mosaic
from pallas_kernels.accuracy import TOLERANCES, difference
from pallas_kernels.mla_decode import mla_decode
from tests.pallas_kernels.latent_cache import by_numpy, decode, make_batch, pack, unpack

CASE = Path(__file__).parent.parent / "data" / "S20" / "case.npz"


def load_case():
    case = np.load(CASE)
    q = np.concatenate([case["q_lat"], case["q_rope"]], axis=-1)[:, None]
    return case, q


def run_case(case, q, order=slice(None)):
    return decode(
        jnp.asarray(q[order]),
        jnp.asarray(case["pages"]),
        block_table=jnp.asarray(case["block_table"][order]),
        lengths=jnp.asarray(case["lengths"][order]),
        latent=32,
        sm_scale=float(case["scale"]),
        split_len=4,
    )


def test_lengths_from_zero_with_dead_slots_of_nan_are_right():
    case, q = load_case()
    out, lse = run_case(case, q)
    np.testing.assert_allclose(out[:, 0], case["out"], rtol=1e-5, atol=1e-5)
    # The case marks an empty row with -inf; the contract here is +inf, as in FlashMLA.
    expected = np.where(np.isfinite(case["lse"]), case["lse"], np.inf)
    np.testing.assert_allclose(lse[:, 0], expected, rtol=1e-5, atol=1e-5)
    assert not np.asarray(out[0]).any()


def test_the_order_of_the_batch_changes_no_row():
    case, q = load_case()
    order = np.asarray([3, 0, 4, 2, 1])
    out, lse = run_case(case, q)
    mixed, mixed_lse = run_case(case, q, order)
    np.testing.assert_array_equal(mixed, np.asarray(out)[order])
    np.testing.assert_array_equal(mixed_lse, np.asarray(lse)[order])


@pytest.mark.parametrize("num_queries", [1, 2, 4])
@pytest.mark.parametrize("num_heads", [1, 3, 16])
def test_several_query_tokens_see_bottom_right(num_queries, num_heads):
    batch = make_batch([0, 1, 3, 17], num_heads, num_queries=num_queries, page=8, latent=32, rope=8)
    found = decode(**batch, latent=32, sm_scale=0.2, split_len=None)
    out, lse = by_numpy(batch, latent=32, sm_scale=0.2)
    np.testing.assert_allclose(found.out, out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.lse, lse, rtol=1e-5, atol=1e-5)


def test_no_sequences_or_no_room_give_empty_rows():
    batch = make_batch([0, 0], 4, page=8, latent=32, rope=8)
    nothing = {**batch, "block_table": np.asarray(batch["block_table"])[:, :0]}
    found = decode(**nothing, latent=32, sm_scale=0.2)
    assert not np.asarray(found.out).any()
    assert np.isposinf(np.asarray(found.lse)).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"split_len": 12}, "multiple of the page, 8"),
        ({"latent": 99}, "latent=99"),
        ({"lengths": jnp.zeros(3, jnp.int32)}, "lengths 3"),
    ],
)
def test_operands_that_do_not_fit_are_refused_with_their_sizes(change, words):
    batch = make_batch([5, 9], 4, page=8, latent=32, rope=8)
    with pytest.raises(ValueError, match=words):
        mla_decode(**{**batch, "latent": 32, "sm_scale": 0.2, **change})


def test_a_packed_token_comes_back_within_half_a_step_and_its_rope_exactly():
    rng = np.random.default_rng(0)
    spread = 2.0 ** rng.integers(-6, 7, (5, 4)).repeat(128, 1)
    tokens = np.concatenate([rng.standard_normal((5, 512)) * spread, np.ones((5, 64))], axis=-1)
    tokens[0, :128] = 0
    packed = pack(jnp.asarray(tokens, jnp.float32))
    back = np.asarray(unpack(packed), np.float64)
    assert (packed.shape, packed.dtype) == ((5, 656), jnp.uint8)
    largest = np.abs(tokens[:, :512]).reshape(5, 4, 128).max(-1).repeat(128, 1)
    bound = np.maximum(np.abs(tokens[:, :512]) / 16, largest / 448 * 2**-9)
    assert (np.abs(back[:, :512] - tokens[:, :512]) <= bound * 1.001).all()
    np.testing.assert_array_equal(back[:, 512:], tokens[:, 512:])
    scales = np.asarray(packed[:, 512:528]).copy().view(np.float32)
    assert (np.log2(scales) % 1 == 0).all()


@pytest.mark.parametrize("num_heads", [1, 12, 63])
def test_an_8_bit_cache_gives_attention_over_the_values_it_holds(num_heads):
    batch = make_batch([0, 5, 130], num_heads)
    packed = {**batch, "cache": pack(np.nan_to_num(batch["cache"]))}
    found = decode(**packed, latent=512, sm_scale=0.1352)
    out, lse = by_numpy({**batch, "cache": unpack(packed["cache"])}, latent=512, sm_scale=0.1352)
    np.testing.assert_allclose(found.out, out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.lse, lse, rtol=1e-5, atol=1e-5)


# Lengths, heads, query tokens, tokens of a part: ragged ends, an empty sequence, a part behind
# the end, rows that fill no block, two blocks of rows, rows that see nothing.
INTERPRETED = [
    ([130, 0, 64], 16, 1, 128),
    ([5, 100], 70, 1, None),
    ([2, 100], 20, 4, 64),
]


@pytest.mark.parametrize(("lengths", "num_heads", "num_queries", "split_len"), INTERPRETED)
def test_the_hopper_kernel_equals_the_reference(lengths, num_heads, num_queries, split_len):
    batch = make_batch(lengths, num_heads, num_queries=num_queries, dtype=jnp.bfloat16)
    options = {"latent": 512, "sm_scale": 0.1352}
    out, lse = by_numpy(batch, **options)
    with mosaic.interpreted(), hardware.target("NVIDIA H200"):
        found = jax.jit(
            lambda batch: mla_decode(**batch, **options, split_len=split_len, backend="mosaic_gpu")
        )(batch)
    measured = difference(np.asarray(found.out, np.float64), out)
    assert measured.within(TOLERANCES["mla_decode", "bfloat16"]), measured
    np.testing.assert_allclose(found.lse, lse, rtol=2e-4, atol=1e-5)
