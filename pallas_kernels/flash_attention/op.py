"""Attention for training and prefill: contract, checks and choice of backend.

Contract: query t of a row sees key s of the same row where both are of one segment above 0 and,
if causal, s <= t (also where T and S differ: positions count from the start of the row). Segment
0 is padding: it sees nothing, is seen by nothing, and its outputs and gradients are exact zeros,
as for every query that sees no key. Softmax is float32. A non-finite value in one document never
reaches another document of its row, unless the caller has checked the rows himself; those who see
it get NaN. Every size is legal.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import hardware
from pallas_kernels.flash_attention import cudnn, reference, xla
from pallas_kernels.flash_attention.cases import AttentionCase, DType, make_case
from pallas_kernels.registry import Backend, KernelOp

DTYPES: dict[str, DType] = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}

# Documents shorter than this on average are rare, and a row of them still gives the right result.
TOKENS_PER_SEGMENT = 128
MIN_SEGMENTS, MAX_SEGMENTS = 8, 64


def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "kB S K kH"],
    v: Float[Array, "vB vS vK V"],
    *,
    segment_ids: Int[Array, "sB sT"] | None,
    kv_segment_ids: Int[Array, "zB zS"] | None = None,
    causal: bool,
    scale: float,
    packed: Literal["any", "runs", "checked"] = "any",
    max_segments: int | None = None,
    backend: str | None = None,
) -> Float[Array, "B T N V"]:
    """Return softmax(q·k·scale)·v in the dtype of `q`; differentiable in q, k and v.

    Query head n reads key head n // (N / K).

    Args:
        segment_ids: document of each token, 0 = padding; None = each row is one document.
        kv_segment_ids: the same for the keys; None = those of the queries, which needs T = S.
        packed: "runs" promises that in each row a document is one run of tokens, ids rise, and
            padding is last, as a packing loader leaves them. Needed by cuDNN. A device whose
            rows break the promise takes the XLA path for that call: slower, never wrong.
            "checked": the caller has made sure, also of max_segments; the device does not look,
            and what is not finite may reach other documents of its row.
        max_segments: documents in a row up to which cuDNN is used; memory for the softmax's
            statistics grows with it. None = one for every 128 tokens, from 8 to 64.
        backend: the backend to use; None = the fastest that serves the case.
    Raises:
        ValueError: if the operands do not fit each other.
        KernelError: if `backend` refuses the case.
    """
    _check_shapes(q, k, v)
    _check_segments(q, k, segment_ids=segment_ids, kv_segment_ids=kv_segment_ids)
    if segment_ids is None:
        segments, num_segments = "none", 1
    else:
        segments = packed if kv_segment_ids is None else "any"
        num_segments = default_max_segments(q.shape[1]) if max_segments is None else max_segments
    if num_segments < 1:
        raise ValueError(f"max_segments={max_segments} must be at least 1, or None.")
    case = AttentionCase(
        batch=q.shape[0],
        num_queries=q.shape[1],
        num_keys=k.shape[1],
        num_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        dtype=DTYPES[q.dtype.name],
        causal=causal,
        segments=segments,
        hardware=hardware.current(),
        max_segments=num_segments,
    )
    chosen = OP.choose(case, backend=backend)
    shape = (*q.shape[:3], v.shape[3])
    if 0 in (*shape, k.shape[1]):
        return jnp.zeros(shape, q.dtype)
    return chosen.run(q, k, v, segment_ids, kv_segment_ids, case=case, scale=scale)


def default_max_segments(num_tokens: int) -> int:
    """Documents in a row of `num_tokens` up to which cuDNN is used."""
    return min(max(-(-num_tokens // TOKENS_PER_SEGMENT), MIN_SEGMENTS), MAX_SEGMENTS)


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"{shapes} do not fit: they must be [B T N H], [B S K H] and [B S K V] with the same "
            "B, S, K and H."
        )
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{shapes}: {q.shape[2]} query heads cannot share {k.shape[2]} key heads evenly. "
            "N must be a multiple of K."
        )
    dtypes = (q.dtype.name, k.dtype.name, v.dtype.name)
    if len(set(dtypes)) > 1 or q.dtype.name not in DTYPES:
        raise ValueError(f"q, k, v are {dtypes}: they must share one of {[*DTYPES]}. Cast them.")


def _check_segments(
    q: jax.Array,
    k: jax.Array,
    *,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
) -> None:
    if segment_ids is None:
        if kv_segment_ids is not None:
            raise ValueError("kv_segment_ids without segment_ids: give both, or neither.")
        return
    keys = segment_ids if kv_segment_ids is None else kv_segment_ids
    if segment_ids.shape != q.shape[:2] or keys.shape != k.shape[:2]:
        raise ValueError(
            f"segment_ids {segment_ids.shape} and kv_segment_ids {keys.shape} must be "
            f"[B T] = {q.shape[:2]} and [B S] = {k.shape[:2]}. Where T and S differ, give both."
        )


OP: KernelOp[AttentionCase] = KernelOp(
    name="flash_attention",
    reference=reference.flash_attention,
    backends=(
        Backend(name="cudnn", refuses=cudnn.refuses, run=cudnn.run),
        Backend(name="xla", refuses=xla.refuses, run=xla.run),
    ),
    make_case=make_case,
)
