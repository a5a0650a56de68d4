"""The engine: requests in, text out, one step of the device always in flight."""

import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path

from jaxfound.config.serve import ServeConfig
from jaxfound.data.tokenizer import Tokenizer
from jaxfound.serving import admission
from jaxfound.serving.completion import Completion, completion
from jaxfound.serving.errors import RequestError, UnavailableError
from jaxfound.serving.open_model import OpenModel, open_model
from jaxfound.serving.progress import Progress
from jaxfound.serving.prompt import prompt_ids
from jaxfound.serving.refusals import refuse
from jaxfound.serving.request import FinishReason, Output, Request, ScheduledBatch
from jaxfound.serving.runner import Runner
from jaxfound.serving.sampling import Sampling
from jaxfound.serving.scheduler import Scheduler
from jaxfound.serving.snapshot import Snapshot
from jaxfound.serving.step import PendingStep, StepRunner

log = logging.getLogger(__name__)

DEFAULT = Sampling()


class Engine:
    """Joins a scheduler and a runner: a step is scheduled and begun before the last one is read.

    So the device computes a step while the host reads, decodes and streams the one before. Rows
    whose request ended meanwhile are dropped when they are read. Not for several threads at once;
    a `Pump` is.

    Args:
        runner: computes.
        scheduler: decides.
        tokenizer: text to ids and back.
        start: ids before a prompt that is text.
        clock: seconds, never backwards; for what is told of waiting.
    """

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        *,
        start: tuple[int, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokenizer = tokenizer
        self.start = start
        self._clock = clock
        self._runner = runner
        self._scheduler = scheduler
        self._open: dict[str, Progress] = {}
        self._in_flight: tuple[ScheduledBatch, PendingStep] | None = None
        self._news: list[Output] = []
        self._failure: str | None = None
        self._numbers = itertools.count()

    @classmethod
    def load(
        cls,
        path: Path | str,
        cfg: ServeConfig | None = None,
        *,
        step: int | None = None,
        tokenizer: str | None = None,
    ) -> "Engine":
        """Return an engine of the weights at a path, ready for its first request.

        Args:
            path: a run's folder; or a published folder or .gguf file.
            cfg: sizes; None = the `serve` section of the run's config, or its defaults.
            step: which checkpoint of a run; the newest intact one by default.
            tokenizer: in place of the one that belongs to the weights.

        Raises:
            CheckpointError: there is neither; or no checkpoint, or a damaged one.
            ConfigError: model or device cannot be served with these sizes.
            DataError, PlanError, WeightsError: what they say.
        """
        return cls.of(open_model(Path(path), step=step, tokenizer=tokenizer), cfg)

    @classmethod
    def of(cls, model: OpenModel, cfg: ServeConfig | None = None) -> "Engine":
        """Return an engine of weights, which it takes over; every program is compiled here.

        Args:
            model: its arrays are deleted as they are read.
            cfg: sizes; None = the model's own.

        Raises:
            ConfigError: model or device cannot be served with these sizes.
        """
        cfg = cfg or model.cfg.serve
        num_ids = model.tokenizer.vocab_size
        runner = Runner(
            model.frame, model.arrays, cfg, num_ids=num_ids, mesh=model.mesh, release=True
        )
        scheduler = Scheduler(cfg, num_pages=runner.num_pages, max_length=runner.max_length)
        return cls(runner, scheduler, model.tokenizer, start=model.start)

    @property
    def healthy(self) -> bool:
        """Whether steps can run; False once the runner failed and could not be reset."""
        return self._failure is None

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return bool(self._open or self._news or self._in_flight)

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and continuation together."""
        return self._scheduler.max_length

    @property
    def max_open(self) -> int:
        """Most requests that run and wait."""
        return self._scheduler.cfg.max_rows + self._scheduler.cfg.max_waiting

    def snapshot(self) -> Snapshot:
        """Return what runs, waits and is held now, as figures."""
        return self._scheduler.snapshot()

    def check(self, request: Request) -> None:
        """Refuse what can never be served; changes nothing, so any thread may call it.

        Raises:
            RequestError: names the field, its value and the limit.
        """
        admission.check(request, pool=self._scheduler.pool, max_length=self.max_length)
        refuse(request, vocab_size=self.tokenizer.vocab_size)

    def add(self, request: Request) -> None:
        """Take a request; its first news come from a later `step`.

        Raises:
            RequestError: it can never be served, or its id is in use.
            UnavailableError: the engine is dead, or `max_open` requests are there.
        """
        self.check(request)
        if self._failure is not None:
            raise UnavailableError(f"the engine is dead: {self._failure}")
        if request.id in self._open:
            raise RequestError(f"id={request.id!r} is the id of a request that has not ended")
        if len(self._open) >= self.max_open:
            raise UnavailableError(
                f"{self.max_open} requests run and wait, the most that may. Try again later"
            )
        if request.sampling.seed is None:
            seed = secrets.randbits(63)
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        self._admit(request)

    def cancel(self, id: str, *, reason: FinishReason = "cancelled") -> bool:
        """End a request now, wherever it is; False if there is none of that id.

        Its pages are free for the next step; the next `step` tells of the end.
        """
        there = self._open.get(id)
        if there is None:
            return False
        self._end(there, Output(id), reason)
        return True

    def step(self) -> list[Output]:
        """Begin the next step, read the one before, and return the news, at most one a request.

        Never waits for the step that it begins.
        """
        try:
            before, self._in_flight = self._in_flight, self._begin()
            if before is not None:
                self._read(*before)
        except RuntimeError as error:
            # The device's errors are RuntimeErrors, whichever operation meets them.
            self._fail(error)
        news, self._news = self._news, []
        return news

    def generate(
        self,
        prompts: Items[str | Items[int]],
        *,
        max_tokens: int,
        sampling: Sampling | Items[Sampling] = DEFAULT,
        stop: Items[str] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
    ) -> list[Completion]:
        """Return a continuation of each prompt, all computed together.

        Args:
            prompts: texts, or ids of whole prompts.
            max_tokens: longest continuation.
            sampling: of all, or one for each prompt.
            stop: texts that end a continuation and are not part of it.
            ignore_eos: do not end at the end-of-text id.
            logprobs: likely ids to report beside each drawn one; None = no log-probabilities.

        Raises:
            RequestError: a prompt cannot be served; nothing was begun.
            UnavailableError: the runner failed.
        """
        if isinstance(prompts, str):
            raise RequestError("prompts is one text; give a list: generate([text], …)")
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        requests = [
            Request(
                id=f"generate-{next(self._numbers)}",
                prompt=tuple(prompt_ids(prompt, tokenizer=self.tokenizer, start=self.start)),
                max_tokens=max_tokens,
                sampling=how,
                stop=tuple(stop),
                ignore_eos=ignore_eos,
                logprobs=logprobs,
            )
            for prompt, how in zip(prompts, each, strict=True)
        ]
        for request in requests:
            self.check(request)
        outputs = self._finish_all(requests)
        return [completion(outputs[request.id]) for request in requests]

    def _finish_all(self, requests: list[Request]) -> dict[str, list[Output]]:
        """Step until all have ended; return their news. News of other requests are kept."""
        found: dict[str, list[Output]] = {request.id: [] for request in requests}
        kept: list[Output] = []
        waiting = deque(requests)
        try:
            while waiting or self._news or any(id in self._open for id in found):
                while waiting and len(self._open) < self.max_open:
                    self.add(waiting.popleft())
                for output in self.step():
                    found.get(output.id, kept).append(output)
        finally:
            # Interrupted, or the engine died: what was begun is not left behind.
            for id in found:
                self.cancel(id)
            self._news = kept + [output for output in self._news if output.id not in found]
        return found

    def _admit(self, request: Request) -> None:
        sequence = self._scheduler.add(request)
        self._open[request.id] = Progress(sequence, self.tokenizer, added_s=self._clock())

    def _begin(self) -> tuple[ScheduledBatch, PendingStep] | None:
        batch = self._scheduler.schedule()
        if not batch.prefill and not batch.decode:
            assert not self._open or self._in_flight, "requests that neither run nor can run"
            return None
        self._note_first_steps(batch)
        return batch, self._runner.dispatch(batch)

    def _note_first_steps(self, batch: ScheduledBatch) -> None:
        now_s = self._clock()
        for row in batch.prefill:
            there = self._open[row.sequence.request.id]
            if there.begun_s is None:
                there.begun_s = now_s

    def _read(self, batch: ScheduledBatch, pending: PendingStep) -> None:
        rows = (*batch.prefill, *batch.decode)
        for row, result in zip(rows, pending.read(), strict=True):
            there = self._open.get(row.sequence.request.id)
            # Ended while the step ran, perhaps followed by another of the same id.
            if there is None or there.sequence is not row.sequence:
                continue
            if result.error is not None:
                self._end(there, Output(row.sequence.request.id, error=result.error), "error")
                continue
            output, num_read, reason = there.take(result, start=row.start)
            if num_read:
                self._scheduler.commit(row.sequence, result.tokens[:num_read])
            if reason is not None:
                self._end(there, output, reason)
            elif output.tokens:
                self._news.append(there.tell(output))

    def _end(self, there: Progress, output: Output, reason: FinishReason) -> None:
        del self._open[output.id]
        self._scheduler.finish(there.sequence)
        self._news.append(there.end(output, reason))

    def _fail(self, error: RuntimeError) -> None:
        """End what the failed step may have spoilt; what has not begun is begun anew."""
        log.error("engine.step_failed", exc_info=error, extra={"open_requests": len(self._open)})
        self._in_flight = None
        try:
            self._runner.reset()
        except RuntimeError as again:
            log.error("engine.dead", exc_info=again)
            self._failure = str(again)
        there = list(self._open.values())
        fresh = [p.sequence.request for p in there if self.healthy and not has_begun(p)]
        # Also pages that are kept for later prompts: what they hold is not known.
        self._scheduler.clear()
        ids = {request.id for request in fresh}
        for progress in there:
            id = progress.sequence.request.id
            if id not in ids:
                self._end(progress, Output(id, error=f"a step failed: {error}"), "error")
        for request in fresh:
            self._admit(request)


def has_begun(progress: Progress) -> bool:
    """Whether a step was ever dispatched for a request."""
    sequence = progress.sequence
    return bool(sequence.row is not None or sequence.num_drawn or sequence.num_preempted)
