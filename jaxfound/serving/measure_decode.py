"""How long a token takes while many long rows decode, by the programs that serve.

Weights and pages are noise: what a step costs does not depend on what they say, but for the
experts that are chosen, and a prompt of 16 K tokens need not be computed for each row.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxfound.config.run import RunConfig
from jaxfound.config.serve import ServeConfig
from jaxfound.models import describe, execution_of
from jaxfound.models.build import Arrays, Frame
from jaxfound.models.pages import page_bytes, page_shapes
from jaxfound.parallelism import make_plan
from jaxfound.serving.decode_point import NUM_WARM, Load, Point, Times, peak_bytes, point_of
from jaxfound.serving.request import Request, ScheduledBatch, ScheduledRow
from jaxfound.serving.request import Sequence as Row
from jaxfound.serving.runner import Runner
from jaxfound.serving.sampling import Sampling
from jaxfound.serving.step import RowResult

STD = 0.02


def noise(frame: Frame, *, seed: int = 0) -> Arrays:
    """Return weights on the first device: norms 1, biases 0, matrices normal in the compute format.

    In that format, because the master weights of a model that is to be served need not fit.
    """
    params, buffers = frame.shapes()
    keys = iter(jax.random.split(jax.random.key(seed), len(params)))

    def draw(path: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        key = next(keys)
        if path.endswith("scale"):
            return jnp.ones(shape.shape, shape.dtype)
        return normal(key, shape.shape, jnp.dtype(frame.execution.dtype).name)

    drawn = {path: draw(path, shape) for path, shape in params.items()}
    return Arrays(drawn, {path: jnp.zeros(s.shape, s.dtype) for path, s in buffers.items()})


@partial(jax.jit, static_argnums=(1, 2))
def normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Return small normal numbers of the format with that name."""
    return STD * jax.random.normal(key, shape, jnp.dtype(dtype))


def frame_of(cfg: RunConfig) -> Frame:
    """Return the model without its weights, for one device."""
    plan = make_plan(cfg, 1, params=describe(cfg.model))
    return Frame(cfg.model, execution=execution_of(plan, cfg.precision))


def measure_pages(cfg: RunConfig, load: Load) -> Iterator[Point]:
    """Yield a point for each number of rows, by the programs that serve.

    Raises:
        ConfigError: the model or the device cannot be served with so many tokens.
    """
    frame, serve = frame_of(cfg), serve_config(cfg.serve, load)
    num_ids = cfg.model.vocab_size
    runner = Runner(frame, noise(frame), serve, num_ids=num_ids, release=True)
    runner.fill_pages(jax.random.key(1))
    shapes = page_shapes(
        frame.cfg,
        num_pages=1,
        page_size=1,
        dtype=jnp.dtype(frame.execution.dtype),
        cache_format=serve.cache_format,
    )
    for rows in load.rows:
        batches = partial(batch_at, rows=rows, serve=serve)
        rounds = [time_runner(runner, batches, load) for _ in range(load.rounds)]
        yield point_of(
            "pages",
            frame.cfg,
            runner.arrays,
            load,
            rows=rows,
            token_bytes=page_bytes(shapes, num_pages=1),
            rounds=rounds,
        )


def serve_config(serve: ServeConfig, load: Load) -> ServeConfig:
    """Return the sizes of a server of just this load: as few programs as can be."""
    most = max(load.rows)
    pages = -(-load.context // serve.page_size)
    return serve.model_copy(
        update={
            "max_rows": most,
            "max_length": load.context,
            "num_pages": most * pages,
            "token_budget": most * (1 + serve.draft_tokens),
            "prefill_rows": 1,
        }
    )


def batch_at(start: int, *, rows: int, serve: ServeConfig, fresh: bool = False) -> ScheduledBatch:
    """Return a step in which each row has `start` cached tokens; no two rows share a page."""
    held = -(-(start + 1) // serve.page_size)
    width = serve.num_pages // serve.max_rows
    sampling = Sampling(temperature=0.0, seed=0)

    def one(number: int) -> ScheduledRow:
        request = Request(f"row {number}", (0,), serve.max_length, sampling, ignore_eos=True)
        # Scattered over the pool, as pages are that came and went.
        pages = tuple(number + serve.max_rows * i for i in range(width))[:held]
        return ScheduledRow(
            Row(request, number, [0]), number, start, 1, (), pages, draws=True, fresh=fresh
        )

    return ScheduledBatch((), tuple(one(number) for number in range(rows)))


def time_runner(runner: Runner, batches: Callable[..., ScheduledBatch], load: Load) -> Times:
    """Time steps as an engine takes them: one is begun before the one before is read."""
    first = load.context - load.steps - NUM_WARM
    steps = [batches(first + i, fresh=i == 0) for i in range(load.steps + NUM_WARM)]
    ends_s: list[float] = []
    before = runner.dispatch(steps[0])
    for step in steps[1:]:
        pending = runner.dispatch(step)
        _check(before.read())
        ends_s.append(time.perf_counter())
        before = pending
    _check(before.read())
    ends_s.append(time.perf_counter())
    return Times(tuple(np.diff(ends_s[NUM_WARM - 1 :]).tolist()), peak_bytes())


def _check(results: Sequence[RowResult]) -> None:
    wrong = [each.error for each in results if each.error]
    if wrong:
        raise FloatingPointError(f"{len(wrong)} of {len(results)} rows failed: {wrong[0]}")
