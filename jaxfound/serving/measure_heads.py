"""How long a token takes if the keys and values of every head were cached, in place of latents.

What MLA is measured beside: the same weights, a slot a token, and no page.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxfound.config.run import RunConfig
from jaxfound.config.schema import ConfigError
from jaxfound.models.block import Block, BlockInput, layers_apart
from jaxfound.models.build import Arrays, Frame
from jaxfound.models.cache import HeadCache
from jaxfound.models.layers.attention import cached_view
from jaxfound.models.served import serving_arrays
from jaxfound.serving.decode_point import NUM_WARM, Load, Point, Times, peak_bytes, point_of
from jaxfound.serving.drafts import with_modules
from jaxfound.serving.measure_decode import frame_of, noise, normal

# Decodes one token of each row.
type Step = Callable[..., tuple[jax.Array, tuple[HeadCache, ...]]]


def measure_heads(cfg: RunConfig, load: Load) -> Iterator[Point]:
    """Yield a point for each number of rows, with the keys and values of every head cached.

    Raises:
        ConfigError: the model caches no latents.
    """
    model = cfg.model
    if model.mixer != "mla":
        raise ConfigError(
            f"this model has mixer={model.mixer}: only a cache of latents (mixer=mla) has another "
            "form, with the keys and values of every head. Leave out --head-rows"
        )
    frame = frame_of(cfg)
    frame, arrays = with_modules(frame, noise(frame), num=0, release=True)
    kept = serving_arrays(frame, arrays, release=True)
    mla, size = model.mla, jnp.dtype(frame.execution.dtype).itemsize
    token_bytes = model.num_layers * model.num_heads * (mla.qk_head_dim + mla.v_head_dim) * size
    step = jax.jit(partial(_head_step, frame), donate_argnums=1)
    for rows in load.rows:
        caches = head_caches(frame, rows=rows, num_slots=load.context)
        rounds = []
        for _ in range(load.rounds):
            caches, times = time_heads(step, kept, caches, load, rows=rows)
            rounds.append(times)
        for array in jax.tree.leaves(caches):
            array.delete()
        yield point_of(
            "heads", frame.cfg, kept, load, rows=rows, token_bytes=token_bytes, rounds=rounds
        )


def head_caches(frame: Frame, *, rows: int, num_slots: int) -> tuple[HeadCache, ...]:
    """Return a cache of noise for each layer."""
    mla, heads = frame.cfg.mla, frame.cfg.num_heads
    name = jnp.dtype(frame.execution.dtype).name
    keys = jax.random.split(jax.random.key(2), (frame.cfg.num_layers, 2))
    return tuple(
        HeadCache(
            normal(pair[0], (rows, heads, num_slots, mla.qk_head_dim), name),
            normal(pair[1], (rows, heads, num_slots, mla.v_head_dim), name),
        )
        for pair in keys
    )


def _head_step(
    frame: Frame,
    arrays: Arrays,
    caches: tuple[HeadCache, ...],
    tokens: jax.Array,
    position: jax.Array,
) -> tuple[jax.Array, tuple[HeadCache, ...]]:
    """Return the most likely next tokens [B], and the caches with the tokens given [B]."""
    model = frame.bind(*arrays)
    at = jnp.full((len(tokens), 1), position)
    row = BlockInput(cached_view(at, caches[0].keys.shape[2]), jnp.ones_like(at, bool))
    x, after = model.embedding(tokens[:, None]), list[HeadCache]()
    for block, cache in zip(blocks_of(model.leading, model.layers), caches, strict=True):
        x, longer = block.extend(x, cache, row)
        after.append(cast(HeadCache, longer))
    logits = model.logits(model.final_norm(x))[:, 0]
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), tuple(after)


def blocks_of(*stacks: Block | None) -> list[Block]:
    """Return the layers of stacks that lie apart, in order."""
    return [block for stack in stacks if stack for block in layers_apart(stack) or ()]


def time_heads(
    step: Step,
    arrays: Arrays,
    caches: tuple[HeadCache, ...],
    load: Load,
    *,
    rows: int,
) -> tuple[tuple[HeadCache, ...], Times]:
    """Time steps, each begun before the tokens of the one before are read."""
    first = load.context - load.steps - NUM_WARM
    tokens, ends_s = jnp.zeros(rows, jnp.int32), list[float]()
    for i in range(load.steps + NUM_WARM):
        before = tokens
        tokens, caches = step(arrays, caches, before, jnp.int32(first + i))
        np.asarray(before)
        ends_s.append(time.perf_counter())
    np.asarray(tokens)
    ends_s.append(time.perf_counter())
    return caches, Times(tuple(np.diff(ends_s[NUM_WARM:]).tolist()), peak_bytes())
