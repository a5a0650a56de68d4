"""How long it takes until a step can run: with an empty cache of programs, and from the cache."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxfound.data.batch import Batch
from jaxfound.parallelism.mesh import OnMesh
from jaxfound.training.state import TrainState
from jaxfound.training.step import TrainStep
from pallas_kernels.bench.machine import use_cache

CACHE_HIT = "/jax/compilation_cache/cache_hits"


class Compiles(NamedTuple):
    """Seconds from the first trace of the step to a program that can run.

    Attributes:
        cold_s: with an empty cache of programs; None where the cache had it before.
        cached_s: again, from the cache; None where it was not kept.
    """

    cold_s: float | None
    cached_s: float | None

    @classmethod
    def of(cls, first: tuple[float, bool], again: tuple[float, bool]) -> "Compiles":
        """Return what two compilations say: of each its seconds, and whether the cache had it.

        A program with Mosaic's kernels is another one the second time in a process: they are
        numbered. A process that finds it in the cache the first time has what a restart takes.
        """
        (first_s, was_there), (again_s, is_there) = first, again
        if was_there:
            return cls(None, first_s)
        return cls(first_s, again_s if is_there else None)


@contextmanager
def kept_programs(folder: Path) -> Iterator[None]:
    """Keep compiled programs in `folder` meanwhile, unless a place for them was chosen."""
    if jax.config.jax_compilation_cache_dir is not None:
        yield
        return
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    use_cache(folder)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def compiled_twice(step: TrainStep, again: TrainStep, state: TrainState, batch: Batch) -> Compiles:
    """Compile a step, then the same step that was made anew, and return the seconds of both."""
    first = compile_seconds(step, state, batch)
    return Compiles.of(first, compile_seconds(again, state, batch))


def compile_seconds(step: TrainStep, state: TrainState, batch: Batch) -> tuple[float, bool]:
    """Return the seconds until a step can run, and whether the cache had its program."""
    hits: list[str] = []

    def hear(event: str, **_: object) -> None:
        if event == CACHE_HIT:
            hits.append(event)

    jax.monitoring.register_event_listener(hear)
    began_s = time.perf_counter()
    try:
        cast(OnMesh, step).lower(state, batch).compile()
    finally:
        jax.monitoring.unregister_event_listener(hear)
    return time.perf_counter() - began_s, bool(hits)
