"""The manifests of deploy/kubernetes: what kustomize renders is valid, and its parts fit together.

No API server takes part. Each check is shown to find a fault that is planted for it.
"""

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from google.protobuf import json_format

from pagewire.protos import inference_pb2
from tests.deploy import manifest_checks as checks
from tests.deploy.kubectl import kustomize
from tests.deploy.overlays import KUBERNETES, OVERLAYS
from tests.support.waiting import wait_until

CLUSTER = "RayCluster/pagewire/spec"
# In what an overlay may differ from the base, as patterns of paths.
IMAGES = rf"{CLUSTER}/.*/(initContainers|containers)/\d/image"
CONFIG = r"ConfigMap/.*|" + rf"{CLUSTER}/headGroupSpec/template/spec/volumes/\d/configMap/name"
VOLUME = r"PersistentVolumeClaim/pagewire-model/spec/(accessModes/0|resources/requests/storage)"
DIFFERENCES = {
    "cpu-demo": (
        IMAGES,
        CONFIG,
        VOLUME,
        r"NetworkPolicy/fetch-model/.*",
        rf"{CLUSTER}/headGroupSpec/template/spec/initContainers/0/.*",
        rf"{CLUSTER}/.*/template/spec/containers/\d/resources/.*",
        rf"{CLUSTER}/.*/template/spec/volumes/1/emptyDir/sizeLimit",
        rf"{CLUSTER}/headGroupSpec/template/spec/volumes/4/secret/optional",
        rf"{CLUSTER}/workerGroupSpecs/\d/template/spec/tolerations/.*",
    ),
    "production": (
        IMAGES,
        CONFIG,
        r"(Deployment|HorizontalPodAutoscaler|PodDisruptionBudget|Service)/pagewire-router/.*",
        r"Service/(pagewire-controller/.*|pagewire-grpc/spec/selector/.*component)",
        r"NetworkPolicy/(router-clients|routers|controller-from-routers|workers-from-routers)/.*",
        rf"{CLUSTER}/headGroupSpec/template/spec/containers/0/ports/3/.*",
        rf"{CLUSTER}/headGroupSpec/template/spec/containers/0/volumeMounts/[3-5]/.*",
        rf"{CLUSTER}/headGroupSpec/template/spec/containers/1/volumeMounts/[4-7]/.*",
        rf"{CLUSTER}/headGroupSpec/template/spec/volumes/[4-7]/.*",
        r"(PodDisruptionBudget/pagewire-(prefill|decode)|PodMonitor|PrometheusRule|GRPCRoute|HTTPRoute)/.*",
        r"NetworkPolicy/(prometheus(-routers|-workers)?|gateway|redis|head-to-redis)/.*",
        r"(StatefulSet|Service)/pagewire-redis/.*",
        r"RayCluster/pagewire/spec/gcsFaultToleranceOptions/.*",
        r"(Certificate|Issuer|BackendTLSPolicy)/.*",
        r"Service/pagewire-(grpc|http)/spec/ports/0/appProtocol",
        rf"{CLUSTER}/headGroupSpec/template/spec/containers/1/(readiness|startup|liveness)Probe/.*",
        rf"{CLUSTER}/workerGroupSpecs/\d/template/spec/containers/0/(volumeMounts/3|ports/0)/.*",
        rf"{CLUSTER}/workerGroupSpecs/\d/template/spec/volumes/3/.*",
        rf"{CLUSTER}/.*/template/spec/affinity/.*",
        rf"{CLUSTER}/workerGroupSpecs/\d/(replicas|maxReplicas)",
    ),
    "single-node": (
        IMAGES,
        VOLUME,
        rf"{CLUSTER}/workerGroupSpecs/1/.*",
        rf"{CLUSTER}/workerGroupSpecs/0/(groupName|resources/.*)",
        rf"{CLUSTER}/workerGroupSpecs/0/template/metadata/labels/{checks.COMPONENT}",
        rf"{CLUSTER}/workerGroupSpecs/0/template/spec/containers/0/resources/.*",
    ),
}


EXTENDED = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources:
  - ../production
components:
  - ../../components/autoscaling
  - ../../components/rdma
  - ../../components/tracing
configMapGenerator:
  - name: pagewire
    behavior: replace
    files:
      - cluster.yaml
"""
TRACED = """
tracing:
  endpoint: http://collector.observability.svc:4318/v1/traces
"""


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """Overlays by name, and the base; `extended` is production with the other components."""
    folders = {name: KUBERNETES / "overlays" / name for name in OVERLAYS}
    copied = shutil.copytree(KUBERNETES, tmp_path_factory.mktemp("kubernetes") / "copy")
    folders["extended"] = copied / "overlays" / "extended"
    folders["extended"].mkdir()
    (folders["extended"] / "kustomization.yaml").write_text(EXTENDED)
    production = copied / "overlays" / "production" / "cluster.yaml"
    (folders["extended"] / "cluster.yaml").write_text(production.read_text() + TRACED)
    return {
        name: checks.load(kustomize(folder))
        for name, folder in {**folders, "base": KUBERNETES / "base"}.items()
    }


def test_all_overlays_are_checked():
    assert {each.name for each in (KUBERNETES / "overlays").iterdir()} == set(OVERLAYS)
    production = (KUBERNETES / "overlays" / "production" / "kustomization.yaml").read_text()
    used = set(re.findall(r"components/(\w+)", production + EXTENDED))
    assert {each.name for each in (KUBERNETES / "components").iterdir()} == used


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", [*OVERLAYS, "extended"])
def test_an_overlay_has_no_fault(rendered, name, check, tmp_path):
    assert list(check(rendered[name], tmp_path)) == []


def head(overlay, container=0):
    return overlay.head.spec["containers"][container]


def up(overlay):
    return overlay.container("up")


def group(overlay, index=0):
    return overlay.cluster["spec"]["workerGroupSpecs"][index]


def worker(overlay):
    return group(overlay)["template"]["spec"]["containers"][0]


def spec(overlay, kind, name):
    return overlay.of(kind)[name]["spec"]


def configured(old, new):
    def plant(overlay):
        config = overlay.config_map
        assert old in config["data"]["cluster.yaml"]
        config["data"]["cluster.yaml"] = config["data"]["cluster.yaml"].replace(old, new)

    return plant


def command(old, new):
    def plant(overlay):
        for words in (
            up(overlay)["command"],
            up(overlay)["lifecycle"]["preStop"]["exec"]["command"],
        ):
            words[-1] = words[-1].replace(old, new)

    return plant


def hook(old, new):
    """Return what changes the hook of the first pod of workers."""

    def plant(overlay):
        words = worker(overlay)["lifecycle"]["preStop"]["exec"]["command"]
        assert old in words[-1]
        words[-1] = words[-1].replace(old, new)

    return plant


def drop(kind, name):
    return lambda overlay: overlay.objects.remove(overlay.of(kind)[name])


def put(of, value, *keys):
    """Return what sets a value within what `of` finds."""

    def plant(overlay):
        place = of(overlay)
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value

    return plant


def take(of, *keys):
    """Return what removes a value within what `of` finds."""

    def plant(overlay):
        place = of(overlay)
        for key in keys[:-1]:
            place = place[key]
        del place[keys[-1]]

    return plant


def router(overlay):
    return overlay.routers[0].containers[0]


def redis(overlay):
    return overlay.stores[0].containers[0]


def state(overlay):
    return overlay.cluster["spec"]["gcsFaultToleranceOptions"]


def certificate(overlay):
    return spec(overlay, "Certificate", "pagewire-tls")


def of_workers(overlay):
    return spec(overlay, "PodMonitor", "pagewire-workers")["podMetricsEndpoints"][0]


def clients(overlay):
    return spec(overlay, "NetworkPolicy", "clients")


def autoscaler(overlay):
    return overlay.cluster["spec"]["autoscalerOptions"]


PREFILL = {checks.COMPONENT: "prefill"}
FAULTS = [
    ("autoscaling", take(autoscaler, "securityContext"), "its securityContext must be"),
    ("autoscaling", take(autoscaler, "resources", "limits", "memory"), "limits lack ['memory']"),
    ("autoscaling", take(autoscaler, "env", 2), "RAY_AUTH_TOKEN must be that of up"),
    ("autoscaling", take(autoscaler, "volumeMounts", 2), "no token of the API server is at"),
    ("autoscaling", take(autoscaler, "volumeMounts", 1), "autoscaler: /tmp/ray must be that of up"),
    ("autoscaling", take(head, "volumeMounts", -1), "ray-head: /tmp/ray must be that of up"),
    ("autoscaling", put(group, 8, "minReplicas"), "its bounds leave the autoscaler nothing to do"),
    (
        "autoscaling",
        put(lambda overlay: head(overlay)["volumeMounts"][0], "api-server", "name"),
        "ray-head: has the token of the API server",
    ),
    (
        "rdma",
        take(worker, "resources", "requests", checks.RDMA),
        "prefill: asks for {} and is given",
    ),
    ("rdma", take(up, "env", -1), "up gives workers no NCCL_IB_HCA"),
    ("rdma", put(up, "1", "env", -2, "value"), "NCCL_IB_DISABLE is '1'"),
    (
        "rdma",
        put(lambda overlay: group(overlay)["template"]["metadata"], {}, "annotations"),
        "prefill: no overlay can name its network",
    ),
    ("schemas", put(group, "2", "replicas"), "replicas: '2' is not of type 'integer'"),
    ("schemas", put(head, [], "livenesProbe"), "'livenesProbe' was unexpected"),
    ("schemas", put(lambda o: o.of("Service")["pagewire-grpc"], 1, "spek"), "'spek' was unex"),
    ("schemas", put(lambda o: spec(o, "GRPCRoute", "pagewire-grpc"), {}, "rule"), "'rule' was"),
    ("selectors", put(lambda o: spec(o, "Service", "pagewire-http"), {"a": "b"}, "selector"), "Se"),
    ("selectors", put(clients, {"matchLabels": {"a": "b"}}, "podSelector"), "clients selects no"),
    (
        "selectors",
        put(lambda o: group(o, 1), "prefill", "template", "metadata", "labels", checks.COMPONENT),
        "PodDisruptionBudget pagewire-decode selects no pod",
    ),
    ("ports", put(head, 8001, "ports", 2, "containerPort"), "Service pagewire-http: port 8000"),
    ("ports", configured("http_port: 8000", "http_port: 8001"), "the head has"),
    ("ports", put(clients, "rpc", "ingress", 0, "ports", 0, "port"), "has no port rpc"),
    (
        "ports",
        put(lambda o: spec(o, "PodMonitor", "pagewire"), "x", "podMetricsEndpoints", 0, "port"),
        "PodMonitor pagewire: head has no port x",
    ),
    ("ports", take(worker, "ports"), "PodMonitor pagewire-workers: prefill has no port worker-m"),
    ("ports", put(worker, "metrics", "ports", 0, "name"), "the name metrics to a port of Ray"),
    (
        "ports",
        configured("9401-9401", "9401-9402"),
        "has metrics at [9401], the configuration at [",
    ),
    ("ports", configured("worker_metrics_ports: ", "# "), "at [9401], the configuration at []"),
    (
        "ports",
        put(group, {"pagewire-prefill": "2"}, "resources"),
        "prefill: has fewer ports for metrics than workers",
    ),
    (
        "ports",
        put(
            lambda o: spec(o, "HTTPRoute", "pagewire-http"),
            80,
            "rules",
            0,
            "backendRefs",
            0,
            "port",
        ),
        "no Service pagewire-http:80",
    ),
    ("volumes", put(worker, "data", "volumeMounts", 2, "name"), "there is no volume data"),
    ("volumes", take(worker, "volumeMounts", 1), "/dev/shm must be memory"),
    ("volumes", take(worker, "volumeMounts", 2, "readOnly"), "/model must be mounted"),
    ("volumes", take(worker, "volumeMounts", 0), "nothing can be written to /tmp"),
    ("volumes", drop("PersistentVolumeClaim", "pagewire-model"), "there is no claim"),
    ("volumes", command("cluster.yaml", "config.yaml"), "up reads /etc/pagewire/config.yaml"),
    ("volumes", configured("model: /model", "model: /models"), "/models must be mounted"),
    ("volumes", put(up, "/tmp", "env", 0, "value"), "HOME is ['/tmp', '/tmp/home']"),
    ("names", drop("PriorityClass", "pagewire-worker"), "no PriorityClass pagewire-worker"),
    ("names", drop("ServiceAccount", "pagewire"), "no ServiceAccount pagewire"),
    ("names", drop("Namespace", "pagewire"), "there is no Namespace"),
    (
        "names",
        put(up, "token", "env", 2, "valueFrom", "secretKeyRef", "name"),
        "up must take Ray's token",
    ),
    ("names", take(lambda o: o.cluster["spec"], "authOptions"), "Ray must ask for a token"),
    ("commands_exist", command("--config", "--confg"), "pagewire up: "),
    ("commands_exist", command("--ray-address", "--address"), "pagewire down: "),
    ("commands_exist", command("pagewire down", "pagewire stop"), "started and ended"),
    ("commands_exist", hook("pagewire drain", "sleep 9"), "and pods of workers drained, not"),
    ("commands_exist", hook("--here", "prefill-0"), "a pod's workers must be drained, not ['pref"),
    ("commands_exist", hook("--here", "--hier"), "pagewire drain: "),
    (
        "commands_exist",
        configured("stop_grace_s", "stop_grase_s"),
        "stop_grase_s: found an unknown option",
    ),
    (
        "commands_exist",
        put(group, "1", "rayStartParams", "nod-port"),
        "ray start has no --nod-port",
    ),
    ("versions", put(lambda o: o.cluster["spec"], "2.50.0", "rayVersion"), "rayVersion is 2.50.0"),
    ("versions", put(worker, "a.example/pagewire:latest", "image"), "has no fixed tag"),
    ("versions", put(worker, "localhost:5000/pagewire", "image"), "has no fixed tag"),
    ("versions", put(head, ["pip install ray==1.0"], "args"), "installs ray 1.0"),
    ("pools", configured("decode: 4", "decode: 5"), "5 decode workers are configured, and 4 have"),
    ("pools", put(group, {"pagewire-prefil": "1"}, "resources"), "asks for pagewire-prefil"),
    (
        "pools",
        put(worker, "2", "resources", "limits", checks.GPU),
        "2 GPUs for workers that need 1",
    ),
    ("pools", put(group, 9, "replicas"), "replicas is 9, out of its bounds"),
    ("pools", configured("pool_resources: true", "pool_resources: false"), "be placed by pool"),
    ("pools", take(group, "template", "spec", "tolerations"), "tolerates no node"),
    ("pools", configured("network_interface: eth0", ""), "which interface NCCL uses"),
    ("security", put(worker, False, "securityContext", "readOnlyRootFilesystem"), "must be {"),
    (
        "security",
        take(worker, "securityContext", "capabilities"),
        "ray-worker: its securityContext",
    ),
    ("security", put(lambda o: o.head.spec, 0, "securityContext", "runAsUser"), "image's user"),
    ("security", take(lambda o: o.head.spec, "securityContext", "seccompProfile"), "no seccomp"),
    ("security", take(lambda o: o.head.spec, "automountServiceAccountToken"), "API server is mou"),
    ("security", put(lambda o: o.head.spec, True, "hostNetwork"), "head: hostNetwork"),
    (
        "security",
        put(
            lambda o: o.of("Namespace")["pagewire"],
            "baseline",
            "metadata",
            "labels",
            "pod-security.kubernetes.io/enforce",
        ),
        "does not enforce",
    ),
    ("limits", take(worker, "resources", "limits", "memory"), "limits lack ['memory']"),
    ("limits", take(up, "resources", "requests"), "up: requests lack ['cpu', 'memory']"),
    ("probes", take(worker, "livenessProbe"), "ray-worker: livenessProbe must ask"),
    ("probes", put(worker, 6381, "readinessProbe", "grpc", "port"), "readinessProbe must ask"),
    (
        "probes",
        put(up, "--service=pagewire.v1.Router", "readinessProbe", "exec", "command", 3),
        "is ready when",
    ),
    ("probes", put(up, 3, "startupProbe", "failureThreshold"), "before start_timeout_s"),
    ("stopping", configured("stop_grace_s: 30", "stop_grace_s: 60"), "head: is killed after 120 s"),
    ("stopping", hook("sleep 10", "sleep 60"), "prefill: is killed after 120 s; to stop takes up"),
    ("stopping", take(worker, "lifecycle"), "prefill: Ray does not wait"),
    (
        "tls",
        configured(
            "front_tls:\n  certificate_file: /etc/pagewire-front-tls/tls.crt\n"
            "  key_file: /etc/pagewire-front-tls/tls.key\n",
            "insecure: true\n",
        ),
        "or the configuration must say",
    ),
    ("tls", take(worker, "volumeMounts", 3), "ray-worker: finds certificates in {}, needs"),
    ("tls", take(router, "volumeMounts", 5), "router: finds certificates in"),
    ("tls", drop("Certificate", "pagewire-tls"), "finds certificates in"),
    ("tls", put(certificate, ["workers"], "dnsNames"), "pagewire-tls: is not for pagewire"),
    ("tls", put(certificate, ["client auth"], "usages"), "pagewire-tls: its usages are"),
    (
        "tls",
        take(lambda o: spec(o, "Certificate", "pagewire-front-tls"), "dnsNames", 0),
        "is not for ['pagewire-grpc']",
    ),
    ("tls", put(certificate, "cluster", "issuerRef", "name"), "there is no Issuer cluster"),
    ("tls", drop("Certificate", "pagewire-cluster-authority"), "nothing makes the secret"),
    ("tls", drop("BackendTLSPolicy", "pagewire-grpc"), "the Gateway connects to ['pagewire-ht"),
    (
        "tls",
        put(
            lambda o: spec(o, "BackendTLSPolicy", "pagewire-http"), "a.b", "validation", "hostname"
        ),
        "pagewire-http: expects a.b",
    ),
    (
        "tls",
        take(lambda o: spec(o, "PodMonitor", "pagewire"), "podMetricsEndpoints", 0, "scheme"),
        "PodMonitor pagewire: must ask as clients do",
    ),
    ("tls", put(of_workers, "pagewire-http", "tlsConfig", "serverName"), "workers are pagewire"),
    ("tls", take(of_workers, "tlsConfig", "keySecret"), "shows no certificate that is issued"),
    (
        "tls",
        put(
            lambda o: spec(o, "Certificate", "pagewire-prometheus"),
            "pagewire-front",
            "issuerRef",
            "name",
        ),
        "PodMonitor pagewire-workers: shows a certificate that workers do not trust",
    ),
    (
        "disruptions",
        put(lambda o: spec(o, "PodDisruptionBudget", "pagewire-decode"), "50%", "minAvailable"),
        "only a number",
    ),
    ("stores", put(state, "redis:6379", "redisAddress"), "where no Service is"),
    ("stores", put(state, "ray", "redisPassword", "valueFrom", "secretKeyRef", "name"), "password"),
    ("stores", put(redis, "/tmp", "command", 7), "/tmp is on no claim"),
    ("security", put(redis, "$(REDISCLI_AUTH)", "command", 5), "REDISCLI_AUTH is on its command"),
    ("stores", take(lambda o: o.cluster["spec"], "gcsFaultToleranceOptions"), "no head uses it"),
    (
        "disruptions",
        put(lambda o: spec(o, "PodDisruptionBudget", "pagewire-decode"), 5, "minAvailable"),
        "5 of 4 pods",
    ),
    ("disruptions", drop("PodDisruptionBudget", "pagewire-head"), "the head has no"),
    ("routers", put(router, "--kees=/keys", "command", 4), "pagewire router: "),
    ("routers", put(router, "r.example/pagewire:1", "image"), "pagewire:1 brings torch and Ray"),
    ("routers", put(router, "--controller=head:50052", "command", 3), "no Service head leads"),
    ("routers", configured("controller_port: 50052", "controller_port: 50053"), "is at 50053, not"),
    (
        "routers",
        take(lambda o: spec(o, "Service", "pagewire-controller"), "publishNotReadyAddresses"),
        "must be found, too",
    ),
    ("routers", put(router, "--keys=/tmp/keys", "command", 4), "/tmp/keys is in no secret"),
    ("routers", put(router, "--config=/etc/cluster.yaml", "command", 2), "is not mounted"),
    ("routers", configured("pagewire-secret/secret", "pagewire/secret"), "its secrets are in ["),
    ("routers", configured("secret_file: ", "# "), "need a secret that lasts"),
    (
        "routers",
        put(router, "--service=", "readinessProbe", "exec", "command", 3),
        "and alive when",
    ),
    ("probes", take(router, "livenessProbe", "exec", "command", 4), "must ask as clients do"),
    (
        "routers",
        configured("pagewire-tenants/tenants", "pagewire/tenants"),
        "finds /etc/pagewire/tenants.yaml in none of its secrets",
    ),
    (
        "routers",
        put(lambda o: o.head.spec["volumes"][4], True, "secret", "optional"),
        "head: up finds /etc/pagewire-tenants/tenants.yaml in none of its secrets",
    ),
    (
        "tls",
        take(
            lambda o: spec(o, "PodMonitor", "pagewire"), "podMetricsEndpoints", 0, "authorization"
        ),
        "PodMonitor pagewire: shows no token of an operator",
    ),
    ("routers", configured("stop_grace_s: 30", "stop_grace_s: 60"), "to stop takes up to 75 s"),
    ("routers", drop("PodDisruptionBudget", "pagewire-router"), "has no PodDisruptionBudget"),
    (
        "routers",
        put(lambda o: spec(o, "HorizontalPodAutoscaler", "pagewire-router"), 1, "minReplicas"),
        "have nobody to go on",
    ),
    (
        "routers",
        put(
            lambda o: spec(o, "HorizontalPodAutoscaler", "pagewire-router"),
            "router",
            "scaleTargetRef",
            "name",
        ),
        "there is no Deployment router",
    ),
    ("security", take(router, "securityContext"), "router: its securityContext must be"),
    ("networks", drop("NetworkPolicy", "default-deny"), "there is no default-deny"),
    ("networks", take(clients, "ingress", 0, "from"), "open to everybody"),
    ("networks", drop("NetworkPolicy", "names"), "names egress"),
    (
        "networks",
        take(
            lambda o: spec(o, "NetworkPolicy", "within-the-cluster"),
            "egress",
            0,
            "to",
            0,
            "podSelector",
            "matchExpressions",
        ),
        "within-the-cluster egress pod app.kubernetes.io/name=pagewire TCP:1-65535 is new",
    ),
    (
        "networks",
        put(clients, [{"podSelector": {"matchLabels": {"a": "b"}}}], "ingress", 0, "from"),
        "clients ingress pod a=b TCP:grpc,TCP:http is new",
    ),
    ("traces", drop("NetworkPolicy", "traces"), "no policy lets traces out to http://collector.ob"),
    ("traces", configured("http://collector.observability.svc:4318/v1/traces", "''"), "is empty"),
    ("traces", configured(":4318", ":4317"), ":4317/v1/traces has the port 4317"),
    ("traces", configured("collector.ob", "collector.other-ob"), "is not in the namespace of"),
    (
        "traces",
        put(lambda o: spec(o, "NetworkPolicy", "traces")["podSelector"], PREFILL, "matchLabels"),
        "decode: NetworkPolicy traces does not let its traces out",
    ),
]


@pytest.mark.parametrize(("check", "plant", "told"), FAULTS, ids=[f"{c}-{t}" for c, _, t in FAULTS])
def test_a_planted_fault_is_found(rendered, check, plant, told, tmp_path):
    name = "extended" if check in ("autoscaling", "rdma", "traces") else "production"
    overlay = checks.Overlay(copy.deepcopy(rendered[name].objects))
    plant(overlay)

    found = list(getattr(checks, check)(overlay, tmp_path))

    assert any(told in each for each in found), found


@pytest.mark.skipif(not shutil.which("redis-server"), reason="redis-server is missing")
def test_redis_wants_its_password_and_shows_it_to_nobody(rendered, tmp_path):
    command = redis(rendered["production"])["command"]
    words = [str(tmp_path) if each == "/data" else each for each in command]
    at = str(tmp_path / "socket")
    # Each of these characters means something to a shell or to the configuration of Redis.
    password = "a-password\\n\"'$HOME`id` é# \\x41\nrequirepass b\n"
    environment = {"PATH": os.environ["PATH"], "REDISCLI_AUTH": password}

    def told(**given):
        asked = ["redis-cli", "-s", at, "ping"]
        return subprocess.run(asked, env=environment | given, capture_output=True, text=True).stdout

    with subprocess.Popen([*words, "--port", "0", "--unixsocket", at], env=environment) as store:
        try:
            wait_until(lambda: told() == "PONG\n")
            assert "NOAUTH" in told(REDISCLI_AUTH="")
            assert b"a-password" not in Path(f"/proc/{store.pid}/cmdline").read_bytes()
        finally:
            store.terminate()
    assert list((tmp_path / "appendonlydir").iterdir())


def test_each_check_has_a_planted_fault():
    assert {check for check, *_ in FAULTS} == {each.__name__ for each in checks.CHECKS}


def leaves(overlay):
    """Return all values by path."""
    found = {}

    def walk(path, value):
        if isinstance(value, dict | list):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, each in pairs:
                walk(f"{path}/{key}", each)
        else:
            found[path] = value

    for each in overlay.objects:
        walk(f"{each['kind']}/{each['metadata']['name']}", each)
    return found


def differences(base, overlay):
    before, after = leaves(base), leaves(overlay)
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


def unknown_differences(rendered, name, overlay):
    patterns = [re.compile(each) for each in DIFFERENCES[name]]
    paths = differences(rendered["base"], overlay)
    unused = [each.pattern for each in patterns if not any(map(each.fullmatch, paths))]
    unknown = [path for path in paths if not any(each.fullmatch(path) for each in patterns)]
    return sorted(unknown), unused


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_differs_from_the_base_in_what_it_is_for(rendered, name):
    assert unknown_differences(rendered, name, rendered[name]) == ([], [])


def test_another_difference_is_found(rendered):
    overlay = checks.Overlay(copy.deepcopy(rendered["cpu-demo"].objects))
    overlay.head.spec["shareProcessNamespace"] = False

    unknown, _ = unknown_differences(rendered, "cpu-demo", overlay)

    assert unknown == [f"{CLUSTER}/headGroupSpec/template/spec/shareProcessNamespace"]


@pytest.mark.parametrize(
    ("pod", "title", "waits"),
    [
        ("head", "ray::RouterActor", True),
        ("head", "pagewire\0down", True),
        ("head", "ray::GatewayActor", False),
        ("prefill", "ray::PrefillActor", True),
        ("decode", "ray::DecodeActor.drain", True),
        ("decode", "ray::IDLE", False),
    ],
)
def test_ray_waits_for_what_ends_running_requests(rendered, pod, title, waits):
    """Tested with processes named as Ray and the image name theirs, but with another prefix.

    The hook drains workers first; this is what follows if the drain is refused.
    """
    here = f"t{uuid.uuid4().hex}"
    (found,) = [each for each in rendered["production"].pods if each.where == pod]
    *shell, script = found.spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    script = script.splitlines()[-1].replace("ray::", f"{here}::").replace("pagewire", here)
    script = script.replace("sleep 1", "exit 9")  # instead of the next look
    name = title.replace("ray::", f"{here}::").replace("pagewire", here)
    sleep = "import sys; print(flush=True); sys.stdin.read()"

    words = [*name.split("\0")[:1], "-c", sleep, *name.split("\0")]
    with subprocess.Popen(
        words, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        waited = subprocess.run([*shell, script], timeout=60).returncode
        process.stdin.close()
    over = subprocess.run([*shell, script], timeout=60).returncode

    assert (waited, over) == (9 if waits else 0, 0)


def test_a_head_that_keeps_workers_away_prefers_nodes_that_they_cannot_use(rendered):
    affinity = rendered["production"].head.spec["affinity"]
    (avoided,) = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (preferred,) = affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]

    components = {
        each["template"]["metadata"]["labels"][checks.COMPONENT]
        for each in rendered["production"].cluster["spec"]["workerGroupSpecs"]
    }
    (of_workers,) = avoided["labelSelector"]["matchExpressions"]
    assert set(of_workers["values"]) == components
    assert preferred["preference"]["matchExpressions"] == [
        {"key": "nvidia.com/gpu.present", "operator": "NotIn", "values": ["true"]}
    ]


def test_the_processes_that_ray_waits_for_exist():
    sources = {"Router": "router", "Prefill": "prefill_worker", "Decode": "decode_worker"}
    for name, package in sources.items():
        source = (checks.ROOT / package / "actor.py").read_text(encoding="utf-8")
        assert f"\nclass {name}Actor" in source


def test_the_pod_that_models_are_copied_to_may_run_and_writes_where_others_read(rendered):
    (pod,) = checks.load((KUBERNETES / "model-loader.yaml").read_text(encoding="utf-8")).objects
    (loader,) = pod["spec"]["containers"]
    (volume,) = pod["spec"]["volumes"]

    for version in checks.KUBERNETES:
        checks.built_in.validate(pod, version, strict=True)
    assert loader["securityContext"] == checks.SECURED
    image = {each["image"] for each in rendered["production"].head.containers}
    assert {loader["image"]} == image
    assert volume["persistentVolumeClaim"]["claimName"] in rendered["production"].of(
        "PersistentVolumeClaim"
    )


def shell_lines():
    text = (KUBERNETES / "README.md").read_text(encoding="utf-8")
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip():
                yield shlex.split(line, comments=True)


def secrets_read(content):
    """Yield (name, key) of each Secret that an object reads; None: as a volume."""
    if isinstance(content, list):
        for each in content:
            yield from secrets_read(each)
    elif isinstance(content, dict):
        for field, each in content.items():
            if field == "secret" and "secretName" in each:
                yield each["secretName"], None
            elif field in ("secret", "secretKeyRef", "keySecret", "credentials"):
                yield each["name"], each["key"]
            else:
                yield from secrets_read(each)


def test_the_readme_creates_the_secrets_that_nothing_else_makes(rendered):
    created = {}
    for words in shell_lines():
        if "generic" in words:
            name, *options = words[words.index("generic") + 1 :]
            sources = [each.partition("=")[2] for each in options if each.startswith("--from-")]
            created[name] = {each.partition("=")[0] for each in sources}
    needed = set()
    for overlay in rendered.values():
        # Cert-manager makes those of the Certificates, KubeRay that of Ray's token.
        made = {each["spec"]["secretName"] for each in overlay.of("Certificate").values()}
        made.add(overlay.cluster["metadata"]["name"])
        for name, key in secrets_read(overlay.objects):
            if name not in made:
                needed.add(name)
                assert key is None or key in created[name], (name, key)

    assert created.keys() == needed


def test_the_commands_of_the_readme_name_what_exists(rendered, tmp_path):
    models = {checks.config_of(each, tmp_path).served_model_name for each in rendered.values()}
    named = {
        f"{kind}/{name}".lower()
        for kind in ("Service", "RayCluster", "ConfigMap")
        for each in rendered.values()
        for name in each.of(kind)
    }
    seen = set()
    for words in shell_lines():
        for word in words:
            if word.startswith("deploy/"):
                assert (checks.ROOT / word).exists(), word
            if match := re.fullmatch(r"(svc|raycluster)/(.*)", word):
                kind = match[1].replace("svc", "service")
                assert f"{kind}/{match[2]}" in named, word
        if "exec" in words:
            program, name, *rest = words[words.index("--") + 1 :]
            assert program == "pagewire"
            check_command(name, rest)
            seen.add(name)
        if words[0] == "grpcurl" and "-d" in words:
            request = inference_pb2.GenerateRequest()
            json_format.Parse(words[words.index("-d") + 1], request)
            assert request.model in models
            method = words[-1].rpartition("/")
            services = inference_pb2.DESCRIPTOR.services_by_name
            assert method[0] == services["InferenceService"].full_name
            assert method[2] in services["InferenceService"].methods_by_name
            seen.add("grpcurl")
        if words[0] == "curl" and "-d" in words:
            assert json.loads(words[words.index("-d") + 1])["model"] in models
            seen.add("curl")
    assert seen == {"grpcurl", "curl", "scale", "drain", "status"}


def check_command(name, words):
    group = checks.get_command(checks.commands.app)
    parent = group.make_context("pagewire", ["version"])
    group.get_command(parent, name).make_context(name, words, parent=parent)
