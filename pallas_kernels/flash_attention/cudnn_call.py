"""The one adapter to JAX's private binding of cuDNN's fused attention.

`jax.nn.dot_product_attention` does not offer runs of packed documents, and looks at the devices
of this process to decide what a device of another process can do. When the binding moves, this
file moves; tests/pallas_kernels/test_flash_attention_cudnn_call.py holds what it relies on.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as binding
from jax._src.lib import cuda_versions
from jaxtyping import Array, Float

from pallas_kernels.flash_attention.runs import Runs

# First release that both takes runs of documents and multiplies MLA's head dims on Hopper.
MIN_VERSION = 91_000


# q, k, v, bias, lengths of q and k, offsets of q and k, page tables of k and v.
Operands = tuple[Array, Array, Array, Array, Array, Array, Array, Array, Array, Array]


class Scores(NamedTuple):
    """Which scores count, and the factor on them.

    Attributes:
        runs: documents of q, k and v alike, for which V must be H; None = a row is one document.
    """

    runs: Runs | None
    causal: bool
    scale: float


class Saved(NamedTuple):
    """What the backward pass needs of the forward pass, besides its operands."""

    out: Float[Array, "B T N V"]
    statistics: Float[Array, "stats N T"]


def refuses_version() -> str | None:
    """Why the cuDNN of this process does not serve; None if it does or none is needed here.

    A process without the CUDA plugin can only trace and lower for devices that it lacks, which
    takes no cuDNN.
    """
    if cuda_versions is None:
        return None
    try:
        version = cuda_versions.cudnn_get_version()
    except RuntimeError as error:
        return f"cuDNN is not usable here ({error}). Install nvidia-cudnn-cu13, or cu12."
    if version < MIN_VERSION:
        return f"cuDNN {version} is older than {MIN_VERSION}. Install a newer nvidia-cudnn-cu13."
    return None


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    scores: Scores,
) -> Float[Array, "B T N V"]:
    """Return the attention; rows that belong to no run hold anything."""
    operands = _operands(q, k, v, scores.runs)
    (out,) = binding._dot_product_attention_fwd_impl(
        *operands, is_training=False, **_static(scores)
    )
    return out


def forward_saving(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    scores: Scores,
) -> Saved:
    """Return what `forward` does, and what `backward` needs."""
    operands = _operands(q, k, v, scores.runs)
    out, statistics = binding._dot_product_attention_fwd_impl(
        *operands, is_training=True, **_static(scores)
    )
    return Saved(out, statistics)


def backward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    saved: Saved,
    grad: Float[Array, "B T N V"],
    scores: Scores,
) -> tuple[Array, Array, Array]:
    """Return the gradients of q, k and v; rows that belong to no run hold anything."""
    operands = _operands(q, k, v, scores.runs)
    grad_q, grad_k, grad_v = binding._dot_product_attention_bwd_impl(
        *operands,
        saved.statistics,
        saved.out,
        grad,
        **_static(scores),
    )
    return grad_q, grad_k, grad_v


def _operands(q: Array, k: Array, v: Array, runs: Runs | None) -> Operands:
    """What the binding takes; empty arrays stand for what is not used."""
    no = jnp.zeros(0, q.dtype)
    if runs is None:
        return q, k, v, no, no, no, no, no, no, no
    if runs.starts.shape[1] == 1:
        lengths = jnp.maximum(runs.lengths[:, 0], 0)
        return q, k, v, no, lengths, lengths, no, no, no, no
    # One place more than there are runs: the binding shifts them together and adds the end.
    starts = jnp.pad(runs.starts, ((0, 0), (0, 1)), constant_values=-1)
    return q, k, v, no, runs.lengths, runs.lengths, starts, starts, no, no


def _static(scores: Scores) -> dict[str, Any]:
    masks = {
        (False, False): binding.MaskType.NO_MASK,
        (False, True): binding.MaskType.CAUSAL,
        (True, False): binding.MaskType.PADDING,
        (True, True): binding.MaskType.PADDING_CAUSAL,
    }
    return {
        "scale": scores.scale,
        "seed": 0,
        "dropout_rate": 0.0,
        # Neither a bias nor its gradient.
        "variadic_args": (False, False),
        "mask_type": masks[scores.runs is not None, scores.causal],
        "layout": binding.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }
