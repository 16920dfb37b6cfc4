"""What must hold between the objects of an overlay: each check yields a line for each fault."""

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate.utils as built_in
import yaml
from jsonschema import Draft202012Validator
from ray.scripts.scripts import start as ray_start
from typer.main import get_command

from cli import commands
from cluster.config import ClusterConfig
from cluster.config_file import load_config
from cluster.deployment import Deployment
from cluster.errors import ConfigError
from cluster.launch import END_TIMEOUT_S, STOP_MARGIN_S
from cluster.placement import _resources
from cluster.scale_out import LEAVE_MARGIN_S
from credentials.secret import ClusterSecret
from deploy.docker.healthcheck import SERVICE
from deploy.docker.healthcheck import arguments as health_arguments

ROOT = Path(__file__).resolve().parents[2]
CRDS = Path(__file__).with_name("crds")
KUBERNETES = ("1.30", "1.37")  # oldest and newest that the manifests are checked against
NAME, COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/component"
GPU = "nvidia.com/gpu"
RDMA, NETWORKS = "rdma/hca_shared_devices_a", "k8s.v1.cni.cncf.io/networks"
API_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"
POOLS = ("prefill", "decode")
IS_IN = {"In": True, "NotIn": False}  # of selectors
GCS_PORT = 6379
STOP_SPARE_S = 10.0  # for Python to start, and Ray to end
# Restricted, which the namespace enforces: https://kubernetes.io/docs/concepts/security/pod-security-standards/
SECURED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
}

built_in.schema_contents = cache(built_in.schema_contents)  # it reads a megabyte for each object


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod template of the RayCluster, of a Deployment or of a StatefulSet."""

    where: str  # "head", or the name of the group or Deployment
    replicas: int
    group: dict[str, Any]

    @property
    def labels(self) -> dict[str, str]:
        return self.group["template"]["metadata"]["labels"]

    @property
    def spec(self) -> dict[str, Any]:
        return self.group["template"]["spec"]

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        """Its ports by name."""
        named = [each for one in self.containers for each in one.get("ports", [])]
        return {each["name"]: each["containerPort"] for each in named}

    def slots(self, pool: str) -> int:
        """Return how many workers of a pool one pod takes."""
        return int(self.group.get("resources", {}).get(f"pagewire-{pool}", 0))


class Overlay:
    """The objects of one overlay.

    Args:
        objects: As `kubectl kustomize` renders them.
    """

    def __init__(self, objects: list[dict[str, Any]]) -> None:
        self.objects = objects

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        """Return the objects of a kind by name."""
        return {each["metadata"]["name"]: each for each in self.objects if each.get("kind") == kind}

    @property
    def cluster(self) -> dict[str, Any]:
        (cluster,) = self.of("RayCluster").values()
        return cluster

    @property
    def head(self) -> Pod:
        return Pod("head", 1, self.cluster["spec"]["headGroupSpec"])

    @property
    def groups(self) -> list[Pod]:
        groups = self.cluster["spec"]["workerGroupSpecs"]
        return [Pod(each["groupName"], each["replicas"], each) for each in groups]

    @property
    def ray_pods(self) -> list[Pod]:
        return [self.head, *self.groups]

    @property
    def routers(self) -> list[Pod]:
        """Those that run outside Ray, as few as the autoscaler may leave."""
        least = {
            each["spec"]["scaleTargetRef"]["name"]: each["spec"]["minReplicas"]
            for each in self.of("HorizontalPodAutoscaler").values()
        }
        return [
            Pod(name, least.get(name, 1), each["spec"])
            for name, each in self.of("Deployment").items()
        ]

    @property
    def stores(self) -> list[Pod]:
        """Those that keep Ray's state."""
        sets = self.of("StatefulSet").items()
        return [Pod(name, each["spec"]["replicas"], each["spec"]) for name, each in sets]

    @property
    def pods(self) -> list[Pod]:
        """Those of Pagewire itself."""
        return [*self.ray_pods, *self.routers]

    @property
    def all_pods(self) -> list[Pod]:
        return [*self.pods, *self.stores]

    @property
    def config_map(self) -> dict[str, Any]:
        """What holds the cluster's configuration."""
        maps = self.of("ConfigMap").values()
        (config,) = [each for each in maps if "cluster.yaml" in each["data"]]
        return config

    @property
    def config_text(self) -> str:
        """The file that `pagewire up` reads."""
        text: str = self.config_map["data"]["cluster.yaml"]
        return text

    def container(self, name: str) -> dict[str, Any]:
        """Return a container of the head."""
        return next(each for each in self.head.containers if each["name"] == name)

    def selected(self, selector: dict[str, Any]) -> list[Pod]:
        """Return the pods that labels select."""
        conditions = selector.get("matchExpressions", [])
        wanted = selector.get("matchLabels", {} if conditions else selector).items()
        return [
            pod
            for pod in self.all_pods
            if wanted <= pod.labels.items()
            and all(
                (pod.labels.get(each["key"]) in each["values"]) is IS_IN[each["operator"]]
                for each in conditions
            )
        ]


def config_of(overlay: Overlay, folder: Path) -> ClusterConfig:
    """Return the configuration as `pagewire up --config` reads it."""
    path = folder / "cluster.yaml"
    path.write_text(overlay.config_text, encoding="utf-8")
    return load_config(path, {})


# Schemas


@cache
def crd_validator(kind: str) -> Draft202012Validator:
    schema = json.loads(gzip.decompress((CRDS / f"{kind}.json.gz").read_bytes()))
    for name in ("apiVersion", "kind", "metadata"):
        schema["properties"][name] = {}
    return Draft202012Validator(_strict(schema))


def _strict(schema: Any) -> Any:
    """Return a schema that refuses unknown fields, as the API server does on request."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) for key, value in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields", False)
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        made.setdefault("additionalProperties", is_open)
    return made


def schemas(overlay: Overlay, _: Path) -> Iterator[str]:
    for each in overlay.objects:
        name = f"{each['kind']} {each['metadata']['name']}"
        if (CRDS / f"{each['kind']}.json.gz").exists():
            for error in crd_validator(each["kind"]).iter_errors(each):
                yield f"{name}: {error.json_path}: {error.message[:200]}"
            continue
        for version in KUBERNETES:
            try:
                built_in.validate(each, version, strict=True)
            except (built_in.ValidationError, built_in.SchemaNotFoundError) as error:
                yield f"{name}, {version}: {error.message[:200]}"


# References


def selectors(overlay: Overlay, _: Path) -> Iterator[str]:
    for kind in ("Service", "PodDisruptionBudget", "PodMonitor"):
        for name, each in overlay.of(kind).items():
            if not overlay.selected(each["spec"]["selector"]):
                yield f"{kind} {name} selects no pod"
    for name, each in overlay.of("NetworkPolicy").items():
        if not overlay.selected(each["spec"]["podSelector"]):
            yield f"NetworkPolicy {name} selects no pod"
    if len({each.labels[COMPONENT] for each in overlay.pods}) < len(overlay.pods):
        yield "two groups of pods have one component label"


def ports(overlay: Overlay, folder: Path) -> Iterator[str]:
    config = config_of(overlay, folder)
    if {"grpc": config.port, "http": config.http_port}.items() - overlay.head.ports.items():
        yield f"the head has {overlay.head.ports}, the configuration {config.port} and others"
    for name, service in overlay.of("Service").items():
        (pod,) = overlay.selected(service["spec"]["selector"])
        for port in service["spec"]["ports"]:
            if pod.ports.get(port["targetPort"]) != port["port"]:
                yield f"Service {name}: port {port['port']} is not {port['targetPort']} of its pod"
    for name, policy in overlay.of("NetworkPolicy").items():
        for rule in policy["spec"].get("ingress", []):
            for port in rule.get("ports", []):
                for pod in overlay.selected(policy["spec"]["podSelector"]):
                    if isinstance(port["port"], str) and port["port"] not in pod.ports:
                        yield f"NetworkPolicy {name}: {pod.where} has no port {port['port']}"
    metrics = config.metrics_ports.of_range if config.metrics_ports else []
    for pod in overlay.groups:
        named = [port for name, port in pod.ports.items() if name.startswith("worker-metrics")]
        if named != metrics:
            yield f"{pod.where}: has metrics at {named}, the configuration at {metrics}"
        if "metrics" in pod.ports:
            yield f"{pod.where}: KubeRay gives the name metrics to a port of Ray itself"
        if metrics and len(metrics) < sum(map(pod.slots, POOLS)):
            yield f"{pod.where}: has fewer ports for metrics than workers"
    for name, monitor in overlay.of("PodMonitor").items():
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            for pod in overlay.selected(monitor["spec"]["selector"]):
                if endpoint["port"] not in pod.ports:
                    yield f"PodMonitor {name}: {pod.where} has no port {endpoint['port']}"
    for kind in ("GRPCRoute", "HTTPRoute"):
        for name, route in overlay.of(kind).items():
            for rule in route["spec"]["rules"]:
                for backend in rule["backendRefs"]:
                    service = overlay.of("Service").get(backend["name"])
                    offered = service["spec"]["ports"] if service else []
                    if backend["port"] not in [each["port"] for each in offered]:
                        yield f"{kind} {name}: no Service {backend['name']}:{backend['port']}"
                for match in rule["matches"]:
                    if match.get("method", {}).get("service", SERVICE) != SERVICE:
                        yield f"{kind} {name}: the router has no service {match['method']}"


def volumes(overlay: Overlay, folder: Path) -> Iterator[str]:
    model = str(config_of(overlay, folder).model)
    files = {}  # path in the container that starts the cluster
    for pod in overlay.pods:
        sources = {each["name"]: each for each in pod.spec["volumes"]}
        for source in sources.values():
            claim = source.get("persistentVolumeClaim", {}).get("claimName")
            if claim and claim not in overlay.of("PersistentVolumeClaim"):
                yield f"{pod.where}: there is no claim {claim}"
            if "configMap" in source and source["configMap"]["name"] not in overlay.of("ConfigMap"):
                yield f"{pod.where}: there is no ConfigMap {source['configMap']['name']}"
        for one in pod.containers:
            mounts = {each["mountPath"]: each for each in one["volumeMounts"]}
            for path, mount in mounts.items():
                source = sources.get(mount["name"])
                if source is None:
                    yield f"{pod.where}, {one['name']}: there is no volume {mount['name']}"
                elif "configMap" in source and one["name"] == "up":
                    config = overlay.of("ConfigMap").get(source["configMap"]["name"], {})
                    files |= {f"{path}/{key}": key for key in config.get("data", {})}
            is_filled = one in pod.spec.get("initContainers", [])
            if model not in mounts or mounts[model].get("readOnly", False) is is_filled:
                yield f"{pod.where}, {one['name']}: {model} must be mounted, by readers read-only"
            memory = sources.get(mounts.get("/dev/shm", {}).get("name"), {}).get("emptyDir", {})
            is_in_ray = pod in overlay.ray_pods and not is_filled
            if is_in_ray and (memory.get("medium"), "sizeLimit" in memory) != ("Memory", True):
                yield f"{pod.where}, {one['name']}: /dev/shm must be memory with a limit"
            if "/tmp" not in mounts or mounts["/tmp"].get("readOnly"):
                yield f"{pod.where}, {one['name']}: nothing can be written to /tmp"
    homes = {
        each.get("value")
        for pod in overlay.pods
        for one in pod.spec["containers"]
        for each in one["env"]
        if each["name"] == "HOME"
    }
    if len(homes) != 1:
        yield f"HOME is {sorted(homes)}: the router looks for a file's tokenizer where up put it"
    named = re.findall(r"--config (\S+?)[;\s]", " ".join(overlay.container("up")["command"]))
    for path in named:
        if path not in files:
            yield f"up reads {path}; its volumes have {sorted(files)}"


def names(overlay: Overlay, _: Path) -> Iterator[str]:
    for pod in overlay.all_pods:
        if pod.spec["serviceAccountName"] not in overlay.of("ServiceAccount"):
            yield f"{pod.where}: there is no ServiceAccount {pod.spec['serviceAccountName']}"
        if pod.spec["priorityClassName"] not in overlay.of("PriorityClass"):
            yield f"{pod.where}: there is no PriorityClass {pod.spec['priorityClassName']}"
    # KubeRay makes the Secret, by the name of the RayCluster.
    token = {"name": overlay.cluster["metadata"]["name"], "key": "auth_token"}
    values = {each["name"]: each for each in overlay.container("up")["env"]}
    if overlay.cluster["spec"].get("authOptions") != {"mode": "token"}:
        yield "Ray must ask for a token that KubeRay makes"
    if values["RAY_AUTH_MODE"].get("value") != "token":
        yield "up must send Ray's token"
    if values["RAY_AUTH_TOKEN"].get("valueFrom", {}).get("secretKeyRef") != token:
        yield f"up must take Ray's token from {token}"
    namespaces = {each["metadata"].get("namespace") for each in overlay.objects}
    if namespaces - {None, *overlay.of("Namespace")}:
        yield f"there is no Namespace {namespaces}"


# Commands and configuration


def pagewire_commands(overlay: Overlay) -> list[list[str]]:
    """Return all commands of the pods of Ray, as words after pagewire."""
    up = overlay.container("up")
    hooks = [up, *(each.spec["containers"][0] for each in overlay.groups)]
    scripts = [each.get("lifecycle", {}).get("preStop") for each in hooks]
    text = "\n".join(
        [up["command"][-1], *(each["exec"]["command"][-1] for each in scripts if each)]
    )
    return [each.split() for each in re.findall(r"\bpagewire ([^;&|\n]+)", text)]


def commands_exist(overlay: Overlay, folder: Path) -> Iterator[str]:
    group = get_command(commands.app)
    parent = group.make_context("pagewire", ["version"])
    found = pagewire_commands(overlay)
    if [words[0] for words in found] != ["up", "down", *["drain"] * len(overlay.groups)]:
        yield f"the cluster must be started and ended, and pods of workers drained, not {found}"
    for name, *words in found:
        if name == "drain" and "--here" not in words:
            yield f"a pod's workers must be drained, not {words}"
    for name, *words in found:
        try:
            group.get_command(parent, name).make_context(name, words, parent=parent)
        except Exception as error:  # of click, whatever it is
            yield f"pagewire {name}: {error}"
    try:
        config_of(overlay, folder)
    except ConfigError as error:
        yield str(error)
    known = {option for parameter in ray_start.params for option in parameter.opts}
    for pod in overlay.ray_pods:
        for name in pod.group["rayStartParams"]:
            if f"--{name}" not in known:
                yield f"{pod.where}: ray start has no --{name}"


def versions(overlay: Overlay, _: Path) -> Iterator[str]:
    pinned = dict(
        line.strip().split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    )
    if overlay.cluster["spec"]["rayVersion"] != pinned["ray"]:
        yield f"rayVersion is {overlay.cluster['spec']['rayVersion']}, installed is {pinned['ray']}"
    for pod in overlay.all_pods:
        for one in pod.containers:
            for name, version in re.findall(r"([\w-]+)==([\w.]+)", " ".join(one.get("args", []))):
                if pinned[name] != version:
                    yield f"{one['name']} installs {name} {version}, tested is {pinned[name]}"
            _, _, tag = one["image"].rpartition("/")[2].partition(":")
            if tag in ("", "latest"):
                yield f"{pod.where}, {one['name']}: image {one['image']} has no fixed tag"


def pools(overlay: Overlay, folder: Path) -> Iterator[str]:
    config = config_of(overlay, folder)
    if not config.pool_resources or config.ray_address != "auto":
        yield "workers must be placed by pool, on the Ray of the head"
    is_gpu = config.device == "cuda"
    asked = {pool: _asked_for(config, pool) for pool in POOLS}
    for pool, wanted in zip(POOLS, (config.prefill, config.decode), strict=True):
        if (offered := sum(each.replicas * each.slots(pool) for each in overlay.groups)) != wanted:
            yield f"{wanted} {pool} workers are configured, and {offered} have a place"
    for each in overlay.groups:
        gpus = int(each.spec["containers"][0]["resources"]["limits"].get(GPU, 0))
        needed = sum(each.slots(pool) * asked[pool]["num_gpus"] for pool in POOLS)
        if gpus != needed:
            yield f"{each.where}: {gpus} GPUs for workers that need {needed}"
        for name in each.group["resources"]:
            if not any(name in asked[pool]["resources"] for pool in POOLS):
                yield f"{each.where}: no worker asks for {name}"
        if not each.group["minReplicas"] <= each.replicas <= each.group["maxReplicas"]:
            yield f"{each.where}: replicas is {each.replicas}, out of its bounds"
        if is_gpu and not each.spec.get("tolerations"):
            yield f"{each.where}: it tolerates no node with GPUs"
    if is_gpu and not (config.network_interface or config.nccl_interface):
        yield "network_interface must say which interface NCCL uses"


def autoscaling(overlay: Overlay, _: Path) -> Iterator[str]:
    """Ray's autoscaler, which KubeRay adds to the head, can work and has no more than it needs."""
    cluster = overlay.cluster["spec"]
    if not cluster.get("enableInTreeAutoscaling"):
        return
    options = cluster["autoscalerOptions"]
    if options.get("securityContext") != SECURED:
        yield f"autoscaler: its securityContext must be {SECURED}"
    for kind in ("requests", "limits"):
        if missing := {"cpu", "memory"} - options.get("resources", {}).get(kind, {}).keys():
            yield f"autoscaler: {kind} lack {sorted(missing)}"
    up = overlay.container("up")
    environment = {each["name"]: each for each in up["env"]}
    for name in ("HOME", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        if environment[name] not in options["env"]:
            yield f"autoscaler: {name} must be that of up"
    tokens = {
        each["name"]
        for each in overlay.head.spec["volumes"]
        if any("serviceAccountToken" in one for one in each.get("projected", {}).get("sources", []))
    }
    mounts = {each["mountPath"]: each for each in options["volumeMounts"]}
    if mounts.get(API_TOKEN, {}).get("name") not in tokens:
        yield f"autoscaler: no token of the API server is at {API_TOKEN}"
    # Otherwise KubeRay has the folder of Ray's sockets in a volume that up does not see.
    [temporary] = [each["name"] for each in up["volumeMounts"] if each["mountPath"] == "/tmp"]
    shared = {"name": temporary, "mountPath": "/tmp/ray", "subPath": "ray"}
    ray = overlay.head.spec["containers"][0]
    for name, found in (("ray-head", ray["volumeMounts"]), ("autoscaler", options["volumeMounts"])):
        if shared not in found:
            yield f"{name}: /tmp/ray must be that of up: {shared}"
    for one in overlay.head.containers:
        if tokens & {each["name"] for each in one["volumeMounts"]}:
            yield f"{one['name']}: has the token of the API server"
    for each in overlay.groups:
        if each.group["maxReplicas"] == each.group["minReplicas"]:
            yield f"{each.where}: its bounds leave the autoscaler nothing to do"


def rdma(overlay: Overlay, _: Path) -> Iterator[str]:
    """Either all pods of workers have an adapter that NCCL uses, or none has."""
    names = {"NCCL_IB_DISABLE", "NCCL_IB_HCA"}
    environment = {each["name"]: each.get("value") for each in overlay.container("up")["env"]}
    resources = {each.where: each.spec["containers"][0]["resources"] for each in overlay.groups}
    if not names & environment.keys() and all(RDMA not in r["limits"] for r in resources.values()):
        return
    for name in sorted(names - environment.keys()):
        yield f"up gives workers no {name}"
    if environment.get("NCCL_IB_DISABLE") != "0":
        yield f"NCCL_IB_DISABLE is {environment.get('NCCL_IB_DISABLE')!r}"
    for each in overlay.groups:
        asked, given = (
            {name: n for name, n in resources[each.where][kind].items() if name.startswith("rdma/")}
            for kind in ("requests", "limits")
        )
        if not asked == given == {RDMA: "1"}:
            yield f"{each.where}: asks for {asked} and is given {given}, not one {RDMA}"
        if NETWORKS not in each.group["template"]["metadata"].get("annotations", {}):
            yield f"{each.where}: no overlay can name its network"


def _asked_for(config: ClusterConfig, pool: str) -> dict[str, Any]:
    """Return what a worker of a pool asks Ray for."""
    deployment = Deployment(
        config=config,
        device=config.device,
        secret=ClusterSecret.generate(),
        home_resource="node:h",
        environment={},
        visible_gpus=None,
    )
    return _resources(deployment, f"{pool}-0")


# Policies


def security(overlay: Overlay, _: Path) -> Iterator[str]:
    for name, each in overlay.of("Namespace").items():
        if each["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] != "restricted":
            yield f"Namespace {name} does not enforce the restricted standard"
    for name, each in overlay.of("ServiceAccount").items():
        if each.get("automountServiceAccountToken") is not False:
            yield f"ServiceAccount {name}: its token is mounted"
    image = (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")
    users = set(map(int, re.findall(r"(?m)^USER (\d+)$", image)))
    for pod in overlay.all_pods:
        context = pod.spec["securityContext"]
        if context.get("runAsNonRoot") is not True or {context.get("runAsUser")} != users:
            yield f"{pod.where}: must run as the image's user {users}, not {context}"
        if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{pod.where}: has no seccomp profile"
        if pod.spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.where}: a token of the API server is mounted"
        for name in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.spec.get(name):
                yield f"{pod.where}: {name}"
        for one in pod.containers:
            if one.get("securityContext") != SECURED:
                yield f"{pod.where}, {one['name']}: its securityContext must be {SECURED}"
            words = " ".join((*one.get("command", ()), *one.get("args", ())))
            for each in one.get("env", ()):
                is_secret = "secretKeyRef" in each.get("valueFrom", {})
                if is_secret and f"$({each['name']})" in words:
                    yield f"{pod.where}, {one['name']}: {each['name']} is on its command line"


def limits(overlay: Overlay, _: Path) -> Iterator[str]:
    for pod in overlay.all_pods:
        for one in pod.containers:
            for kind in ("requests", "limits"):
                if missing := {"cpu", "memory"} - one["resources"].get(kind, {}).keys():
                    yield f"{pod.where}, {one['name']}: {kind} lack {sorted(missing)}"


def asked(probe: dict[str, Any]) -> tuple[int, str, bool]:
    """Return the port and the service that a probe asks for, and whether it speaks TLS."""
    if found := probe.get("grpc"):
        return found["port"], found.get("service", ""), False
    command = probe.get("exec", {}).get("command", [])
    if command[:2] != ["python", "/opt/pagewire/healthcheck.py"]:
        return 0, "", False
    try:
        words = health_arguments(command[2:])
    except SystemExit:
        return 0, "", False
    return int(words.address.rpartition(":")[2]), words.service, words.authority_file is not None


def probes(overlay: Overlay, folder: Path) -> Iterator[str]:
    config = config_of(overlay, folder)
    for pod in overlay.ray_pods:
        raylet = int(pod.group["rayStartParams"]["node-manager-port"])
        allowed = {GCS_PORT, raylet, config.port} if pod.where == "head" else {raylet}
        for one in pod.spec["containers"]:
            for kind in ("readinessProbe", "livenessProbe"):
                if asked(one.get(kind, {}))[0] not in allowed:
                    yield f"{pod.where}, {one['name']}: {kind} must ask one of {sorted(allowed)}"
    for pod in overlay.pods:
        for one in pod.spec["containers"]:
            for kind in ("readinessProbe", "startupProbe", "livenessProbe"):
                port, _, is_tls = asked(one.get(kind, {}))
                if port == config.port and is_tls != config.front_tls.is_on:
                    yield f"{pod.where}, {one['name']}: {kind} must ask as clients do"
    up = overlay.container("up")
    if asked(up["readinessProbe"])[1] != SERVICE:
        yield f"up is ready when {SERVICE} is"
    patience = up["startupProbe"]["failureThreshold"] * up["startupProbe"]["periodSeconds"]
    if patience <= config.start_timeout_s:
        yield f"up is killed after {patience} s, before start_timeout_s says what is missing"


def stopping(overlay: Overlay, folder: Path) -> Iterator[str]:
    config = config_of(overlay, folder)
    hook = overlay.container("up")["lifecycle"]["preStop"]["exec"]["command"][-1]
    waits = sum(map(float, re.findall(r"sleep (\d+)", hook)))
    # The router and then the workers are given the grace, and then all are killed.
    stops_s = waits + 2 * (config.stop_grace_s + STOP_MARGIN_S) + END_TIMEOUT_S + STOP_SPARE_S
    for pod in overlay.ray_pods:
        given = pod.spec["terminationGracePeriodSeconds"]
        needed = stops_s if pod.where == "head" else max(stops_s, _drain_s(pod, config))
        if given < needed:
            yield f"{pod.where}: is killed after {given} s; to stop takes up to {needed:.0f} s"
        if "preStop" not in pod.spec["containers"][0].get("lifecycle", {}):
            yield f"{pod.where}: Ray does not wait for what runs there"


def _drain_s(pod: Pod, config: ClusterConfig) -> float:
    """Return how long a pod of workers that goes by itself may take to drain."""
    hook = pod.spec["containers"][0].get("lifecycle", {}).get("preStop")
    first = hook["exec"]["command"][-1].partition("pagewire drain")[0] if hook else ""
    waits = sum(map(float, re.findall(r"sleep (\d+)", first)))
    return waits + STOP_SPARE_S + config.stop_grace_s + LEAVE_MARGIN_S


def routers(overlay: Overlay, folder: Path) -> Iterator[str]:
    """Routers find the controller, have its keys, and hand their streams over in time."""
    config = config_of(overlay, folder)
    group = get_command(commands.app)
    parent = group.make_context("pagewire", ["version"])
    secrets = _secret_folders(overlay.head, overlay.container("up"))
    if config.secret_file and Path(config.secret_file).parent not in secrets:
        yield f"up reads {config.secret_file}; its secrets are in {sorted(map(str, secrets))}"
    if bool(config.secret_file) != bool(overlay.routers):
        yield "routers outside Ray need a secret that lasts, and nobody else does"
    yield from _without_tenants(config, overlay.head, overlay.head.spec["containers"])
    for pod in overlay.routers:
        (one,) = pod.containers
        yield from _without_tenants(config, pod, [one])
        program, name, *words = one["command"]
        try:
            given = group.get_command(parent, name).make_context(name, words, parent=parent).params
        except Exception as error:  # of click, whatever it is
            yield f"{program} {name}: {error}"
            continue
        if one["image"].rpartition("/")[2].partition(":")[0] != "pagewire-router":
            yield f"{pod.where}: {one['image']} brings torch and Ray"
        host, _, port = given["controller"].partition(":")
        service = overlay.of("Service").get(host, {"spec": {"selector": {}, "ports": []}})["spec"]
        if overlay.head not in overlay.selected(service["selector"]) or not service["selector"]:
            yield f"{pod.where}: no Service {host} leads to the head"
        elif {int(port)} != {config.controller_port, *(each["port"] for each in service["ports"])}:
            yield f"{pod.where}: the controller is at {config.controller_port}, not at {port}"
        elif not service.get("publishNotReadyAddresses"):
            yield f"{pod.where}: a head that takes no requests must be found, too"
        if given["keys"].parent not in _secret_folders(pod, one):
            yield f"{pod.where}: {given['keys']} is in no secret"
        mounts = [each["mountPath"] for each in one["volumeMounts"]]
        if str(given["config"].parent) not in mounts or given["config"].name != "cluster.yaml":
            yield f"{pod.where}: {given['config']} is not mounted"
        ready, live = asked(one["readinessProbe"]), asked(one["livenessProbe"])
        if (*ready[:2], *live[:2]) != (config.port, SERVICE, config.port, ""):
            yield f"{pod.where}: is ready when {SERVICE} is, and alive when the process is"
        waits = float(one["lifecycle"]["preStop"]["exec"]["command"][-1])
        needed = waits + config.stop_grace_s + STOP_SPARE_S
        if (given := pod.spec["terminationGracePeriodSeconds"]) < needed:
            yield f"{pod.where}: is killed after {given} s; to stop takes up to {needed:.0f} s"
        if not any(
            pod in overlay.selected(each["spec"]["selector"])
            for each in overlay.of("PodDisruptionBudget").values()
        ):
            yield f"{pod.where}: has no PodDisruptionBudget"
        if pod.replicas < 2:
            yield f"{pod.where}: streams of the only router have nobody to go on"
    for name, each in overlay.of("HorizontalPodAutoscaler").items():
        target = each["spec"]["scaleTargetRef"]
        if target["name"] not in overlay.of(target["kind"]):
            yield f"HorizontalPodAutoscaler {name}: there is no {target['kind']} {target['name']}"


def _without_tenants(
    config: ClusterConfig, pod: Pod, containers: list[dict[str, Any]]
) -> Iterator[str]:
    """Say which containers that read the tenants file do not find it in a secret."""
    file = config.router.tenants_file
    for one in containers:
        folders = _secret_folders(pod, one)
        if file and Path(file).parent not in folders:
            yield f"{pod.where}: {one['name']} finds {file} in none of its secrets"


def _secret_folders(pod: Pod, container: dict[str, Any]) -> set[Path]:
    """Return where a container finds secrets."""
    return {path for path, _ in _secrets_of(pod, container)}


def _secrets_of(pod: Pod, container: dict[str, Any]) -> list[tuple[Path, str]]:
    """Return where a container finds which secret when it starts."""
    secrets = {
        each["name"]: each["secret"]["secretName"]
        for each in pod.spec["volumes"]
        if "secret" in each and not each["secret"].get("optional")
    }
    return [
        (Path(each["mountPath"]), secrets[each["name"]])
        for each in container["volumeMounts"]
        if each["name"] in secrets
    ]


def tls(overlay: Overlay, folder: Path) -> Iterator[str]:
    """Whoever reads a certificate has it, from an issuer that there is, for the names in use."""
    config = config_of(overlay, folder)
    if config.insecure == config.tls.is_on or config.tls.is_on != config.front_tls.is_on:
        yield "all must be encrypted, or the configuration must say that nothing is"
    certificates = overlay.of("Certificate")
    issued = {each["spec"]["secretName"]: each["spec"] for each in certificates.values()}
    inside, front = (_folders(each) for each in (config.tls, config.front_tls))
    readers = [(overlay.head, each) for each in overlay.head.spec["containers"]]
    readers += [(pod, pod.spec["containers"][0]) for pod in (*overlay.groups, *overlay.routers)]
    for pod, one in readers:
        needed = inside if pod in overlay.groups else inside | front
        found = {path: secret for path, secret in _secrets_of(pod, one) if secret in issued}
        if needed != found.keys():
            yield f"{pod.where}, {one['name']}: finds certificates in {found}, needs {needed}"
        for path, secret in found.items():
            names, usages = issued[secret]["dnsNames"], set(issued[secret]["usages"])
            if path in inside and config.tls.server_name not in names:
                yield f"Certificate {secret}: is not for {config.tls.server_name}"
            if not usages >= {"server auth", *(["client auth"] if path in inside else [])}:
                yield f"Certificate {secret}: its usages are {sorted(usages)}"
            if path in front and (missing := {"localhost", *_front_names(overlay)} - set(names)):
                yield f"Certificate {secret}: is not for {sorted(missing)}"
    authorities = {name for name, each in issued.items() if each.get("isCA")}
    for name, each in overlay.of("Issuer").items():
        if each["spec"].get("ca", {}).get("secretName", name) not in {*authorities, "self-signed"}:
            yield f"Issuer {name}: nothing makes the secret {each['spec']['ca']['secretName']}"
    for name, each in certificates.items():
        if each["spec"]["issuerRef"]["name"] not in overlay.of("Issuer"):
            yield f"Certificate {name}: there is no Issuer {each['spec']['issuerRef']['name']}"
    policies = overlay.of("BackendTLSPolicy")
    behind = {each["name"] for p in policies.values() for each in p["spec"]["targetRefs"]}
    routed = {
        backend["name"]
        for kind in ("GRPCRoute", "HTTPRoute")
        for route in overlay.of(kind).values()
        for rule in route["spec"]["rules"]
        for backend in rule["backendRefs"]
    }
    if behind != (routed if config.front_tls.is_on else set()):
        yield f"the Gateway connects to {sorted(behind)} over TLS, and routes to {sorted(routed)}"
    for name, each in policies.items():
        if each["spec"]["validation"]["hostname"] not in _front_names(overlay):
            yield f"BackendTLSPolicy {name}: expects {each['spec']['validation']['hostname']}"
    for name, each in overlay.of("PodMonitor").items():
        is_of_workers = overlay.groups[0] in overlay.selected(each["spec"]["selector"])
        for endpoint in each["spec"]["podMetricsEndpoints"]:
            if config.router.tenants_file and "authorization" not in endpoint and not is_of_workers:
                yield f"PodMonitor {name}: shows no token of an operator"
            is_tls = endpoint.get("scheme") == "https" and "tlsConfig" in endpoint
            if is_tls != config.front_tls.is_on:
                yield f"PodMonitor {name}: must ask as clients do"
            elif is_tls and is_of_workers:
                yield from _asks_workers(name, endpoint["tlsConfig"], config, issued)


def _asks_workers(
    name: str, asks: dict[str, Any], config: ClusterConfig, issued: dict[str, dict[str, Any]]
) -> Iterator[str]:
    """Say why workers would not answer a PodMonitor that asks them so."""
    if asks.get("serverName") != config.tls.server_name:
        yield f"PodMonitor {name}: workers are {config.tls.server_name}"
    own = [each for each in issued.values() if config.tls.server_name in each.get("dnsNames", ())]
    parts = (
        asks["ca"]["secret"],
        asks.get("cert", {}).get("secret", {}),
        asks.get("keySecret", {}),
    )
    secrets = {each.get("name") for each in parts}
    shown = issued.get(secrets.pop()) if len(secrets) == 1 else None
    if shown is None:
        yield f"PodMonitor {name}: shows no certificate that is issued"
    elif "client auth" not in shown["usages"] or shown["issuerRef"] not in [
        each["issuerRef"] for each in own
    ]:
        yield f"PodMonitor {name}: shows a certificate that workers do not trust"


def _folders(section: Any) -> set[Path]:
    """Return where the files of a section are."""
    names = [each.name for each in fields(section) if each.name.endswith("_file")]
    return {Path(path).parent for name in names if (path := getattr(section, name))}


def _front_names(overlay: Overlay) -> set[str]:
    """Return the names by which clients within Kubernetes know routers and gateway."""
    inside = {"pagewire-controller", *(each.where for each in overlay.stores)}
    return overlay.of("Service").keys() - inside


def stores(overlay: Overlay, _: Path) -> Iterator[str]:
    """Ray's state lies where the head looks for it, behind a password, and outlives its pod."""
    options = overlay.cluster["spec"].get("gcsFaultToleranceOptions")
    if options is None:
        yield from (f"{each.where}: no head uses it" for each in overlay.stores)
        return
    name, _, port = options["redisAddress"].partition(":")
    service = overlay.of("Service").get(name)
    if service is None or int(port) not in [each["port"] for each in service["spec"]["ports"]]:
        yield f"the head keeps its state at {options['redisAddress']}, where no Service is"
        return
    secret = options.get("redisPassword", {}).get("valueFrom", {}).get("secretKeyRef")
    for pod in overlay.selected(service["spec"]["selector"]):
        (container,) = pod.containers
        given = [each.get("valueFrom", {}).get("secretKeyRef") for each in container["env"]]
        asks = any("requirepass" in each for each in container["command"])
        if secret is None or secret not in given or not asks:
            yield f"{pod.where}: its password is not the head's, {secret}"
        claims = {
            each["metadata"]["name"]
            for each in overlay.of("StatefulSet")[pod.where]["spec"]["volumeClaimTemplates"]
        }
        folder = container["command"][container["command"].index("--dir") + 1]
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        if mounts.get(folder) not in claims:
            yield f"{pod.where}: {folder} is on no claim"


def disruptions(overlay: Overlay, _: Path) -> Iterator[str]:
    for name, each in overlay.of("PodDisruptionBudget").items():
        least = each["spec"].get("minAvailable")
        replicas = sum(pod.replicas for pod in overlay.selected(each["spec"]["selector"]))
        if not isinstance(least, int) or "maxUnavailable" in each["spec"]:
            yield f"PodDisruptionBudget {name}: only a number minAvailable works for a RayCluster"
        elif least > replicas:
            yield f"PodDisruptionBudget {name}: {least} of {replicas} pods"
    if not any(
        overlay.head in overlay.selected(each["spec"]["selector"])
        for each in overlay.of("PodDisruptionBudget").values()
    ):
        yield "the head has no PodDisruptionBudget"


def networks(overlay: Overlay, _: Path) -> Iterator[str]:
    """Nothing is open by default, or to everybody; what is, is in the list of allowed flows."""
    policies = overlay.of("NetworkPolicy")
    denied = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    if policies.get("default-deny", {}).get("spec") != denied:
        yield "there is no default-deny"
    flows = set()
    for name, policy in policies.items():
        for kind, peer in (("ingress", "from"), ("egress", "to")):
            rules = policy["spec"].get(kind, [])
            if rules and kind.capitalize() not in policy["spec"]["policyTypes"]:
                yield f"NetworkPolicy {name}: its {kind} does not count"
            for rule in rules:
                if not rule.get(peer) or not rule.get("ports"):
                    yield f"NetworkPolicy {name}: a rule for {kind} is open to everybody"
                    continue
                asked = ",".join(map(_ports, rule["ports"]))
                for each in rule[peer]:
                    flows.add((name, kind, _peer(each), asked))
    for flow in sorted(flows ^ expected_flows(policies)):
        yield f"NetworkPolicy: {' '.join(flow)} is {'new' if flow in flows else 'missing'}"


def _ports(rule: dict[str, Any]) -> str:
    last = f"-{rule['endPort']}" if "endPort" in rule else ""
    return f"{rule['protocol']}:{rule['port']}{last}"


def _peer(peer: dict[str, Any]) -> str:
    if "ipBlock" in peer:
        return peer["ipBlock"]["cidr"]
    labels = [
        f"{kind.removesuffix('Selector')} {key}={value}"
        for kind, selector in sorted(peer.items())
        for key, value in sorted(selector["matchLabels"].items())
    ]
    labels += [
        f"{'' if IS_IN[each['operator']] else 'not '}{each['key']}={'/'.join(each['values'])}"
        for selector in peer.values()
        for each in selector.get("matchExpressions", [])
    ]
    return " and ".join(labels)


def expected_flows(policies: dict[str, Any]) -> set[tuple[str, str, str, str]]:
    own = "pod app.kubernetes.io/name=pagewire"
    of_ray = f"{own} and not {COMPONENT}=router"
    head, router = (f"pod {COMPONENT}={each} and {own}" for each in ("head", "router"))
    dns = "namespace kubernetes.io/metadata.name=kube-system and pod k8s-app=kube-dns"
    clients = "TCP:grpc,TCP:http"
    prometheus = (
        "namespace kubernetes.io/metadata.name=monitoring and pod app.kubernetes.io/name=prometheus"
    )
    flows = {
        ("names", "egress", dns, "UDP:53,TCP:53"),
        ("within-the-cluster", "ingress", of_ray, "TCP:1-65535"),
        ("within-the-cluster", "egress", of_ray, "TCP:1-65535"),
        ("clients", "ingress", "pod pagewire-client=true", clients),
        ("clients", "ingress", "namespace pagewire-client=true", clients),
    }
    optional = {
        ("prometheus", "ingress", prometheus, "TCP:http"),
        ("prometheus-routers", "ingress", prometheus, "TCP:metrics"),
        ("prometheus-workers", "ingress", prometheus, "TCP:worker-metrics"),
        (
            "gateway",
            "ingress",
            "namespace kubernetes.io/metadata.name=gateway-system",
            clients,
        ),
        ("router-clients", "ingress", "pod pagewire-client=true", "TCP:grpc"),
        ("router-clients", "ingress", "namespace pagewire-client=true", "TCP:grpc"),
        (
            "router-clients",
            "ingress",
            "namespace kubernetes.io/metadata.name=gateway-system",
            "TCP:grpc",
        ),
        ("routers", "egress", head, "TCP:controller"),
        ("routers", "egress", f"{own} and not {COMPONENT}=head/router", "TCP:20000-20099"),
        ("controller-from-routers", "ingress", router, "TCP:controller"),
        ("workers-from-routers", "ingress", router, "TCP:20000-20099"),
        ("redis", "ingress", head, "TCP:redis"),
        ("head-to-redis", "egress", "pod app.kubernetes.io/name=pagewire-redis", "TCP:redis"),
        ("fetch-model", "egress", "0.0.0.0/0", "TCP:443"),
        ("autoscaler", "egress", "0.0.0.0/0", "TCP:443,TCP:6443"),
        (
            "traces",
            "egress",
            "namespace kubernetes.io/metadata.name=observability and "
            "pod app.kubernetes.io/name=opentelemetry-collector",
            "TCP:4318",
        ),
    }
    return flows | {each for each in optional if each[0] in policies}


def traces(overlay: Overlay, folder: Path) -> Iterator[str]:
    """All processes reach the collector that the configuration names, and none is open in vain."""
    endpoint = config_of(overlay, folder).tracing.endpoint
    policy = overlay.of("NetworkPolicy").get("traces")
    if not endpoint or policy is None:
        if endpoint:
            yield f"no policy lets traces out to {endpoint}: add components/tracing"
        if policy is not None:
            yield "components/tracing opens a way, and tracing.endpoint is empty"
        return
    url = urlsplit(endpoint)
    port = url.port or {"http": 80, "https": 443}[url.scheme]
    namespace = (url.hostname or "").split(".")[1:2]  # of SERVICE.NAMESPACE.svc
    for rule in policy["spec"]["egress"]:
        if [each["port"] for each in rule["ports"]] != [port]:
            yield f"NetworkPolicy traces: {endpoint} has the port {port}"
        named = [each["namespaceSelector"]["matchLabels"] for each in rule["to"]]
        if [each["kubernetes.io/metadata.name"] for each in named] != namespace:
            yield f"NetworkPolicy traces: {endpoint} is not in the namespace of {named}"
    senders = overlay.selected(policy["spec"]["podSelector"])
    for pod in overlay.pods:
        if pod.where not in [each.where for each in senders]:
            yield f"{pod.where}: NetworkPolicy traces does not let its traces out"


CHECKS = (
    schemas,
    selectors,
    ports,
    volumes,
    names,
    commands_exist,
    versions,
    pools,
    autoscaling,
    rdma,
    security,
    limits,
    probes,
    stopping,
    routers,
    tls,
    stores,
    disruptions,
    networks,
    traces,
)


def load(text: str) -> Overlay:
    """Read what was rendered."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return Overlay(list(yaml.load_all(text, Loader=loader)))
