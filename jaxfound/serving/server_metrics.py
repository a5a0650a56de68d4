"""What `/metrics` tells Prometheus: the engine's figures at that moment, and times of requests."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from jaxfound.serving.request import Output
from jaxfound.serving.rollout import Shadow

PREFIX = "jaxfound_"
# Seconds: from a step of a small model to a long wait in a queue.
FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
NEXT_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
WHOLE_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Figure(NamedTuple):
    """One number of the engine: its name in `/metrics`, its kind and its meaning."""

    name: str
    kind: Literal["gauge", "counter"]
    meaning: str


# Numbers of an engine's snapshot, by name there.
FIGURES: dict[str, Figure] = {
    "num_running": Figure("requests_running", "gauge", "requests that have a row"),
    "num_waiting": Figure("requests_waiting", "gauge", "requests that wait for a row or pages"),
    "num_pages": Figure("kv_cache_pages", "gauge", "pages of the cache"),
    "pages_in_use": Figure("kv_cache_pages_in_use", "gauge", "pages of requests that run"),
    "pages_cached": Figure("kv_cache_pages_cached", "gauge", "pages kept for later prompts"),
    "pages_free": Figure("kv_cache_pages_free", "gauge", "pages that hold nothing"),
    "fragmentation": Figure(
        "kv_cache_fragmentation", "gauge", "share of the cache lost in pages that are not full"
    ),
    "num_preempted": Figure("preemptions", "counter", "times that a request lost its pages"),
    "prompt_tokens": Figure("prompt_tokens", "counter", "tokens of prompts that have run"),
    "reused_tokens": Figure(
        "prefix_cache_tokens", "counter", "of those, found in the prefix cache"
    ),
    "drafted_tokens": Figure("draft_tokens", "counter", "tokens that modules guessed"),
    "accepted_tokens": Figure("accepted_draft_tokens", "counter", "of those, the ones drawn too"),
}

# The engine's numbers at this moment, by name; those of FIGURES are told.
Look = Callable[[], object]


class EngineCollector(Collector):
    """Asks the engine for its numbers whenever Prometheus asks for ours."""

    def __init__(self, look: Look) -> None:
        self._look = look

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each number that the engine has."""
        there = self._look()
        for attribute, figure in FIGURES.items():
            value = getattr(there, attribute, None)
            if value is not None:
                kind = GaugeMetricFamily if figure.kind == "gauge" else CounterMetricFamily
                yield kind(PREFIX + figure.name, figure.meaning, value=float(value))
        pages, used = getattr(there, "num_pages", 0), getattr(there, "pages_in_use", 0)
        share = used / pages if pages else 0.0
        yield GaugeMetricFamily(
            PREFIX + "kv_cache_usage", "share of pages that running requests hold", value=share
        )


class ShadowCollector(Collector):
    """Tells of backends that run beside others."""

    def __init__(self, shadows: Sequence[Shadow]) -> None:
        self._shadows = shadows

    def collect(self) -> Iterator[Metric]:
        """Yield comparisons and those that failed, by op and backend."""
        for name, meaning, attribute in (
            ("shadow_checks", "results of two backends that were compared", "num_checks"),
            ("shadow_reverts", "of those, beyond the tolerance and not used", "num_reverts"),
        ):
            family = CounterMetricFamily(PREFIX + name, meaning, labels=["op", "backend"])
            for shadow in self._shadows:
                family.add_metric([shadow.op, shadow.backend], getattr(shadow, attribute))
            yield family


class ServerMetrics:
    """Counts answers and measures requests.

    Args:
        look: the engine's numbers; called for every scrape.
        shadows: backends that run beside others.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, look: Look, shadows: Sequence[Shadow] = ()) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(look))
        self._registry.register(ShadowCollector(shadows))
        self._responses = self._counter("http_responses", "answers", ["route", "status"])
        self._ended = self._counter("requests", "continuations that ended", ["finish_reason"])
        self._tokens = self._counter("generation_tokens", "tokens generated", [])
        self._first = self._histogram(
            "time_to_first_token_seconds", "from a checked body to its first token", FIRST_TOKEN_S
        )
        self._queue = self._histogram(
            "request_queue_seconds", "from a checked body to its first step", FIRST_TOKEN_S
        )
        self._next = self._histogram(
            "inter_token_latency_seconds", "between tokens of a continuation", NEXT_TOKEN_S
        )
        self._whole = self._histogram(
            "request_duration_seconds", "from a checked body to the end of a continuation", WHOLE_S
        )

    def answered(self, route: str, status: int) -> None:
        """Count an answer."""
        self._responses.labels(route, str(status)).inc()

    def clock(self, now_s: float) -> "RequestClock":
        """Return the clock of a continuation that begins now."""
        return RequestClock(self, now_s)

    def text(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, meaning: str, labels: list[str]) -> Counter:
        return Counter(PREFIX + name, meaning, labels, registry=self._registry)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, meaning, buckets=buckets, registry=self._registry)


class RequestClock:
    """Measures one continuation from its news."""

    def __init__(self, metrics: ServerMetrics, now_s: float) -> None:
        self._metrics = metrics
        self._began_s = now_s
        self._last_s: float | None = None

    def tick(self, output: Output, now_s: float) -> None:
        """Take news that came at `now_s`; several tokens at once share the time since the last."""
        num = len(output.tokens)
        if num:
            self._metrics._tokens.inc(num)
            if self._last_s is None:
                self._metrics._first.observe(now_s - self._began_s)
            else:
                for _ in range(num):
                    self._metrics._next.observe((now_s - self._last_s) / num)
            self._last_s = now_s
        if output.finish_reason is not None:
            self._metrics._ended.labels(output.finish_reason).inc()
            self._metrics._queue.observe(output.queue_s)
            self._metrics._whole.observe(now_s - self._began_s)
