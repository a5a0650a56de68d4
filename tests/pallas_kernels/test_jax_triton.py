"""The Triton kernels without a GPU: refusals, machine code at odd sizes, numbers by interpreter."""

import json
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import deviceless, fp8_matmul, hardware, mla_decode, mosaic, triton
from pallas_kernels import quantize as quantize_op
from pallas_kernels.accuracy import TOLERANCES, Difference, difference
from pallas_kernels.formats import ACTIVATION, WEIGHT
from pallas_kernels.fp8_matmul import jax_triton as product_file
from pallas_kernels.fp8_matmul.cases import make_case as product_case
from pallas_kernels.mla_decode import jax_triton as decode_file
from pallas_kernels.mla_decode.cases import make_case as decode_case
from pallas_kernels.quantize import jax_triton as quantize_file
from pallas_kernels.quantize import (
    quantize,
    quantize_both,
    requantize_transposed,
)
from pallas_kernels.quantize.cases import QuantizeCase
from pallas_kernels.widened_matmul import jax_triton as widened_file
from pallas_kernels.widened_matmul import widened_matmul
from pallas_kernels.widened_matmul.cases import make_case as widened_case
from tests.pallas_kernels.latent_cache import by_numpy, make_batch
from tests.pallas_kernels.operands import (
    exact_product,
    varied,
    widened_operands,
)
from tests.pallas_kernels.triton_interpreter import interpret_kernels, written_by
from tests.pallas_kernels.triton_machine_code import assemble, calls_of, machine_code

MISSING = triton.missing()
SLOW = pytest.mark.slow
needs_triton = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
E5M2 = replace(ACTIVATION, element="e5m2")
MLA = {"latent": 512, "sm_scale": 0.1352}

# A case of each file that it serves.
CASES = {
    product_file: product_case(13, 16, 200, hardware=hardware.find("NVIDIA H200")),
    decode_file: decode_case(2, 16, 128, hardware=hardware.find("NVIDIA A100")),
    quantize_file: QuantizeCase(130, 16, ACTIVATION, hardware.find("NVIDIA H200")),
    widened_file: widened_case(3, 16, 200, 300, hardware=hardware.find("NVIDIA H200")),
}


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        (product_file, {"hardware": hardware.find("cpu")}, "cpu is cpu"),
        (product_file, {"hardware": hardware.find("TPU v5p")}, "NVIDIA GPUs"),
        (product_file, {"hardware": hardware.find("NVIDIA A100")}, "8-bit floats"),
        (decode_file, {"hardware": hardware.find("TPU v5p")}, "NVIDIA GPUs"),
        (decode_file, {"cache_dtype": "uint8"}, "packed bytes"),
        (decode_file, {"cache_dtype": "float32"}, "float32"),
        (decode_file, {"latent": 48}, "latent=48"),
        (decode_file, {"rope": 0}, "rope=0"),
        (decode_file, {"page": 24}, "page=24"),
        (quantize_file, {"hardware": hardware.find("cpu")}, "NVIDIA GPUs"),
        (quantize_file, {"hardware": hardware.find("NVIDIA A100")}, "8-bit floats"),
        (quantize_file, {"format": WEIGHT}, "1x128"),
        (quantize_file, {"format": replace(ACTIVATION, scale="power_of_two")}, "power_of_two"),
        (quantize_file, {"rows": 127}, "few"),
        (quantize_file, {"columns": 0}, "fills no block"),
        (widened_file, {"hardware": hardware.find("NVIDIA A100")}, "8-bit floats"),
        (widened_file, {"m": 129}, "129 rows"),
        (widened_file, {"dtype": "float32"}, "float32"),
        (widened_file, {"element": "e5m2"}, "e5m2"),
    ],
)
def test_what_a_kernel_does_not_serve_is_refused_with_the_reason(file, changes, words):
    assert words in file.refuses(replace(CASES[file], **changes))


@pytest.mark.parametrize(
    ("have", "words"),
    [
        ({}, "jax-triton is not installed"),
        ({"jax-triton": "0.4.1", "triton": "3.6.0"}, "jax-triton 0.4.1 is installed"),
        ({"jax-triton": "0.3.1", "triton": "3.7.0"}, "triton 3.7.0 is installed"),
    ],
)
def test_other_versions_are_refused_with_the_one_that_is_served(have, words, monkeypatch):
    def version(name):
        if name not in have:
            raise triton.PackageNotFoundError(name)
        return have[name]

    monkeypatch.setattr(triton, "version", version)
    assert words in triton.missing.__wrapped__()


@pytest.mark.parametrize("file", CASES)
def test_an_interpreter_of_other_kernels_is_not_offered_these(file):
    with mosaic.interpreted():
        assert "Mosaic" in file.refuses(CASES[file])


@needs_triton
def test_what_the_hopper_kernels_refuse_is_served():
    mixed = replace(CASES[product_file], a_element="e5m2")
    assert fp8_matmul.OP.choose(mixed).name == "jax_triton"
    assert mla_decode.OP.choose(CASES[decode_file]).name == "jax_triton"
    assert mla_decode.OP.choose(replace(CASES[decode_file], cache_dtype="uint8")).name == "xla"
    assert quantize_op.OP.choose(CASES[quantize_file]).name == "jax_triton"


# ---- numbers, by Triton's interpreter in a process of its own ----

# M, N, K, activations, weights, result: few and many rows, parts of K, odd everywhere.
PRODUCTS = {
    "few rows": (7, 13, 129, ACTIVATION, WEIGHT, "bfloat16"),
    "many rows": (200, 136, 300, ACTIVATION, WEIGHT, "bfloat16"),
    "parts of K": (5, 200, 1500, ACTIVATION, WEIGHT, "float32"),
    "wgrad": (140, 70, 300, ACTIVATION, ACTIVATION, "float32"),
    "mixed formats": (150, 130, 300, E5M2, WEIGHT, "float32"),
}
# Lengths, heads, query tokens, tokens of a part: ragged ends, an empty sequence, parts behind the
# end, rows that see nothing, several blocks of rows.
DECODES = {
    "in parts": ([130, 0, 64], 16, 1, 128),
    "device decides": ([5, 700], 70, 1, None),
    "several queries": ([2, 190], 20, 4, 64),
}


# Matrices, rows, N, K: one matrix in parts of K, edges in every dim, and one that nobody uses.
WIDENED = {
    "in parts of K": (1, 5, 200, 1500),
    "a stack": (3, 17, 130, 257),
}


def widened_pairs(words, pair, rows, columns):
    """What the kernel's lines of assembly return; the interpreter has none."""
    tl = widened_file.tl
    shift = 0 if pair == "first" else 16
    low, high = (((words >> at) & 0xFF).to(tl.uint8) for at in (shift, shift + 8))
    as_bfloat16 = lambda byte: byte.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    return tl.reshape(tl.join(as_bfloat16(low), as_bfloat16(high)), (rows, columns))


def write_interpreted():
    """The child process: every case through its op, the differences as one line of JSON."""
    interpret_kernels()
    widened_file.widened_pairs = widened_pairs
    found = {}
    with hardware.target("NVIDIA H200"):
        for name, (m, n, k, a_format, b_format, out_dtype) in PRODUCTS.items():
            a = quantize(jnp.asarray(varied((m, k), seed=0)), format=a_format)
            b = quantize(jnp.asarray(varied((n, k), seed=1)), format=b_format)
            out = fp8_matmul.fp8_matmul(a, b, out_dtype=out_dtype, backend="jax_triton")
            found[name] = difference(np.asarray(out, np.float64), exact_product(a, b))
        for name, (lengths, num_heads, num_queries, split_len) in DECODES.items():
            batch = make_batch(lengths, num_heads, num_queries=num_queries, dtype=jnp.bfloat16)
            result = mla_decode.mla_decode(
                **batch, **MLA, split_len=split_len, backend="jax_triton"
            )
            out, lse = by_numpy(batch, **MLA)
            np.testing.assert_allclose(result.lse, lse, rtol=2e-4, atol=1e-5)
            found[name] = difference(np.asarray(result.out, np.float64), out)
        for name, sizes in WIDENED.items():
            x, w, expected = widened_operands(*sizes, dtype="bfloat16", shared=name == "a stack")
            # Tiles in another order than the matrices, and one without any.
            order = np.array([*range(sizes[0])][::-1])
            given = jnp.asarray(np.where(order == 1, -1, order))
            x = x if x.ndim == 2 else x[order]
            out = widened_matmul(x, w, matrices=given, backend="jax_triton")
            assert np.isfinite(np.asarray(out, np.float64)).all()
            read = order != 1
            found[name] = difference(np.asarray(out, np.float64)[read], expected[order][read])
    sys.stdout.write(json.dumps(found))


@pytest.fixture(scope="module")
def interpreted():
    return {name: Difference(*row) for name, row in written_by("test_jax_triton").items()}


@needs_triton
@SLOW
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_product_s_source_computes_the_product(name, interpreted):
    out_dtype = PRODUCTS[name][-1]
    assert interpreted[name].within(TOLERANCES["fp8_matmul", out_dtype]), interpreted[name]


@needs_triton
@SLOW
@pytest.mark.parametrize("name", DECODES)
def test_the_decode_source_computes_attention(name, interpreted):
    assert interpreted[name].within(TOLERANCES["mla_decode", "bfloat16"]), interpreted[name]


@needs_triton
@SLOW
@pytest.mark.parametrize("name", WIDENED)
def test_the_widening_source_computes_the_product(name, interpreted):
    assert interpreted[name].within(TOLERANCES["fp8_matmul", "bfloat16"]), interpreted[name]


# ---- machine code ----


def product(x, w, *, a_format=ACTIVATION, w_format=WEIGHT, out_dtype=jnp.bfloat16):
    # By XLA, so that the product's call is the only one.
    a, b = (quantize(y, format=f, backend="xla") for y, f in ((x, a_format), (w, w_format)))
    return fp8_matmul.fp8_matmul(a, b, out_dtype=out_dtype, backend="jax_triton")


def operands(m, n, k, *stack):
    return ((*stack, m, k), jnp.bfloat16), ((n, k), jnp.bfloat16)


# Few rows and many, all odd, by default.
SLOW_SHAPES = ((1, 1, 1), (128, 4096, 7168), (1152, 4097, 127))
SHAPES = [(7, 129, 13), (129, 13, 1152), *(pytest.param(s, marks=SLOW) for s in SLOW_SHAPES)]
WGRAD = {"w_format": ACTIVATION, "out_dtype": jnp.float32}


@needs_triton
@pytest.mark.parametrize("options", [{}, WGRAD], ids=["weights", "wgrad"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_becomes_8_bit_wgmma_without_spills(shape, options, tmp_path):
    (call,) = calls_of(partial(product, **options), *operands(*shape))
    instructions = assemble(call, tmp_path / "kernel.ptx")
    assert instructions
    assert all("wgmma" in one and "f32.e4m3.e4m3" in one for one in instructions)


@needs_triton
@pytest.mark.parametrize(
    ("kind", "options", "word"),
    [
        ("NVIDIA H200", {"a_format": E5M2}, "f32.e5m2.e4m3"),
        ("NVIDIA B200", {}, "kind::f8f6f4"),
        ("NVIDIA B200", WGRAD, "kind::f8f6f4"),
    ],
)
def test_mixed_formats_and_blackwell_have_8_bit_products(kind, options, word, tmp_path):
    (call,) = calls_of(partial(product, **options), *operands(4096, 4096, 512), kind=kind)
    assert any(word in one for one in assemble(call, tmp_path / "kernel.ptx", kind=kind))


@needs_triton
def test_mapping_over_activations_is_one_call():
    run = lambda x, w: jax.vmap(lambda x: product(x, w))(x)
    assert len(calls_of(run, *operands(9, 16, 200, 3))) == 1


@needs_triton
@pytest.mark.parametrize(
    "sizes", [(64, 16, 1408, 2048), (1, 64, 2048, 1408), (64, 128, 2048, 1408), (1, 9, 200, 130)]
)
def test_widened_weights_become_wgmma_without_spills(sizes, tmp_path):
    e, m, n, k = sizes

    def run(x, w):
        w = quantize(w, format=WEIGHT, backend="xla")
        return widened_matmul(x, w, backend="jax_triton")

    (call,) = calls_of(run, ((m, k), jnp.bfloat16), ((e, n, k), jnp.bfloat16))
    path = tmp_path / "kernel.ptx"
    instructions = assemble(call, path)
    assert instructions
    assert all("wgmma" in one and "f32.bf16.bf16" in one for one in instructions)
    # A cast of one element to 16 bits takes a core longer than reading the element does.
    assert "F2F." not in machine_code(path)


def decode_operands(batch, num_queries, num_heads, max_pages):
    return (
        ((batch, num_queries, num_heads, 576), jnp.bfloat16),
        ((50, 64, 576), jnp.bfloat16),
        ((batch, max_pages), jnp.int32),
        ((batch,), jnp.int32),
    )


def decode(q, cache, table, lengths, *, split_len=4096):
    rest = {"lengths": lengths, "split_len": split_len, "backend": "jax_triton", **MLA}
    return mla_decode.mla_decode(q, cache, block_table=table, **rest)


@needs_triton
@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA A100", "NVIDIA B200"])
@pytest.mark.parametrize(("num_heads", "num_queries"), [(1, 1), (9, 3), (63, 4)])
def test_latent_decode_becomes_bfloat16_products_without_spills(
    num_heads, num_queries, kind, tmp_path
):
    shapes = decode_operands(3, num_queries, num_heads, 5)
    parts, merge = calls_of(partial(decode, split_len=128), *shapes, kind=kind)
    instructions = assemble(parts, tmp_path / "parts.ptx", kind=kind)
    matrix_unit = {"NVIDIA H200": "wgmma", "NVIDIA A100": "mma.sync", "NVIDIA B200": "tcgen05"}
    # The wide unit takes 64 rows; few rows go to the narrow one.
    wide = num_heads * num_queries > 32
    assert any((matrix_unit[kind] if wide else "mma.sync") in one for one in instructions)
    assert not assemble(merge, tmp_path / "merge.ptx", kind=kind)


@needs_triton
def test_a_sequence_in_one_part_needs_no_merge_and_mapping_takes_turns():
    shapes = decode_operands(3, 1, 16, 5)
    assert len(calls_of(decode, *shapes)) == 1
    assert len(calls_of(jax.vmap(decode), *(((2, *shape), dtype) for shape, dtype in shapes))) == 1


# ---- sharded use ----


@needs_triton
@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
@pytest.mark.usefixtures("optimized")
def test_sharded_operands_stay_on_their_devices():
    devices = np.array(deviceless.topology("NVIDIA H200", devices_per_host=8)).reshape(2, 4)
    mesh = jax.sharding.Mesh(
        devices, ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )

    def compiled(function, *arguments):
        placed = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P(*spec)))
            for (shape, dtype), spec in arguments
        ]
        with jax.set_mesh(mesh), deviceless.without_cache():
            text = jax.jit(function).lower(*placed).compile().as_text()
        assert "all-gather" not in text
        calls = [line for line in text.splitlines() if '"triton_kernel_call_ffi"' in line]
        return [line.split("operand_layout_constraints=")[1] for line in calls]

    x, w = operands(512, 2048, 4096)
    (columns,) = compiled(product, (x, ("data",)), (w, ("tensor",)))
    assert "f8e4m3fn[256,4096]" in columns
    assert "f8e4m3fn[512,4096]" in columns
    (inner,) = compiled(product, (x, ("data", "tensor")), (w, (None, "tensor")))
    assert "f8e4m3fn[256,1024]" in inner
    assert "f8e4m3fn[2048,1024]" in inner
    # Results are quantised where their matrix lies. Who takes scales says where they go.
    both = lambda x: [q.values for q in quantize_both(x, format=ACTIVATION)]
    (gradient,) = compiled(both, (x, ("data", "tensor")))
    assert "bf16[256,1024]" in gradient
    again = lambda x: requantize_transposed(quantize(x, format=ACTIVATION)).values
    _, transpose = compiled(again, (x, ("data", "tensor")))
    assert "f8e4m3fn[256,1024]" in transpose
    assert "f32[8,256]" in transpose
    places = (("data", None, "tensor"), (), ("data",), ("data",))
    (heads,) = compiled(decode, *zip(decode_operands(16, 1, 128, 64), places, strict=True))
    assert "bf16[8,32,576]" in heads
