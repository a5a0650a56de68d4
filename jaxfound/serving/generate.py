"""One prompt, one continuation: prefill the cache, then decode a token at a time."""

import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxfound.config.load import load as load_config
from jaxfound.config.schema import ConfigError
from jaxfound.data.text_stream import TextStream
from jaxfound.data.tokenizer import JsonTokenizer, Tokenizer, check_vocabulary, load_tokenizer
from jaxfound.models.build import Arrays, Frame
from jaxfound.models.cache import Cache, empty_cache
from jaxfound.models.execution import Execution
from jaxfound.resources.checkpoint import CheckpointError, CheckpointManager
from jaxfound.resources.run_directory import RunDirectory
from jaxfound.serving.prompt import prompt_ids
from jaxfound.serving.sampler import (
    History,
    Level,
    RowSampling,
    Sampling,
    counted,
    history_of,
    level_of,
    row_of,
    sample_rows,
)

# Prompts and caches are padded to multiples of this, so that few sizes are compiled.
SIZE_STEP = 64
DEFAULT = Sampling()


@dataclass(frozen=True)
class Generator:
    """Weights, ready to continue prompts.

    Attributes:
        frame: the model without arrays.
        arrays: its parameters and buffers.
        tokenizer: text to ids and back.
        step: training steps the weights have seen.
        start: ids before a prompt that is text. None = bos, which began every document in our
            training; for published weights, `JsonTokenizer.prompt_start`.
    """

    frame: Frame
    arrays: Arrays
    tokenizer: Tokenizer
    step: int
    start: tuple[int, ...] | None = None

    @property
    def prompt_start(self) -> tuple[int, ...]:
        """Ids before a prompt that is text."""
        return (self.tokenizer.bos_id,) if self.start is None else self.start

    def text(
        self, prompt: str | Sequence[int], *, max_tokens: int, sampling: Sampling = DEFAULT
    ) -> str:
        """Return the continuation of `prompt`."""
        return "".join(self.stream(prompt, max_tokens=max_tokens, sampling=sampling))

    def stream(
        self, prompt: str | Sequence[int], *, max_tokens: int, sampling: Sampling = DEFAULT
    ) -> Iterator[str]:
        """Yield the continuation in pieces, each as soon as its characters are complete."""
        stream = TextStream(self.tokenizer)
        for token in self.tokens(prompt, max_tokens=max_tokens, sampling=sampling):
            if piece := stream.push(token):
                yield piece
        if piece := stream.finish():
            yield piece

    def tokens(
        self, prompt: str | Sequence[int], *, max_tokens: int, sampling: Sampling = DEFAULT
    ) -> Iterator[int]:
        """Yield the ids of the continuation, up to the end-of-text id or `max_tokens`.

        Args:
            prompt: text, or the ids of a whole prompt, such as `chat_ids` gives.
            max_tokens: longest continuation.
            sampling: how each is drawn; ids that the tokenizer does not have never are.

        Raises:
            ConfigError: if prompt and continuation are longer than model.max_positions, or the
                prompt is empty.
        """
        prompt_T = self._prompt(prompt)
        limit = self.frame.cfg.max_positions
        if max_tokens < 1 or len(prompt_T) + max_tokens > limit:
            raise ConfigError(
                f"max_tokens={max_tokens} after a prompt of {len(prompt_T)} tokens: the sum must "
                f"be at most model.max_positions={limit}, and max_tokens at least 1. "
                f"Use max_tokens up to {max(limit - len(prompt_T), 0)}"
            )
        padded = np.zeros((1, rounded(len(prompt_T))), np.int32)
        padded[0, : len(prompt_T)] = prompt_T
        cache = self._empty(len(prompt_T) + max_tokens)
        logits, cache = self._prefill(self.arrays, jnp.asarray(padded), cache)
        row = logits[:, len(prompt_T) - 1]
        choose = self._chooser(sampling, prompt_T)
        for i in range(max_tokens):
            token = choose(row)
            if int(token[0]) == self.tokenizer.eos_id:
                return
            yield int(token[0])
            position = jnp.full((1, 1), len(prompt_T) + i, jnp.int32)
            row, cache = self._decode(self.arrays, token[:, None], cache, position)

    def _prompt(self, prompt: str | Sequence[int]) -> list[int]:
        return prompt_ids(prompt, tokenizer=self.tokenizer, start=self.prompt_start)

    def _chooser(self, sampling: Sampling, prompt: list[int]) -> Callable[[jax.Array], jax.Array]:
        """Return what draws a token from logits [1 V], and counts its draws."""
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        size, level = self.frame.cfg.padded_vocab_size, level_of([sampling])
        batched = partial(jax.tree.map, lambda value: jnp.asarray(value)[None])
        rows: RowSampling = batched(row_of(sampling))
        history: History | None = None
        if sampling.penalises:
            history = batched(history_of(prompt, [], vocab_size=size))
        numbers = itertools.count()

        def choose(logits: jax.Array) -> jax.Array:
            nonlocal history
            index = jnp.full((1,), next(numbers), jnp.int32)
            token, history = self._sample(logits, rows, index, history, level=level)
            if int(token[0]) < 0:
                raise FloatingPointError("the model gives logits that are not finite")
            return token

        return choose

    def _empty(self, num_tokens: int) -> Cache:
        dtype = self.frame.execution.dtype
        return empty_cache(self.frame.cfg, batch=1, num_slots=rounded(num_tokens), dtype=dtype)

    @cached_property
    def _prefill(self):  # noqa: ANN202
        def prefill(arrays: Arrays, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
            positions = jnp.arange(tokens.shape[1])[None, :]
            return self.frame.bind(*arrays).extend(tokens, cache, positions)

        return jax.jit(prefill, donate_argnums=2)

    @cached_property
    def _decode(self):  # noqa: ANN202
        def decode(
            arrays: Arrays, token: jax.Array, cache: Cache, position: jax.Array
        ) -> tuple[jax.Array, Cache]:
            logits, cache = self.frame.bind(*arrays).extend(token, cache, position)
            return logits[:, 0], cache

        return jax.jit(decode, donate_argnums=2)

    @cached_property
    def _sample(self):  # noqa: ANN202
        num_ids = self.tokenizer.vocab_size

        def draw(
            logits: jax.Array,
            rows: RowSampling,
            index: jax.Array,
            history: History | None,
            *,
            level: Level,
        ) -> tuple[jax.Array, History | None]:
            token = sample_rows(
                logits, rows, index, history=history, num_ids=num_ids, level=level
            ).tokens
            if history is not None:
                history = counted(history, token, jnp.ones((1,), bool))
            return token, history

        return jax.jit(draw, static_argnames="level")


def rounded(num_tokens: int) -> int:
    """Return `num_tokens` rounded up to a size that is compiled."""
    return -(-num_tokens // SIZE_STEP) * SIZE_STEP


def load_generator(
    run: Path, *, step: int | None = None, tokenizer: str | None = None
) -> Generator:
    """Return a generator of the weights in a run's directory.

    Args:
        run: the directory, as `jaxfound train` names it.
        step: which checkpoint; the newest intact one by default.
        tokenizer: in place of the run's data.tokenizer, whose file may have moved.

    Raises:
        CheckpointError: if there is no run, or no checkpoint, or it is damaged.
        DataError: if the tokenizer cannot be read, or has more ids than the model.
    """
    there = RunDirectory(run)
    if not there.config.exists():
        raise CheckpointError(
            f"{run} is not a run: it has no {there.config.name}. Give the folder that "
            "`jaxfound train` named, e.g. runs/tiny-mla-moe"
        )
    cfg = load_config(there.config)
    frame = Frame(cfg.model, execution=Execution(precision=cfg.precision))
    words = load_tokenizer(tokenizer or cfg.data.tokenizer)
    check_vocabulary(words, vocab_size=cfg.model.vocab_size)
    arrays, found = load_weights(there, frame, step=step)
    # Step 0 was not trained here: its prompts begin as where it was published.
    start = words.prompt_start if found == 0 and isinstance(words, JsonTokenizer) else None
    return Generator(frame, arrays, words, found, start)


def load_weights(there: RunDirectory, frame: Frame, *, step: int | None) -> tuple[Arrays, int]:
    """Return parameters and buffers of a checkpoint on this host's first device, and its step."""
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = frame.shapes()
    like = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=first), shapes._asdict()
    )
    with CheckpointManager(there.checkpoints, keep=0) as checkpoints:
        found = checkpoints.restore_weights(step, like=like)
    return Arrays(**cast(dict, found.state)), found.step
