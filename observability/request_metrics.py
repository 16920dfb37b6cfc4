"""Metrics of requests, at an HTTP gateway and at a router.

Names end like vLLM's where they mean the same; docs/metrics.md lists all of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from observability.process_metrics import process_registry
from observability.tallies import Spreads, Tallies
from observability.token_gaps import TokenGaps
from pagewire.protos import inference_pb2

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 1000)
SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
SECONDS_IN_QUEUE = (0.001, 0.01, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 1000)
TOKENS = (1, 10, 100, 1000, 10_000, 100_000, 1_000_000)
BY_MODEL = ("model_name",)


class RequestMetrics:
    """The counters of one process that answers requests; `expose` renders them."""

    def __init__(self) -> None:
        self.registry = process_registry()
        self._num_running = self._num_waiting = 0
        Gauge(
            "pagewire_num_requests_running",
            "Requests in progress, including those that wait.",
            registry=self.registry,
        ).set_function(lambda: self._num_running)
        Gauge(
            "pagewire_num_requests_waiting",
            "Of these, requests whose first token has not arrived.",
            registry=self.registry,
        ).set_function(lambda: self._num_waiting)
        self._success = self._counter(
            "request_success", "Choices that ended, by reason.", ("finished_reason",)
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens that were generated.")
        self._cached_tokens = self._counter(
            "prefix_cache_hits", "Prompt tokens that no worker computed for the request."
        )
        self._looked_up_tokens = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in caches."
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", SECONDS
        )
        self._queue = self._histogram(
            "request_queue_time_seconds",
            "From a call's arrival at a decode worker until work on its prompt began.",
            SECONDS_IN_QUEUE,
        )
        self._preemptions = self._counter("num_preemptions", "Times that requests were preempted.")
        self._decode = self._histogram(
            "request_decode_time_seconds",
            "From a call's first token to the end of its answer.",
            SECONDS,
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a call per token after the first.",
            SECONDS_PER_TOKEN,
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds",
            "From a request's arrival to the end of its answer.",
            SECONDS,
        )
        self._prompt_length = self._histogram(
            "request_prompt_tokens", "Tokens of a prompt.", TOKENS
        )
        self._answer_length = self._histogram(
            "request_generation_tokens", "Tokens generated for a prompt.", TOKENS
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a request as running while entered."""
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def waiting(self, change: int) -> None:
        """Count a request that begins (1) or ceases (-1) to wait for its first token."""
        self._num_waiting += change

    def call_finished(self, model: str, usage: inference_pb2.Usage, cached_tokens: int) -> None:
        """Count a call that the router answered in full."""
        self._prompt_tokens.labels(model).inc(usage.prompt_tokens)
        self._looked_up_tokens.labels(model).inc(usage.prompt_tokens)
        self._cached_tokens.labels(model).inc(cached_tokens)
        self._generation_tokens.labels(model).inc(usage.completion_tokens)
        self._prompt_length.labels(model).observe(usage.prompt_tokens)
        self._answer_length.labels(model).observe(usage.completion_tokens)
        self._queue.labels(model).observe(usage.stats.queue_ms / 1000)
        self._decode.labels(model).observe(decode_s(usage))
        self._preemptions.labels(model).inc(usage.stats.preemptions)
        if usage.tpot_ms:
            self._per_token.labels(model).observe(usage.tpot_ms / 1000)

    def choice_finished(self, model: str, reason: str) -> None:
        """Count a choice that ended."""
        self._success.labels(model, reason).inc()

    def first_token(self, model: str, seconds: float) -> None:
        """Note when the first token of a request arrived."""
        self._first_token.labels(model).observe(seconds)

    def answered(self, model: str, seconds: float) -> None:
        """Note how long a complete answer took."""
        self._latency.labels(model).observe(seconds)

    def expose(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self.registry)

    def _counter(self, name: str, meaning: str, labels: tuple[str, ...] = ()) -> Tallies:
        return Tallies(f"pagewire_{name}", meaning, BY_MODEL + labels, self.registry)

    def _histogram(self, name: str, meaning: str, bounds: tuple[float, ...]) -> Spreads:
        return Spreads(f"pagewire_{name}", meaning, BY_MODEL, self.registry, bounds=bounds)


def decode_s(usage: inference_pb2.Usage) -> float:
    """Return the time of a finished call from its first token on."""
    return (usage.total_ms - usage.ttft_ms) / 1000


class GapsCollector(Collector):
    """Collects the histogram of the time between a choice's tokens.

    Args:
        gaps: Read at each scrape.
        model: Returns the name of the served model, empty while it is not known.
    """

    def __init__(self, gaps: TokenGaps, model: Callable[[], str]) -> None:
        self._gaps = gaps
        self._model = model

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the one metric."""
        family = HistogramMetricFamily(
            "pagewire_inter_token_latency_seconds",
            "Between two tokens of a choice as they reach the router.",
            labels=BY_MODEL,
        )
        if model := self._model():
            family.add_metric((model,), self._gaps.buckets(), self._gaps.sum)
        yield family
