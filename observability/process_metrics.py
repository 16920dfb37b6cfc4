"""Metrics that every process has, whatever it does."""

from prometheus_client import (
    CollectorRegistry,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)


def process_registry() -> CollectorRegistry:
    """Return a registry with the metrics of this process, process_… and python_…."""
    disable_created_metrics()  # type: ignore[no-untyped-call] # series that tell when others began; nobody asks
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry
