"""Measures a series of loads against one target, one after the other."""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from jaxfound.resources.platform import package_versions
from jaxfound.serving.engine import Engine
from jaxfound.serving.http_target import HttpTarget, ask
from jaxfound.serving.load_plan import Shot, Workload, plan_shots
from jaxfound.serving.load_report import Limits, LoadReport, Shown, summarise
from jaxfound.serving.loadgen import EngineTarget, Target, TargetError, run_load
from jaxfound.serving.open_model import open_model
from jaxfound.serving.run import pumping

# Sent before anything is measured, so that nothing is met for the first time.
NUM_WARM_UP = 2
# Published tokenizers begin with their special tokens; prompts of a load test hold none.
NUM_SPECIAL = 16


@dataclass(frozen=True)
class Measured:
    """A target, with what has to be known to load it.

    Attributes:
        target: where requests go.
        ids: token ids that prompts are drawn from.
        max_length: most tokens of prompt and continuation.
        facts: what a record says of it.
    """

    target: Target
    ids: range
    max_length: int
    facts: dict[str, object]


@contextmanager
def engine_target(
    path: Path, overrides: Sequence[str], *, step: int | None, tokenizer: str | None
) -> Iterator[Measured]:
    """Open weights in this process, and step their engine for as long as this is entered.

    Raises:
        CheckpointError, ConfigError, DataError, PlanError, WeightsError: as `serve` does.
    """
    model = open_model(path, overrides, step=step, tokenizer=tokenizer)
    engine = Engine.of(model)
    facts = {
        "target": "engine",
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "versions": package_versions(),
        "model": path.name,
        "precision": model.cfg.precision.model_dump(mode="json"),
        "serve": model.cfg.serve.model_dump(mode="json"),
        "num_pages": engine.snapshot().num_pages,
    }
    with pumping(engine, model) as pump:
        ids = ids_of(model.tokenizer.vocab_size)
        yield Measured(EngineTarget(pump), ids, engine.max_length, facts)


def http_target(url: str, *, api_key: str | None) -> Measured:
    """Ask a server what it serves, and return it as a target.

    Raises:
        TargetError: it does not answer as OpenAI's servers do.
    """
    url = url.rstrip("/").removesuffix("/v1")

    async def look() -> Measured:
        models = await ask(url, "/v1/models", api_key=api_key)
        info = await ask(url, "/tokenizer_info", api_key=api_key)
        match {**info, **models}:
            case {"data": [{"id": str(name), "max_model_len": int(length)}], "vocab_size": int(n)}:
                facts: dict[str, object] = {"target": "http", "model": name}
                return Measured(HttpTarget(url, name, api_key), ids_of(n), length, facts)
        raise TargetError(f"{url} does not say its one model, its context and its ids")

    return asyncio.run(look())


def ids_of(vocab_size: int) -> range:
    """Return ids that prompts are drawn from: without the first ones, which are often special."""
    return range(min(NUM_SPECIAL, vocab_size - 1), vocab_size)


def measure_loads(
    measured: Measured,
    workloads: Sequence[Workload],
    *,
    limits: Limits,
    limit_s: float,
    told: Callable[[Shown], None] = lambda shown: None,
) -> Iterator[LoadReport]:
    """Yield the figures of each workload, after a warm-up of two requests.

    Args:
        measured: the target.
        workloads: in the order in which they run.
        limits: when a request is good.
        limit_s: longest time of one workload.
        told: called with every measured request.

    Raises:
        TargetError: the warm-up is not answered; nothing is measured then.
    """
    for number, workload in enumerate(workloads):
        shots = plan_shots(workload, ids=measured.ids, max_length=measured.max_length)
        if number == 0:
            warm_up(measured.target, shots[:NUM_WARM_UP], limit_s=limit_s)
        shown = asyncio.run(
            run_load(
                measured.target,
                shots,
                concurrency=workload.concurrency,
                limit_s=limit_s,
                told=told,
            )
        )
        yield summarise(workload.name, shown, limits=limits)


def warm_up(target: Target, shots: Sequence[Shot], *, limit_s: float) -> None:
    """Send requests that are not measured; TargetError if one of them fails."""
    # Numbers of their own: an engine's requests are named by them.
    shots = [replace(shot, number=-1 - i, at_s=0.0) for i, shot in enumerate(shots)]
    for shown in asyncio.run(run_load(target, shots, concurrency=1, limit_s=limit_s)):
        if shown.error:
            raise TargetError(f"the first request of the warm-up failed: {shown.error}")
