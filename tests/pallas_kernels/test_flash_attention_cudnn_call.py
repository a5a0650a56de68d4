"""What the cuDNN adapter relies on in JAX's private binding."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hardware
from pallas_kernels.flash_attention import cudnn_call
from pallas_kernels.flash_attention.runs import find_runs
from tests.pallas_kernels.attention_cases import quick_jit, with_gradients

binding = cudnn_call.binding

OPERANDS = (
    *("query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets"),
    *("page_table_k", "page_table_v"),
)
STATIC = (
    *("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout"),
    "sliding_window_length",
)
SIGNATURES = {
    "_dot_product_attention_fwd_impl": (*OPERANDS, *STATIC, "is_training"),
    "_dot_product_attention_bwd_impl": (
        *OPERANDS,
        *("activation", "fwd_output", "grad_output"),
        *STATIC,
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_private_functions_take_the_arguments_that_are_given_to_them(name):
    parameters = inspect.signature(getattr(binding, name)).parameters
    assert tuple(parameters) == SIGNATURES[name]


def test_the_masks_and_the_layout_have_the_names_that_the_kernel_is_told():
    masks = {"NO_MASK": 0, "PADDING": 1, "CAUSAL": 2, "PADDING_CAUSAL": 3}
    assert {name: binding.MaskType[name].value for name in masks} == masks
    assert binding.AttentionLayout.BTNH.value == 0


def test_offsets_count_elements_of_the_local_array_in_one_list_without_gaps():
    ids = jnp.array([[1, 1, 2, 2, 2, 0], [1, 0, 0, 0, 0, 0]], jnp.int32)
    q, k = jnp.zeros((2, 6, 4, 8), jnp.bfloat16), jnp.zeros((2, 6, 2, 8), jnp.bfloat16)

    @quick_jit
    def fixed(ids):
        operands = cudnn_call._operands(q, k, k, find_runs(ids, max_segments=3))
        return binding._fix_seqlen_offsets(*operands[4:8], q, k)

    found = [np.asarray(x).reshape(-1).tolist() for x in fixed(ids)]
    assert found[0] == found[1] == [2, 3, 1, 0, 0, 0]
    # Tokens 0 and 2 of row 0 and token 6, row 1's first; the end of the array for the rest.
    tokens = np.array([0, 2, 6, 12, 12, 12, 12, 12])
    assert found[2] == (tokens * 4 * 8).tolist()
    # Earlier releases counted key heads as query heads here.
    assert found[3] == (tokens * 2 * 8).tolist()


LOWERED = {
    "plain": ((2, 64, 4, 2, 64, 64), False, {}, None),
    "packed": ((2, 64, 4, 2, 64, 64), True, {"max_segments": 4}, 4),
    "padded": ((2, 64, 4, 2, 64, 64), True, {"max_segments": 1}, 1),
    "latent": ((2, 64, 4, 4, 192, 128), True, {"max_segments": 4}, 4),
}


@pytest.mark.parametrize("name", LOWERED)
def test_a_program_for_a_card_calls_cudnn_forward_and_backward(name):
    (b, t, n, k, h, v), packed, given, num_runs = LOWERED[name]
    shapes = [(b, t, n, h), (b, t, k, h), (b, t, k, v), (b, t, n, v)]
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    ids = jax.ShapeDtypeStruct((b, t), jnp.int32) if packed else None

    def run(q, k, v, grad, ids):
        given_all = {"packed": "runs", "backend": "cudnn", "causal": True, **given}
        return with_gradients(q, k, v, grad, ids, None, **given_all)

    with hardware.target("NVIDIA H200"):
        traced = jax.jit(run).trace(*operands, ids)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "__cudnn$fmha" in line]
    # Of packed rows those that are one document each are told apart when the program runs.
    whole = [line for line in calls if "\\22mask_type\\22: \\22CAUSAL\\22" in line]
    by_runs = [line for line in calls if "\\22mask_type\\22: \\22PADDING_CAUSAL\\22" in line]
    assert len(calls) == len(whole) + len(by_runs)
    assert (len(whole), len(by_runs)) == (2, 2 if packed else 0)
    assert all(f"\\22max_seg_per_batch\\22: {num_runs}," in line for line in by_runs)
    assert all(f"tensor<{b}x{n}x{t}xf32>" in line for line in whole)
    assert all(f"tensor<{b * (num_runs or 1)}x{n}x{t}xf32>" in line for line in by_runs)
    # Offsets are shared by keys and values, so values are widened where there are offsets.
    narrow = [("x128xbf16" in line) for line in (*whole, *by_runs)]
    latent, one_run = name == "latent", num_runs == 1
    assert narrow == [latent] * 2 + [latent and one_run] * len(by_runs)
