"""A router's counters of requests, and all metrics of its /metrics."""

from collections.abc import Callable

from observability.cluster_metrics import Cluster, ClusterCollector
from observability.request_metrics import (
    SECONDS,
    SECONDS_IN_QUEUE,
    TOKENS,
    GapsCollector,
    RequestMetrics,
)
from observability.tallies import Tallies
from observability.token_gaps import TokenGaps

CHOICES = (1, 2, 5, 10, 20, 50)


class RouterMetrics(RequestMetrics):
    """The counters of one router; all of them belong to its event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.token_gaps = TokenGaps()
        self._outcomes = Tallies(
            "pagewire_router_requests",
            "Finished calls, by outcome: ok, or the name of a gRPC status.",
            ("outcome",),
            self.registry,
        )
        self._dispatch = self._histogram(
            "router_queue_time_seconds",
            "From a call's admission until it was first sent to a decode worker.",
            SECONDS_IN_QUEUE,
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds",
            "From the end of a call's time in the queue to its first token.",
            SECONDS,
        )
        self._inference = self._histogram(
            "request_inference_time_seconds",
            "From the end of a call's time in the queue to the end of its answer.",
            SECONDS,
        )

        self._choices = self._histogram("request_params_n", "The parameter n of a call.", CHOICES)
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "The parameter max_tokens of a call.", TOKENS
        )

    def dispatched(self, model: str, seconds: float) -> None:
        """Note how long an admitted call waited until a decode worker got it."""
        self._dispatch.labels(model).observe(seconds)

    def computed(self, model: str, *, prefill_s: float, decode_s: float) -> None:
        """Note how long workers were busy with a call that the router answered in full."""
        self._prefill.labels(model).observe(prefill_s)
        self._inference.labels(model).observe(prefill_s + decode_s)

    def asked(self, model: str, *, n: int, max_tokens: int) -> None:
        """Note parameters of a call that the router answered in full."""
        self._choices.labels(model).observe(n)
        self._max_tokens.labels(model).observe(max_tokens)

    def call_begun(self) -> None:
        """Count a call that runs, and waits for its first token."""
        self._num_running += 1
        self._num_waiting += 1

    def call_ended(self, outcome: str, *, is_waiting: bool) -> None:
        """Count a call that is over, however it ended; `is_waiting`: without a token."""
        self._num_running -= 1
        self._num_waiting -= is_waiting
        self._outcomes.labels(outcome).inc()

    def tell_cluster(self, ask: Callable[[], Cluster], model: Callable[[], str]) -> None:
        """Let each scrape also report the router's current view; call it once.

        Args:
            ask: Returns the router's view; may raise, which fails the scrape.
            model: Returns the name of the served model, empty while it is not known.
        """
        self.registry.register(GapsCollector(self.token_gaps, model))
        self.registry.register(ClusterCollector(ask))
