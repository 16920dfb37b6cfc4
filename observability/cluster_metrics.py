"""Metrics of a router, and of workers: as a router sees them, and as each sees itself."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

STATES = ("connecting", "ready", "draining", "dead")
PAGE_USES = ("free", "live", "cached", "leased", "incoming", "quarantine")
OF_A_WORKER = ("worker_id", "pool")
# Fields of WorkerStatus by kind, with their meaning. Counters restart from zero with the worker.
GAUGES = {
    "running": "Sequences in the batch; on a prefill worker, prompts being computed.",
    "waiting": "Requests that wait for pages, for a prefill or for a place in the batch.",
    "queued_tokens": "Prompt tokens not computed yet.",
    "gpu_allocated_bytes": "GPU memory of tensors: weights, pages, buffers.",
    "gpu_reserved_bytes": "GPU memory that the allocator holds for these and for later ones.",
}
COUNTERS = {
    "steps": "Engine steps.",
    "steps_ahead": "Of these, steps launched before the previous one's tokens were known.",
    "steps_alone": "Steps with no other in flight, because a pass of one of their requests failed.",
    "looked_up_tokens": "Prompt tokens needed: looked up in the worker's cache.",
    "cached_tokens": "Of these, tokens found in the worker's cache.",
    "computed_tokens": "Prompt tokens computed.",
    "generated_tokens": "Tokens that were generated.",
    "needed_bytes": "Bytes of all pages of the prompts that prefill workers were to compute.",
    "pages_moved": "Pages sent to, or received from, the other pool.",
    "bytes_moved": "Bytes of those pages.",
    "transfer_failures": "Failed attempts to move pages.",
    "preemptions": "Sequences preempted.",
    "attention_needed_bytes": "Bytes of K and V that drawn tokens attended to, counted per token.",
    "attention_read_bytes": "Of these, bytes that attention read: a shared prefix once per step.",
    "sharing_groups": "Groups of sequences that shared what attention read, summed over steps.",
    "sharing_rows": "Sequences in these groups, summed over steps.",
    "transfer_s": "Time spent receiving pages of prompts, summed over transfers.",
    "exposed_transfer_s": "Of this, time after the prompt was computed.",
    "prompt_step_s": "Engine time of steps that computed prompt tokens alone.",
    "decode_step_s": "Engine time of steps that decoded alone.",
    "mixed_step_s": "Engine time of steps that did both.",
    "over_quota_pages": "Cached pages evicted because their tenant exceeded its cache_share.",
}
# Of TenantStatus. The number of series is that of configured tenants, whatever callers send.
OF_TENANTS = {
    "active_requests": (GaugeMetricFamily, "Calls in progress."),
    "requests": (CounterMetricFamily, "Generations that began."),
    "refused_requests": (CounterMetricFamily, "Calls refused because of a limit."),
    "prompt_tokens": (CounterMetricFamily, "Tokens of prompts."),
    "generated_tokens": (CounterMetricFamily, "Tokens that were generated."),
}


class Pages(Protocol):
    """The fields of pagewire.PageCounts."""

    @property
    def total(self) -> int: ...

    @property
    def free(self) -> int: ...

    @property
    def cached(self) -> int: ...


class Worker(Protocol):
    """The fields of pagewire.WorkerStatus that this file names."""

    @property
    def worker_id(self) -> str: ...

    @property
    def pool(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def is_living(self) -> bool: ...

    @property
    def pages(self) -> Pages: ...


class Tenant(Protocol):
    """The fields of pagewire.TenantStatus that this file names."""

    @property
    def name(self) -> str: ...


class Connections(Protocol):
    """The protection of connections, as in pagewire.Encryption."""

    @property
    def expires_at_s(self) -> int | None: ...


class Cluster(Protocol):
    """A router's view of its cluster, as in pagewire.ClusterStatus."""

    @property
    def workers(self) -> Sequence[Worker]: ...

    @property
    def tenants(self) -> Sequence[Tenant]: ...

    @property
    def front_tls(self) -> Connections | None: ...

    @property
    def cluster_tls(self) -> Connections | None: ...

    @property
    def active_requests(self) -> int: ...

    @property
    def finished_requests(self) -> int: ...

    @property
    def resumed_requests(self) -> int: ...

    @property
    def index_pages(self) -> int: ...


def expose_cluster(status: Cluster | None) -> bytes:
    """Return the text that Prometheus reads.

    Args:
        status: The router's view; None if it does not answer.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ClusterCollector(lambda: status))
    return generate_latest(registry)


class ClusterCollector(Collector):
    """Collects a router's view at each scrape.

    Args:
        ask: Returns the view; None: the router does not answer.
    """

    def __init__(self, ask: Callable[[], Cluster | None]) -> None:
        self._ask = ask

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, so that registration does not query the router."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; raises the errors of `ask`."""
        status = self._ask()
        is_up = float(status is not None)
        yield GaugeMetricFamily("pagewire_router_up", "1: the router answers.", value=is_up)
        if status is None:
            return
        yield GaugeMetricFamily(
            "pagewire_router_requests_active",
            "Requests that the router serves, however they arrived.",
            value=status.active_requests,
        )
        yield GaugeMetricFamily(
            "pagewire_router_index_pages",
            "Page hashes in the router's prefix index.",
            value=status.index_pages,
        )
        yield CounterMetricFamily(
            "pagewire_router_requests_finished",
            "Requests that the router answered in full.",
            value=status.finished_requests,
        )
        yield CounterMetricFamily(
            "pagewire_router_requests_resumed",
            "Times that requests continued in a new attempt.",
            value=status.resumed_requests,
        )
        yield from _certificates(status)
        yield from _tenants(status.tenants)
        yield from _workers(status.workers)


class WorkerCollector(Collector):
    """Collects a worker's view of itself at each scrape.

    Args:
        ask: Returns the view; may raise, which fails the scrape.
    """

    def __init__(self, ask: Callable[[], Worker]) -> None:
        self._ask = ask

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, so that registration does not query the worker."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that a router has of each worker; raises the errors of `ask`."""
        yield from _workers([self._ask()])


def _tenants(tenants: Sequence[Tenant]) -> Iterator[Metric]:
    for name, (kind, meaning) in OF_TENANTS.items():
        family = kind(f"pagewire_tenant_{name}", meaning, labels=("tenant",))
        for each in tenants:
            family.add_metric((each.name,), getattr(each, name))
        yield family


def _certificates(status: Cluster) -> Iterator[Metric]:
    """Yield nothing for connections in clear, so that an alert needs no exception for them."""
    expiry = GaugeMetricFamily(
        "pagewire_router_certificate_expiry_timestamp_seconds",
        "When a certificate of the router expires, in Unix time.",
        labels=("connections",),
    )
    for name, each in (("front", status.front_tls), ("cluster", status.cluster_tls)):
        if each and each.expires_at_s is not None:
            expiry.add_metric((name,), float(each.expires_at_s))
    yield expiry


def _workers(workers: Sequence[Worker]) -> Iterator[Metric]:
    states = GaugeMetricFamily(
        "pagewire_worker_state",
        "1: the worker is in this state.",
        labels=(*OF_A_WORKER, "state"),
    )
    for each in workers:
        for state in STATES:
            states.add_metric((each.worker_id, each.pool, state), float(each.state == state))
    yield states
    living = [each for each in workers if each.is_living]
    pages = GaugeMetricFamily(
        "pagewire_worker_pages", "Pages by their use.", labels=(*OF_A_WORKER, "use")
    )
    for each in living:
        for use in PAGE_USES:
            pages.add_metric((each.worker_id, each.pool, use), getattr(each.pages, use))
    yield pages
    usage = GaugeMetricFamily(
        "pagewire_kv_cache_usage_perc",
        "Share of the pages that are neither free nor evictable; 1 means all.",
        labels=OF_A_WORKER,
    )
    for each in living:
        num_used = each.pages.total - each.pages.free - each.pages.cached
        usage.add_metric((each.worker_id, each.pool), num_used / max(each.pages.total, 1))
    yield usage
    for kind, fields in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for name, meaning in fields.items():
            told_as = re.sub("_s$", "_seconds", name)
            family = kind(f"pagewire_worker_{told_as}", meaning, labels=OF_A_WORKER)
            for each in living:
                family.add_metric((each.worker_id, each.pool), getattr(each, name))
            yield family
