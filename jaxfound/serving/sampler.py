"""Chooses the next token of each row from its logits, on the device.

A row's draw depends on its logits, its own settings and its own count of draws: not on the rows
beside it, nor on which row it is, nor on what was preempted meanwhile.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxfound.models.layers.embedding import NEG_INF
from jaxfound.serving.sampling import MAX_BIASES, Sampling

__all__ = [
    "LEVELS",
    "MAX_TOP",
    "Draws",
    "History",
    "Level",
    "RowSampling",
    "Sampling",
    "adjusted",
    "counted",
    "empty_history",
    "empty_rows",
    "history_of",
    "inside",
    "level_of",
    "logprobs_of",
    "real_logits",
    "row_of",
    "sample_rows",
]

# Most likely tokens whose log-probabilities can be asked for; as many as OpenAI's API allows.
MAX_TOP = 20

type Level = Literal["greedy", "random", "shaped", "sorted"]

# What the batch needs, each level with all that the ones before it have. The host knows and
# chooses the program: a choice on the device would make a GPU's host wait for the logits.
LEVELS: tuple[Level, ...] = ("greedy", "random", "shaped", "sorted")


class RowSampling(NamedTuple):
    """`Sampling` of each row, as arrays."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    repetition: Float[Array, " B"]
    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]
    key: UInt32[Array, "B 2"]
    bias_ids: Int[Array, "B L"]
    bias: Float[Array, "B L"]


class History(NamedTuple):
    """Which tokens a row's prompt holds, and how often its continuation holds each."""

    in_prompt: Bool[Array, "B V"]
    num_drawn: Int[Array, "B V"]


class Draws(NamedTuple):
    """A token of each row.

    Attributes:
        tokens: drawn; -1 where the logits are not finite.
        logprobs: theirs under the model's own distribution: before biases, penalties, temperature
            and filters.
        top_tokens: the n most likely under it, best first.
        top_logprobs: theirs.
    """

    tokens: Int[Array, " B"]
    logprobs: Float[Array, " B"]
    top_tokens: Int[Array, "B n"]
    top_logprobs: Float[Array, "B n"]


def level_of(samplings: Iterable[Sampling]) -> Level:
    """Return the lowest level that does all of these."""
    return LEVELS[max((_level(sampling) for sampling in samplings), default=0)]


def _level(sampling: Sampling) -> int:
    if sampling.temperature > 0 and sampling.filters:
        return 3
    if sampling.penalises or sampling.logit_bias or (sampling.min_p and sampling.temperature):
        return 2
    return int(sampling.temperature > 0)


def row_of(sampling: Sampling) -> RowSampling:
    """Return one row, without the dim of rows, as arrays of the host.

    Raises:
        ValueError: if it has no seed.
    """
    if sampling.seed is None:
        raise ValueError("sampling.seed is None: whoever takes the request draws a seed for it")
    ids = np.full(MAX_BIASES, np.iinfo(np.int32).max, np.int32)
    bias = np.zeros(MAX_BIASES, np.float32)
    for i, (token, value) in enumerate(sampling.logit_bias):
        ids[i], bias[i] = token, value
    values: tuple[Any, ...] = (
        np.float32(sampling.temperature),
        np.int32(min(sampling.top_k, np.iinfo(np.int32).max)),
        np.float32(sampling.top_p),
        np.float32(sampling.min_p),
        np.float32(sampling.repetition_penalty),
        np.float32(sampling.presence_penalty),
        np.float32(sampling.frequency_penalty),
        # The words of `jax.random.key(seed)`, which without x64 would drop the upper one.
        np.array([sampling.seed >> 32 & 0xFFFFFFFF, sampling.seed & 0xFFFFFFFF], np.uint32),
        ids,
        bias,
    )
    return RowSampling(*values)


def empty_rows(num_rows: int) -> RowSampling:
    """Return rows that are greedy."""
    one = row_of(Sampling(temperature=0.0))
    return jax.tree.map(lambda value: jnp.asarray(np.stack([value] * num_rows)), one)


def empty_history(num_rows: int, *, vocab_size: int) -> History:
    """Return rows without a token. `vocab_size`: of the logits, padding included."""
    shape = (num_rows, vocab_size)
    return History(jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32))


def history_of(prompt: Sequence[int], drawn: Sequence[int], *, vocab_size: int) -> History:
    """Return one row, without the dim of rows, as arrays of the host."""
    in_prompt = np.zeros(vocab_size, bool)
    in_prompt[np.asarray(prompt, np.int64)] = True
    counts = np.bincount(np.asarray(drawn, np.int64), minlength=vocab_size)
    values: tuple[Any, ...] = (in_prompt, counts.astype(np.int32))
    return History(*values)


def counted(history: History, tokens: Int[Array, " B"], draws: Bool[Array, " B"]) -> History:
    """Return the history with a token more in each row that draws."""
    rows = jnp.arange(tokens.shape[0])
    draws &= tokens >= 0
    more = history.num_drawn.at[rows, tokens].add(draws.astype(jnp.int32))
    return history._replace(num_drawn=more)


def sample_rows(
    logits: Float[Array, "B V"],
    rows: RowSampling,
    index: Int[Array, " B"],
    *,
    history: History | None,
    num_ids: int,
    level: Level,
    num_top: int = 0,
) -> Draws:
    """Return a token of each row.

    Args:
        logits: of the model.
        rows: how each row draws.
        index: draws that each row's request has had before.
        history: for penalties; None = no row has any.
        num_ids: ids of the tokenizer; rows of the vocabulary beyond them are never drawn.
        level: at least what each row needs; a higher one gives the same tokens, later.
        num_top: likely tokens to report.
    """
    logits = real_logits(logits, num_ids=num_ids)
    if level == "greedy":
        tokens = jnp.argmax(logits, axis=-1)
    else:
        at = LEVELS.index(level)
        shaped = adjusted(logits, rows, history, num_ids=num_ids) if at >= 2 else logits
        tokens = _drawn(shaped, rows, index, shaped=at >= 2, ordered=at >= 3)
    finite = jnp.isfinite(jnp.max(logits, axis=-1))
    tokens = jnp.where(finite, tokens, -1).astype(jnp.int32)
    return logprobs_of(logits, tokens, num_top=num_top)


def real_logits(logits: Float[Array, "*B V"], *, num_ids: int) -> Float[Array, "*B V"]:
    """Return float32 logits in which no row of the vocabulary beyond the tokenizer's can win.

    Published vocabularies hold rows beyond the tokenizer's ids; trained or not, they name no token.
    """
    real = jnp.arange(logits.shape[-1]) < num_ids
    real = real.reshape((1,) * (logits.ndim - 1) + real.shape)
    return jnp.where(real, logits.astype(jnp.float32), NEG_INF)


def logprobs_of(logits: Float[Array, "B V"], tokens: Int[Array, " B"], *, num_top: int) -> Draws:
    """Return the log-probabilities of `tokens`, and the most likely ones, under real logits."""
    total = jax.nn.logsumexp(logits, axis=-1)
    there = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=-1)[:, 0]
    top, top_tokens = jax.lax.top_k(logits, num_top)
    return Draws(tokens, there - total, top_tokens, top - total[:, None])


def adjusted(
    logits: Float[Array, "B V"], rows: RowSampling, history: History | None, *, num_ids: int
) -> Float[Array, "B V"]:
    """Return logits with each row's biases, then its penalties."""
    numbers = jnp.arange(logits.shape[0])[:, None]
    ids = jnp.where(rows.bias_ids < num_ids, rows.bias_ids, logits.shape[-1])
    logits = logits.at[numbers, ids].add(rows.bias, mode="drop")
    if history is None:
        return logits
    known = history.in_prompt | (history.num_drawn > 0)
    repetition = rows.repetition[:, None]
    weaker = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(known, weaker, logits)
    logits -= rows.presence[:, None] * (history.num_drawn > 0)
    return logits - rows.frequency[:, None] * history.num_drawn


def _drawn(
    logits: Float[Array, "B V"],
    rows: RowSampling,
    index: Int[Array, " B"],
    *,
    shaped: bool,
    ordered: bool,
) -> Int[Array, " B"]:
    best = jnp.max(logits, axis=-1, keepdims=True)
    warm = rows.temperature > 0
    # From the best one down: a small temperature makes -inf of the others, never a second inf.
    scaled = (logits - best) / jnp.where(warm, rows.temperature, 1.0)[:, None]
    if shaped:
        allowed = scaled >= jnp.log(rows.min_p)[:, None]
        if ordered:
            allowed &= inside(scaled, top_k=rows.top_k, top_p=rows.top_p)
        scaled = jnp.where(allowed, scaled, -jnp.inf)
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(rows.key), index)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
    drawn = jnp.argmax(scaled + noise, axis=-1)
    return jnp.where(warm, drawn, jnp.argmax(logits, axis=-1))


def inside(
    logits: Float[Array, "B V"], *, top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> Bool[Array, "B V"]:
    """Return True for the tokens that top-k leaves, and of those top-p; never none."""
    size = logits.shape[-1]
    ids = jnp.broadcast_to(jnp.arange(size), logits.shape)
    negative, order = jax.lax.sort((-logits, ids), num_keys=1)
    ranked = -negative
    last = jnp.where(top_k > 0, jnp.minimum(top_k, size), size) - 1
    weakest = jnp.take_along_axis(ranked, last[:, None], axis=-1)
    among = ranked >= weakest
    probability = jax.nn.softmax(jnp.where(among, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # 1 = all: sums of float32 may reach 1 before the last token.
    among &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    rows = jnp.arange(logits.shape[0])[:, None]
    return jnp.zeros(logits.shape, bool).at[rows, order].set(among)
