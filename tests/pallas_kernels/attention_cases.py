"""Operands, segment layouts and comparisons for attention, and a stand-in for cuDNN."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.accuracy import difference
from pallas_kernels.flash_attention import flash_attention, reference
from pallas_kernels.flash_attention.cases import TOLERANCES
from pallas_kernels.flash_attention.cudnn_call import Saved

LAYOUTS = ("none", "runs", "any")


# What makes a program that runs once start sooner, by JAX's name of the platform.
QUICK = {
    "cpu": {"xla_backend_optimization_level": 0},
    "gpu": {"xla_gpu_autotune_level": 0},
}


def quick_jit(function):
    """`function` compiled in half the time, because a test runs it only a few times."""
    return jax.jit(function, compiler_options=QUICK[jax.default_backend()])


def make_operands(sizes, dtype, *, seed=0):
    """q, k, v and a gradient of the result."""
    b, t, s, n, k, h, v = sizes
    rng = np.random.default_rng([seed, *sizes])
    shapes = ((b, t, n, h), (b, s, k, h), (b, s, k, v), (b, t, n, v))
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def make_segments(batch, num_tokens, *, layout, seed=0):
    """Documents of each row: as a loader packs them, or in any order; some tokens are padding."""
    rng = np.random.default_rng([seed, batch, num_tokens])
    ids = np.zeros((batch, num_tokens), np.int32)
    for row in ids:
        ends = np.unique(np.append(rng.integers(1, num_tokens + 1, 4), max(num_tokens - 2, 1)))
        start = 0
        for number, end in enumerate(ends, 1):
            row[start:end] = number
            start = end
        if layout == "any":
            rng.shuffle(row)
    return jnp.asarray(ids)


def segments_for(sizes, *, layout):
    """`segment_ids`, `kv_segment_ids` and `packed` for operands of `sizes`."""
    b, t, s = sizes[:3]
    if layout == "none":
        return {"segment_ids": None}
    if t != s:
        ids = make_segments(b, t, layout="any"), make_segments(b, s, layout="any", seed=1)
        return {"segment_ids": ids[0], "kv_segment_ids": ids[1]}
    packed = "runs" if layout == "runs" else "any"
    return {"segment_ids": make_segments(b, t, layout=layout), "packed": packed}


def with_gradients(q, k, v, grad, ids, kv_ids, **settings):
    """The result of the op, and the gradients of q, k and v."""
    out, vjp = jax.vjp(
        lambda q, k, v: flash_attention(
            q, k, v, segment_ids=ids, kv_segment_ids=kv_ids, scale=q.shape[-1] ** -0.5, **settings
        ),
        q,
        k,
        v,
    )
    return out, *vjp(grad)


def expected_with_gradients(q, k, v, grad, ids, kv_ids, *, causal):
    """The same by the reference, in float32."""
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    out, vjp = jax.vjp(
        lambda q, k, v: reference.flash_attention(
            q,
            k,
            v,
            segment_ids=ids,
            kv_segment_ids=kv_ids,
            causal=causal,
            scale=q.shape[-1] ** -0.5,
        ),
        *wide,
    )
    return out, *vjp(grad.astype(jnp.float32))


def check(found, expected, dtype):
    """Compare a result and gradients with those of the reference."""
    limit = TOLERANCES[jnp.dtype(dtype).name]
    for name, x, y in zip(("out", "q", "k", "v"), found, expected, strict=True):
        assert x.dtype == jnp.dtype(dtype), name
        x, y = np.asarray(x.astype(jnp.float32)), np.asarray(y)
        measured = difference(x, y)
        size = float(np.sqrt(np.mean(y * y)))
        largest = float((np.abs(x - y) / np.maximum(max(size, 1e-3), np.abs(y) / 6)).max())
        # An array of zeros (a softmax over one key has no gradient) has no direction to compare.
        assert size < 1e-6 or measured.total <= limit.total, (name, measured, largest)
        assert largest <= limit.largest, (name, measured, largest)


def check_case(sizes, dtype, *, causal, layout, backend):
    """Compare `backend` with the reference on operands of `sizes`."""
    operands = make_operands(sizes, dtype)
    given = segments_for(sizes, layout=layout)
    packed = given.get("packed", "any")
    ids, kv_ids = given["segment_ids"], given.get("kv_segment_ids")

    @quick_jit
    def both(q, k, v, grad, ids, kv_ids):
        settings = {"causal": causal, "packed": packed, "backend": backend}
        found = with_gradients(q, k, v, grad, ids, kv_ids, **settings)
        return found, expected_with_gradients(q, k, v, grad, ids, kv_ids, causal=causal)

    found, expected = both(*operands, ids, kv_ids)
    check(found, expected, dtype)


def rows_of(ids, document):
    """Where `ids` is `document`, as an index of [B T N H]."""
    return np.asarray(ids)[..., None, None] == document


class StandIn:
    """Does what cuDNN's binding does, by the reference; rows outside all runs are NaN."""

    @staticmethod
    def _attend(q, k, v, scores):
        ids = None
        if scores.runs is not None:
            places = jnp.arange(q.shape[1])[None, None, :] - scores.runs.starts[:, :, None]
            inside = (places >= 0) & (places < scores.runs.lengths[:, :, None])
            numbers = jnp.arange(1, inside.shape[1] + 1)
            ids = (inside & (scores.runs.starts >= 0)[:, :, None]).astype(jnp.int32)
            ids = (ids * numbers[None, :, None]).sum(1)
        out = reference.flash_attention(
            q, k, v, segment_ids=ids, causal=scores.causal, scale=scores.scale
        )
        return out.astype(q.dtype), ids

    @classmethod
    def forward(cls, q, k, v, *, scores):
        out, ids = cls._attend(q, k, v, scores)
        return cls._unwritten(out, ids)

    @classmethod
    def forward_saving(cls, q, k, v, *, scores):
        return Saved(cls.forward(q, k, v, scores=scores), cls._statistics(q, scores))

    @classmethod
    def backward(cls, q, k, v, *, saved, grad, scores):
        (_, ids), vjp = jax.vjp(lambda q, k, v: cls._attend(q, k, v, scores), q, k, v)
        grads = vjp((grad, jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), ids)))
        mixed_up = (saved.statistics != cls._statistics(q, scores)).any()
        return tuple(jnp.where(mixed_up, jnp.nan, cls._unwritten(g, ids)) for g in grads)

    @staticmethod
    def _statistics(q, scores):
        """Numbers by which the backward pass knows whose statistics it was given."""
        num_runs = 1 if scores.runs is None else scores.runs.starts.shape[1]
        mine = jnp.swapaxes(q.astype(jnp.float32).sum(-1), 1, 2)
        return jnp.repeat(mine, num_runs, axis=0)

    @staticmethod
    def _unwritten(x, ids):
        return x if ids is None else jnp.where((ids > 0)[:, :, None, None], x, jnp.nan)


def stand_in_for_cudnn(monkeypatch, stand_in=StandIn):
    """Let the cuDNN backend call `stand_in`."""
    for name in ("forward", "forward_saving", "backward"):
        path = f"pallas_kernels.flash_attention.cudnn_call.{name}"
        monkeypatch.setattr(path, getattr(stand_in, name))
