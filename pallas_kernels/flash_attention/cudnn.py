"""Attention through cuDNN: which cases, packed documents as runs, and sharded operands.

Documents reach cuDNN as offsets and lengths, never as a mask: its mask is a finite number added to
the scores, which large scores of another document overcome. A call whose rows are not the runs
that were promised, or that holds a value that is not finite, takes the XLA path; each device
decides for its own rows. cuDNN leaves rows outside all runs unwritten, so they are zeroed here.

Where the caller has checked the rows nothing is decided on the device: each decision stops it for
a word from the host, and the path that is not taken is compiled for every layer all the same. 24
unrolled layers took 68 s to compile with the decisions, of which XLA spent most on merging the
operations of paths that no batch takes.

Rows that are one document each take cuDNN without offsets. With them it is slower though it
multiplies less: 16 rows of 2048 tokens and 16 heads, forward and backward on an H200, took 2.4 ms
whole, and as two documents each 2.6 ms with 2 places a row, 3.2 ms with 16.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import sharded
from pallas_kernels.flash_attention import cudnn_call, heads, xla
from pallas_kernels.flash_attention.cases import AttentionCase
from pallas_kernels.flash_attention.cudnn_call import Saved, Scores
from pallas_kernels.flash_attention.heads import KeyHeads
from pallas_kernels.flash_attention.runs import Runs, are_whole, find_runs

# Widest head that cuDNN multiplies forward and backward, by architecture.
MAX_HEAD_DIM: dict[str, int] = {"sm80": 128, "sm90": 256, "sm100": 128}
# Only these find packed documents by offsets.
OFFSET_ARCHITECTURES = ("sm90", "sm100")

# Letters of the operands' and results' dims, by which they are cut.
Q, KEYS, VALUES, OUT, STATISTICS = "btnh", "bskh", "bskv", "btnv", "bmnt"
BY_CUDNN, IDS = "bn", "bt"
BY_TOKENS = Layout((0, 1, 2, 3))
# Name of what the backward pass needs of the kernel's results, for policies of recomputation.
ATTENTION = "attention"


Gradients = tuple[Array, Array, Array]


def refuses(case: AttentionCase) -> str | None:
    """Why the case is not for cuDNN; None if it is."""
    return (
        _refuses_device(case)
        or _refuses_operands(case)
        or _refuses_segments(case)
        or cudnn_call.refuses_version()
        or sharded.refuses_mesh()
    )


def _refuses_device(case: AttentionCase) -> str | None:
    device = case.hardware
    if device.architecture in MAX_HEAD_DIM:
        return None
    return (
        f"{device.kind} is {device.architecture}; cuDNN attention is for {[*MAX_HEAD_DIM]}. "
        "The XLA backend serves it."
    )


def _refuses_operands(case: AttentionCase) -> str | None:
    if case.dtype == "float32":
        return "operands are float32; cuDNN attention takes bfloat16 or float16. Cast q, k and v."
    if case.num_queries == case.num_keys == 1:
        return "one query and one key; cuDNN wants more of either. The XLA backend serves it."
    limit = MAX_HEAD_DIM[case.hardware.architecture]
    if max(case.kernel_dims) > limit:
        return (
            f"head dims H={case.head_dim}, V={case.value_dim} need {max(case.kernel_dims)} "
            f"channels; cuDNN takes up to {limit} on {case.hardware.architecture}. "
            "The XLA backend serves them."
        )
    return None


def _refuses_segments(case: AttentionCase) -> str | None:
    if case.segments == "any":
        return (
            "segments that are not promised to be runs would go in as a finite number added to "
            "the scores, so large values would leak from one document into another. Say "
            'packed="runs" if each document is one run and padding is last, without '
            "kv_segment_ids."
        )
    if case.in_runs and case.hardware.architecture not in OFFSET_ARCHITECTURES:
        return (
            f"{case.hardware.kind} is {case.hardware.architecture}; packed documents need "
            f"{[*OFFSET_ARCHITECTURES]}. The XLA backend serves them."
        )
    return None


@dataclass(frozen=True)
class _Static:
    """What the trace of one call depends on, besides the operands."""

    case: AttentionCase
    scale: float

    @property
    def whole_row(self) -> bool:
        """True where a row is one document without padding."""
        return self.case.segments == "none"

    @property
    def checked(self) -> bool:
        """True where rows are known to be runs that have places."""
        return self.case.segments == "checked"

    def runs(self, ids: Array) -> Runs:
        return find_runs(ids, max_segments=self.case.max_segments)

    def scores(self, runs: Runs | None) -> Scores:
        return Scores(runs, causal=self.case.causal, scale=self.scale)

    def widened(
        self, q: Array, k: Array, v: Array, *, runs: Runs | None
    ) -> tuple[Array, Array, Array]:
        """The operands with the channels that cuDNN takes; those added are zeros."""
        case = self.case if runs is not None else replace(self.case, segments="none")
        h, v_dim = case.kernel_dims
        return _pad_channels(q, h), _pad_channels(k, h), _pad_channels(v, v_dim)

    def by_xla(self, q: Array, k: Array, v: Array, ids: Array) -> Array:
        return xla.run(q, k, v, ids, None, case=self.case, scale=self.scale)


def run(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    segment_ids: Int[Array, "B T"] | None,
    kv_segment_ids: Int[Array, "B S"] | None,
    *,
    case: AttentionCase,
    scale: float,
) -> Float[Array, "B T N V"]:
    """Return the attention; sharded batches and heads stay where they are."""
    out: Any = _attend(q, k, v, segment_ids, _Static(case, scale))
    return out


@partial(jax.custom_vjp, nondiff_argnames=("static",))
def _attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    ids: Int[Array, "B T"] | None,
    static: _Static,
) -> Float[Array, "B T N V"]:
    given = () if ids is None else (ids,)
    call = heads.partitioned(
        partial(_local_forward, static),
        operands=(Q, KEYS, VALUES, *[IDS] * len(given)),
        results=(OUT,),
    )
    return call(q, k, v, *given)


def _attend_forward(
    q: Array, k: Array, v: Array, ids: Array | None, static: _Static
) -> tuple[Array, tuple[Array | None, ...]]:
    given = () if ids is None else (ids,)
    call = heads.partitioned(
        partial(_local_saving, static),
        operands=(Q, KEYS, VALUES, *[IDS] * len(given)),
        results=(OUT, STATISTICS, BY_CUDNN),
    )
    out, statistics, by_cudnn = (checkpoint_name(x, ATTENTION) for x in call(q, k, v, *given))
    return out, (q, k, v, ids, out, statistics, by_cudnn)


def _attend_backward(
    static: _Static, saved: tuple[Any, ...], grad: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, ids, *results = saved
    given = () if ids is None else (ids,)
    call = heads.partitioned(
        partial(_local_backward, static),
        operands=(Q, KEYS, VALUES, OUT, STATISTICS, BY_CUDNN, OUT, *[IDS] * len(given)),
        results=(Q, KEYS, VALUES),
    )
    grad_q, grad_k, grad_v = call(q, k, v, *results, grad, *given)
    return grad_q, grad_k, grad_v, None


_attend.defvjp(_attend_forward, _attend_backward)


def _local_forward(
    static: _Static, key_heads: KeyHeads, q: Array, k: Array, v: Array, *ids: Array
) -> Array:
    """The attention of the rows and heads of one device."""
    operands = _by_tokens(q, key_heads.take(k), key_heads.take(v))

    def by_cudnn(runs: Runs | None) -> Array:
        out = cudnn_call.forward(*static.widened(*operands, runs=runs), scores=static.scores(runs))
        return out[..., : v.shape[-1]]

    def by_runs() -> Array:
        runs = static.runs(ids[0])
        out = lax.cond(
            runs.complete & _all_finite(q, k, v),
            lambda: by_cudnn(runs),
            lambda: static.by_xla(*operands, ids[0]),
        )
        return _real(ids[0], out)

    if static.whole_row:
        return by_cudnn(None)
    if static.checked:
        return _real(ids[0], by_cudnn(static.runs(ids[0])))
    return lax.cond(are_whole(ids[0]), lambda: by_cudnn(None), by_runs)


def _local_saving(
    static: _Static, key_heads: KeyHeads, q: Array, k: Array, v: Array, *ids: Array
) -> tuple[Array, Array, Bool[Array, "B N"]]:
    """The same, with cuDNN's statistics and, for each row and head, whether cuDNN was used."""
    operands = _by_tokens(q, key_heads.take(k), key_heads.take(v))
    batch, num_tokens, num_heads, _ = q.shape
    num_runs = static.case.max_segments
    shape = (batch, num_runs, num_heads, num_tokens)

    def by_cudnn(runs: Runs | None) -> tuple[Array, Array]:
        scores = static.scores(runs)
        saved = cudnn_call.forward_saving(*static.widened(*operands, runs=runs), scores=scores)
        statistics = saved.statistics.reshape(batch, -1, num_heads, num_tokens)
        missing = num_runs - statistics.shape[1]
        statistics = jnp.pad(statistics, ((0, 0), (0, missing), (0, 0), (0, 0)))
        return saved.out[..., : v.shape[-1]], statistics

    def by_xla() -> tuple[Array, Array]:
        return static.by_xla(*operands, ids[0]), lax.full_like(q, 0, jnp.float32, shape)

    def whole() -> tuple[Array, Array, Bool[Array, "B N"]]:
        return (*by_cudnn(None), jnp.ones((batch, num_heads), bool))

    def by_runs() -> tuple[Array, Array, Bool[Array, "B N"]]:
        runs = static.runs(ids[0])
        fits = runs.complete & _all_finite(q, k, v)
        out, statistics = lax.cond(fits, lambda: by_cudnn(runs), by_xla)
        return _real(ids[0], out), statistics, jnp.broadcast_to(fits, (batch, num_heads))

    if static.whole_row:
        return whole()
    if static.checked:
        out, statistics = by_cudnn(static.runs(ids[0]))
        return _real(ids[0], out), statistics, jnp.ones((batch, num_heads), bool)
    return lax.cond(are_whole(ids[0]), whole, by_runs)


def _local_backward(
    static: _Static,
    key_heads: KeyHeads,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    statistics: Array,
    by_cudnn: Bool[Array, "B N"],
    grad: Array,
    *ids: Array,
) -> Gradients:
    """The gradients of q, k and v on one device."""
    operands = _by_tokens(q, key_heads.take(k), key_heads.take(v))

    def from_cudnn(runs: Runs | None) -> Gradients:
        wide = static.widened(*operands, runs=runs)
        out_wide, grad_wide = (_pad_channels(x, wide[2].shape[-1]) for x in (out, grad))
        _, _, num_heads, num_tokens = statistics.shape
        used = statistics if runs is not None else statistics[:, :1]
        saved = Saved(out_wide, used.reshape(-1, num_heads, num_tokens))
        grads = cudnn_call.backward(*wide, saved=saved, grad=grad_wide, scores=static.scores(runs))
        grad_q, grad_k, grad_v = (
            g[..., : x.shape[-1]] for g, x in zip(grads, operands, strict=True)
        )
        return grad_q, grad_k, grad_v

    def from_xla() -> Gradients:
        _, vjp = jax.vjp(lambda q, k, v: static.by_xla(q, k, v, ids[0]), *operands)
        return vjp(grad)

    def zeroed(grads: Gradients) -> Gradients:
        grad_q, grad_k, grad_v = (_real(ids[0], x) for x in grads)
        return grad_q, grad_k, grad_v

    def by_runs() -> Gradients:
        runs = static.runs(ids[0])
        fits = by_cudnn.all() & _all_finite(grad)
        return zeroed(lax.cond(fits, lambda: from_cudnn(runs), from_xla))

    if static.whole_row:
        grad_q, grad_k, grad_v = from_cudnn(None)
    elif static.checked:
        grad_q, grad_k, grad_v = zeroed(from_cudnn(static.runs(ids[0])))
    else:
        grad_q, grad_k, grad_v = lax.cond(are_whole(ids[0]), lambda: from_cudnn(None), by_runs)
    return grad_q, key_heads.give_back(grad_k, like=k), key_heads.give_back(grad_v, like=v)


def _by_tokens(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Arrays [B T N H] laid out as cuDNN reads them.

    Left to itself XLA lays them out by heads, for the branch that does not use cuDNN, and moves
    them before each call.
    """
    return (
        with_layout_constraint(q, BY_TOKENS),
        with_layout_constraint(k, BY_TOKENS),
        with_layout_constraint(v, BY_TOKENS),
    )


def _pad_channels(x: Array, num_channels: int) -> Array:
    missing = num_channels - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _all_finite(*arrays: Array) -> Bool[Array, ""]:
    return jnp.stack([jnp.isfinite(x).all() for x in arrays]).all()


def _real(ids: Int[Array, "B T"], x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """`x` with zeros for padding."""
    return jnp.where((ids > 0)[:, :, None, None], x, jnp.zeros((), x.dtype))
