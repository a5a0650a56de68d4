"""Token embedding and output head, rows padded to a multiple; padding never counts."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxfound.config.model import ModelConfig
from jaxfound.models.execution import Execution
from jaxfound.models.layers.parameter import weight
from jaxfound.parallelism.stream import to_stream

NEG_INF = -1e30
# Dims of an embedding's table.
TABLE = ("vocab", "embed")


class Embedding(nnx.Module):
    """One row of channels for each token id."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs, execution: Execution) -> None:
        dims = (("vocab", cfg.padded_vocab_size), ("embed", cfg.embed_dim))
        self.table = weight(rngs, dims, std=cfg.init_std)
        self.vocab_size = cfg.vocab_size
        self.execution = execution

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the rows of tokens [B T] as [B T D]; ids outside the vocabulary give NaN."""
        run, table = self.execution, self.table[...]
        # Past the table, because a negative index would count from its end.
        known = (tokens >= 0) & (tokens < self.vocab_size)
        rows: jax.Array = picked_rows(table, jnp.where(known, tokens, table.shape[0]), run)
        # Whole first: left to the partitioner, tokens would be cut and the table gathered.
        rows = run.rules.constrain(rows, "batch", "seq", "embed")
        return to_stream(rows, run.rules)


@partial(jax.custom_vjp, nondiff_argnames=("run",))
def picked_rows(
    table: Float[Array, "V D"], ids: Int[Array, "B T"], run: Execution
) -> Float[Array, "B T D"]:
    """Return rows of a table by number, in the format of compute; numbers behind its end give NaN.

    Gradients of a row are added up in float32: a token that is frequent has thousands of them, and
    to a sum in bfloat16 all but the first few hundred are too small to change it.
    """
    return _picked_forward(table, ids, run)[0]


def _picked_forward(
    table: Float[Array, "V D"], ids: Int[Array, "B T"], run: Execution
) -> tuple[Float[Array, "B T D"], tuple[Int[Array, "B T"], Float[Array, "V 0"]]]:
    used = run.rules.gather(table.astype(run.dtype), *TABLE)
    rows = jnp.take(used, ids, axis=0, mode="fill", fill_value=jnp.nan)
    # An array of no columns says how many rows there are, and in what format.
    return rows, (ids, table[:, :0])


def _picked_backward(
    run: Execution,
    saved: tuple[Int[Array, "B T"], Float[Array, "V 0"]],
    grad: Float[Array, "B T D"],
) -> tuple[Float[Array, "V D"], None]:
    ids, like = saved
    sums = jnp.zeros((like.shape[0], grad.shape[-1]), like.dtype)
    sums = sums.at[ids].add(grad.astype(like.dtype), mode="drop")
    return run.rules.sum_of_picked(sums, *TABLE), None


picked_rows.defvjp(_picked_forward, _picked_backward)


class Head(nnx.Module):
    """Logits of the next token; its own matrix, or the embedding's when tied."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs, execution: Execution) -> None:
        dims = (("embed", cfg.embed_dim), ("vocab", cfg.padded_vocab_size))
        self.kernel = None if cfg.tie_embeddings else weight(rngs, dims, std=cfg.init_std)
        self.vocab_size = cfg.vocab_size
        self.execution = execution

    def matrix(self, embedding: Embedding) -> jax.Array:
        """Return the matrix [D V] that turns channels into logits, whole over fsdp."""
        run = self.execution
        kernel = embedding.table[...].T if self.kernel is None else self.kernel[...]
        return run.rules.gather(kernel.astype(run.dtype), "embed", "vocab")


def logits_of(x: jax.Array, matrix: jax.Array, *, head: Head) -> jax.Array:
    """Return float32 logits [B T V] of x [B T D]; padded ids are -1e30, so they never win."""
    product = _float32_product if x.dtype == jnp.float32 else _bfloat16_product
    logits_BTV = product(x, matrix)
    logits_BTV = head.execution.rules.constrain(logits_BTV, "batch", "seq", "vocab")
    real_V = jnp.arange(matrix.shape[1]) < head.vocab_size
    return jnp.where(real_V[None, None, :], logits_BTV, NEG_INF)


def _float32_product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.einsum("BTD,DV->BTV", x, matrix, precision=jax.lax.Precision.HIGHEST)


@jax.custom_vjp
def _bfloat16_product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.einsum("BTD,DV->BTV", x, matrix, preferred_element_type=jnp.float32)


def _bfloat16_forward(
    x: jax.Array, matrix: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _bfloat16_product(x, matrix), (x, matrix)


def _bfloat16_backward(
    saved: tuple[jax.Array, jax.Array], grad_BTV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # Rounded first: the automatic rule multiplies float32 gradients, which takes twice as long.
    x, matrix = saved
    g = grad_BTV.astype(x.dtype)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    grad_x = product("BTV,DV->BTD", g, matrix).astype(x.dtype)
    return grad_x, product("BTD,BTV->DV", x, g).astype(matrix.dtype)


_bfloat16_product.defvjp(_bfloat16_forward, _bfloat16_backward)
