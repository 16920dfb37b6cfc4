"""A gateway's counters of HTTP requests."""

from prometheus_client import Counter

from observability.request_metrics import RequestMetrics


class Metrics(RequestMetrics):
    """The counters of one gateway."""

    def __init__(self) -> None:
        super().__init__()
        self._requests = Counter(
            "pagewire_http_requests",
            "HTTP requests answered, by path, method and status.",
            ("path", "method", "status"),
            registry=self.registry,
        )

    def end(self, path: str, method: str, status: int) -> None:
        """Count an answered request; `path` is one of the gateway's own, or empty."""
        self._requests.labels(path, method, str(status)).inc()
