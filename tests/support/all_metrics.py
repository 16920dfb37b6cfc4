"""Every metric that any /metrics can have, as Prometheus reads it."""

from dataclasses import dataclass, replace

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from http_gateway.http_metrics import Metrics
from observability.cluster_metrics import WorkerCollector, expose_cluster
from observability.process_metrics import process_registry
from observability.request_metrics import RequestMetrics
from pagewire import TenantStatus
from pagewire.protos import common_pb2, inference_pb2
from pagewire.types import Encryption
from router.metrics import RouterMetrics
from tests.support.cluster_status import ONE_OF_EACH

_TENANT = TenantStatus(
    **{name: 1 for name in TenantStatus.__dataclass_fields__ if name != "name"}, name="t"
)
_TLS = Encryption(encrypted=True, expires_at_s=1)
CLUSTER = replace(ONE_OF_EACH, tenants=(_TENANT,), front_tls=_TLS, cluster_tls=_TLS)
TOLD_OF_THE_PROCESS = ("process_", "python_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A metric: of a histogram, its name without _bucket, _sum and _count."""

    name: str
    type: str  # counter, gauge or histogram
    labels: frozenset[str]  # without that of a histogram's buckets
    places: frozenset[str]  # gateway, router, worker

    @property
    def series(self) -> dict[str, frozenset[str]]:
        """What queries name |-> its labels."""
        if self.type != "histogram":
            return {self.name: self.labels}
        names = {f"{self.name}{each}": self.labels for each in ("_sum", "_count")}
        return {**names, f"{self.name}_bucket": self.labels | {"le"}}


def all_metrics() -> dict[str, Exported]:
    """Return what each kind of process exports when everything has happened once."""
    gateway, router = Metrics(), RouterMetrics()
    for each in (gateway, router):
        _live(each)
    gateway.end("/v1/models", "GET", 200)
    router.call_ended("ok", is_waiting=False)
    router.dispatched("m", 1.0)
    router.computed("m", prefill_s=1.0, decode_s=1.0)
    router.asked("m", n=1, max_tokens=1)
    router.token_gaps.add(0.1, 1)
    router.tell_cluster(lambda: CLUSTER, lambda: "m")
    worker = process_registry()
    worker.register(WorkerCollector(lambda: CLUSTER.workers[0]))
    texts = {
        "gateway": gateway.expose() + expose_cluster(CLUSTER),
        "router": router.expose(),
        "worker": generate_latest(worker),
    }
    found: dict[str, Exported] = {}
    for place, text in texts.items():
        for family in text_string_to_metric_families(text.decode()):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            if name.startswith(TOLD_OF_THE_PROCESS):
                continue
            assert family.samples, f"nothing shows the labels of {name}"
            labels = frozenset().union(*(each.labels for each in family.samples)) - {"le"}
            places = found[name].places if name in found else frozenset()
            found[name] = Exported(
                name=name, type=family.type, labels=labels, places=places | {place}
            )
    return found


def _live(metrics: RequestMetrics) -> None:
    stats = common_pb2.RequestStats(queue_ms=1, preemptions=1)
    metrics.call_finished("m", inference_pb2.Usage(prompt_tokens=1, tpot_ms=1, stats=stats), 1)
    metrics.choice_finished("m", "stop")
    metrics.first_token("m", 1.0)
    metrics.answered("m", 1.0)
