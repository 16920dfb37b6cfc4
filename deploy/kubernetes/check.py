"""Check an overlay before it is applied; needs kubectl, but no cluster.

python -m deploy.kubernetes.check deploy/kubernetes/overlays/production

The API server accepts any `cluster.yaml`, and kustomize accepts patches that match nothing; KubeRay
then replaces all pods. Each fault is a line: the file or field, what was found, what is allowed.
"""

import argparse
import difflib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from cluster.certificates import ANY_HOST, check_clients
from cluster.config import ClusterConfig
from cluster.config_file import load_config
from cluster.errors import ConfigError
from credentials.errors import OpenInClear
from options.yaml_text import YamlError, parse_yaml

FILE = "kustomization.yaml"
RENDER_TIMEOUT_S = 60.0
# How long a cluster takes to end, besides stop_grace_s for the router and again for the workers.
STOPPING_S = 35
# The annotation in which Multus, for instance, finds the further networks of a pod.
NETWORKS = "k8s.v1.cni.cncf.io/networks"
DNS_PORT = 53
WORKERS_FROM_ROUTERS = "workers-from-routers"  # a policy of components/routers
REPLICAS = {"replicas": 0, "minReplicas": 0, "maxReplicas": 2**31 - 1}  # where a group has none
# Section |-> its fields in kustomize 5. Kustomize itself checks those of other sections.
_GENERATOR = "name namespace behavior files literals envs env options"
FIELDS = {
    "": "apiVersion kind metadata namespace namePrefix nameSuffix resources components "
    "configurations configMapGenerator secretGenerator generatorOptions images patches "
    "patchesStrategicMerge patchesJson6902 labels commonLabels commonAnnotations replacements "
    "replicas vars crds openapi generators transformers validators helmCharts helmGlobals "
    "buildMetadata sortOptions",
    "patches": "path patch target options",
    "patches.target": "group version kind name namespace labelSelector annotationSelector",
    "images": "name newName newTag digest tagSuffix",
    "configMapGenerator": _GENERATOR,
    "secretGenerator": f"{_GENERATOR} type",
}
PATHS = ("resources", "components", "configurations")  # fields that list paths
MAPPINGS = [each for each in FIELDS if each and "." not in each]  # fields that list mappings
# The names that the manifests have for images, until an overlay replaces them or adds a tag.
OWN_IMAGES = re.compile(r"(?m)^\s*(?:- )?image: (pagewire(?:-router)?)$")
BEHAVIORS = ("create", "merge", "replace")  # of a generator's object; without one: create


def main(words: list[str]) -> int:
    """Check what the command line names; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.kubernetes.check",
        description="Check an overlay before it is applied.",
    )
    parser.add_argument("overlay", type=Path, help="Folder of the overlay.")
    parser.add_argument("--kubectl", default="kubectl", help="The program kubectl.")
    given = parser.parse_args(words)
    # Patches are compared with what kustomize renders, which takes an overlay without other faults.
    faults = list(written_faults(given.overlay)) or list(
        rendered_faults(given.overlay, given.kubectl)
    )
    for each in faults:
        sys.stderr.write(f"error: {each}\n")
    if not faults:
        sys.stdout.write(f"{given.overlay} can be applied\n")
    return 2 if faults else 0


def written_faults(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[str]:
    """Yield the faults of a folder's kustomization and of those below it.

    Args:
        folder: That of the kustomization.
        above: The folders that led here.
    """
    file, above = folder / FILE, above | {folder.resolve()}
    if not file.is_file():
        overlays = sorted(each.parent.name for each in folder.parent.glob(f"*/{FILE}"))
        allowed = ", ".join(overlays) or "a folder that has one"
        yield f"{folder}: found no {FILE}; allowed: {allowed}"
        return
    try:
        content, _ = parse_yaml(file.read_text(encoding="utf-8"))
    except (YamlError, UnicodeDecodeError) as error:
        yield f"{file}{error}"
        return
    yield from _unknown_fields(file, content, "")
    if not isinstance(content, dict):
        return
    for field in (*PATHS, *MAPPINGS):
        if not isinstance(found := content.get(field) or [], list):
            yield f"{file}: {field}: found {found!r}; allowed: a list"
            content[field] = []
    for field in MAPPINGS:  # other values were reported above
        content[field] = [each for each in content.get(field) or [] if isinstance(each, dict)]
    for field in PATHS:
        for value in map(str, content.get(field) or []):
            if re.search(r"://|^[\w.-]+\.\w+/", value):
                continue  # a repository elsewhere
            if not (found := folder / value).exists():
                yield f"{file}: {field}: found {value!r}; allowed: {_beside(found)}"
            elif found.resolve() in above:
                yield f"{file}: {field}: found {value!r}; allowed: no folder that contains this one"
            elif found.is_dir():
                yield from written_faults(found, above)
    paths = [each.get("path") for each in content.get("patches") or []]
    for section in ("configMapGenerator", "secretGenerator"):
        for generator in content.get(section) or []:
            if (found := generator.get("behavior", BEHAVIORS[0])) not in BEHAVIORS:
                allowed = _among(BEHAVIORS, str(found))
                yield f"{file}: {section}.behavior: found {found!r}; allowed: {allowed}"
    for generator in content.get("configMapGenerator") or []:
        paths += [each.rpartition("=")[2] for each in generator.get("files") or []]
    for value in filter(None, paths):
        if not (folder / value).is_file():
            yield f"{file}: found the path {value!r}; allowed: {_beside(folder / value)}"


def _unknown_fields(file: Path, content: Any, section: str) -> Iterator[str]:
    for each in content if isinstance(content, list) else [content]:
        if not isinstance(each, dict):
            yield f"{file}: {section or 'it'}: found {each!r}; allowed: fields and their values"
            continue
        allowed = FIELDS[section].split()
        for name, value in each.items():
            path = f"{section}.{name}".lstrip(".")
            if name not in allowed:
                yield f"{file}: found the field {path!r}; allowed: {_among(allowed, name)}"
            elif path in FIELDS:
                yield from _unknown_fields(file, value or [], path)


def rendered_faults(overlay: Path, kubectl: str) -> Iterator[str]:
    """Yield the faults of what kustomize makes of an overlay."""
    try:
        done = subprocess.run(  # noqa: S603 - the caller names it
            [kubectl, "kustomize", overlay],
            capture_output=True,
            text=True,
            timeout=RENDER_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield f"--kubectl: found {kubectl!r}, which cannot be run ({error}); allowed: kubectl"
        return
    if done.returncode:
        yield f"{overlay}: kustomize refuses it: {' '.join(done.stderr.split())}"
        return
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C it takes a tenth of the time
    objects = [each for each in yaml.load_all(done.stdout, Loader=loader) if each]
    written = yaml.safe_load((overlay / FILE).read_text(encoding="utf-8"))
    yield from _idle(overlay / FILE, written, objects, done.stdout)
    for name in sorted(set(OWN_IMAGES.findall(done.stdout))):
        yield (
            f"{overlay / FILE}: images: found none for {name}; allowed: newTag, and newName unless "
            "the nodes have the image; base has neither, since overlays give them"
        )
    configs = [
        each["data"]["cluster.yaml"]
        for each in objects
        if each["kind"] == "ConfigMap" and "cluster.yaml" in each.get("data", {})
    ]
    if len(configs) != 1:
        yield f"{overlay}: found {len(configs)} ConfigMaps with cluster.yaml; allowed: one"
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cluster.yaml")
        path.write_text(configs[0], encoding="utf-8")
        try:
            config = load_config(path, {})
        except ConfigError as error:
            yield from str(error).replace(f"{folder}/", "").splitlines()
            return
    try:
        check_clients(config)
    except ConfigError as error:
        yield f"cluster.yaml: {error}"
    for cluster in (each["spec"] for each in objects if each["kind"] == "RayCluster"):
        yield from _outside_of_bounds(cluster)
        yield from _missing_places(config, cluster)
        yield from _unlike_the_pods(config, cluster)
        yield from _missing_interfaces(config, cluster)
        yield from _traces_kept_in(config, cluster, objects)
    yield from _closed_to_routers(config, objects)
    yield from _names_of_others(objects)


def _idle(file: Path, written: Any, objects: list[Any], rendered: str) -> Iterator[str]:
    """Yield the patches and the images of an overlay that change nothing."""
    kinds = {each["kind"] for each in objects}
    names = {each["metadata"]["name"] for each in objects}
    for patch in written.get("patches") or []:
        for field, known in (("kind", kinds), ("name", names)):
            wanted = (patch.get("target") or {}).get(field)
            if wanted and not any(re.fullmatch(wanted, each) for each in known):
                allowed = ", ".join(sorted(known))
                yield f"{file}: patches.target.{field}: found {wanted!r}; allowed: {allowed}"
    images = set(re.findall(r"(?m)^\s*(?:- )?image: ([^\s@]+?)(?::[\w.-]+)?(?:@\S+)?$", rendered))
    for image in written.get("images") or []:
        if image.get("newName", image.get("name")) not in images:
            yield (
                f"{file}: images: found the name {image.get('name')!r}, which no container has; "
                f"allowed: the images of containers, now {', '.join(sorted(images))}"
            )


def _missing_places(config: ClusterConfig, cluster: Any) -> Iterator[str]:
    """Yield the pools with more workers than the groups of pods can take, now or ever."""
    grow = [
        each["groupName"]
        for each in cluster["workerGroupSpecs"]
        if cluster.get("enableInTreeAutoscaling")
        and _replicas(each, "minReplicas") < _replicas(each, "maxReplicas")
    ]
    if grow and not config.pool_resources:
        yield (
            f"cluster.yaml: pool_resources: found False; allowed: True, because the autoscaler "
            f"starts pods of {', '.join(grow)} only for workers that wait for their pool's places"
        )
    bound = "maxReplicas" if cluster.get("enableInTreeAutoscaling") else "replicas"
    for pool, number in config.workers_of_pools.items() if config.pool_resources else ():
        places = sum(
            _replicas(each, bound) * int(each.get("resources", {}).get(f"pagewire-{pool}", 0))
            for each in cluster["workerGroupSpecs"]
        )
        if number > places:
            yield (
                f"cluster.yaml: {pool}: found {number} workers; allowed: {places}, as many as the "
                f"pods' {bound} give places of pagewire-{pool}"
            )


def _outside_of_bounds(cluster: Any) -> Iterator[str]:
    """Yield the groups that begin with more or fewer pods than they may have."""
    for each in cluster["workerGroupSpecs"]:
        found, least, most = (_replicas(each, name) for name in REPLICAS)
        if "replicas" in each and not least <= found <= most:
            yield (
                f"RayCluster: {each['groupName']}: replicas: found {found}; allowed: {least} to "
                f"{most}, by minReplicas and maxReplicas"
            )


def _replicas(group: Any, bound: str) -> int:
    return int(group.get(bound, REPLICAS[bound]))


def _unlike_the_pods(config: ClusterConfig, cluster: Any) -> Iterator[str]:
    """Yield the options with which nobody reaches the pods, or which name what they lack."""
    head = cluster["headGroupSpec"]["template"]["spec"]
    workers = [each["template"]["spec"] for each in cluster["workerGroupSpecs"]]
    if config.ray_address != "auto":
        yield f"cluster.yaml: ray_address: found {config.ray_address!r}; allowed: 'auto'"
    if config.host not in ANY_HOST:
        yield (
            f"cluster.yaml: host: found {config.host!r}; allowed: '0.0.0.0', because other pods "
            "connect to the pod's address, and probes and port-forward to localhost"
        )
    ports = _ports([head])
    if "controller" in ports and not config.secret_file:
        yield (
            "cluster.yaml: secret_file: found none; allowed: a file, because the separate routers' "
            "keys come from its secret, and without it each start draws another one"
        )
    for option, name in (
        ("port", "grpc"),
        ("http_port", "http"),
        ("controller_port", "controller"),
    ):
        if (found := getattr(config, option)) != ports.get(name, found):
            yield (
                f"cluster.yaml: {option}: found {found}; allowed: {ports[name]}, which is the head "
                f"pod's port {name}; Services and probes have it, too"
            )
    if opened := sorted(at for name, at in _ports(workers).items() if "worker-metrics" in name):
        metrics = list(config.metrics_ports.of_range) if config.metrics_ports else []
        if metrics != opened:
            yield (
                f"cluster.yaml: worker_metrics_ports: found {config.worker_metrics_ports!r}; "
                f"allowed: '{opened[0]}-{opened[-1]}', as the workers' pods open for metrics"
            )
    given = min(each.get("terminationGracePeriodSeconds", 30) for each in (head, *workers))
    if 2 * config.stop_grace_s + STOPPING_S > given:
        yield (
            f"cluster.yaml: stop_grace_s: found {config.stop_grace_s:g}; allowed: up to "
            f"{(given - STOPPING_S) / 2:g}, because Kubernetes kills the pods after their "
            f"terminationGracePeriodSeconds, {given}"
        )
    (up,) = [each for each in head["containers"] if each["name"] == "up"]
    yield from _unlike_the_probes(config, up)
    for option, file in _files(config):
        readers = [(head, up)]
        # Of all pods, the first container is Ray's.
        if option != "secret_file":
            readers.append((head, head["containers"][0]))
        if option == "model" or option.startswith("tls."):
            readers += [(each, each["containers"][0]) for each in workers]
        for pod, container in readers:
            folders = _folders(pod, container)
            if not any(Path(file).is_relative_to(folder) for folder in folders):
                yield (
                    f"cluster.yaml: {option}: found {file!r}; allowed: a path in a volume of the "
                    f"container {container['name']}, which reads it: {', '.join(folders)}"
                )
                break


def _unlike_the_probes(config: ClusterConfig, up: Any) -> Iterator[str]:
    """Yield what lets no server start, or no probe connect: TLS on one side alone."""
    option, front = "front_tls.certificate_file", config.front_tls
    if not config.insecure:
        for name, section in ((option, front), ("tls.certificate_file", config.tls)):
            if not section.is_on:
                yield f"cluster.yaml: {OpenInClear(name, 'the pods')}"
        if not front.is_on:
            return
    expects_tls = "--authority-file" in str(up.get("readinessProbe"))
    if expects_tls and not front.is_on:
        yield (
            f"cluster.yaml: {option}: found none; allowed: a certificate, because with "
            "components/tls the probes connect over TLS"
        )
    elif front.is_on and not expects_tls:
        yield (
            f"cluster.yaml: {option}: found {front.certificate_file!r}; allowed: none, because "
            "without components/tls the probes connect in clear"
        )


def _folders(pod: Any, container: Any) -> list[str]:
    """Return where a container has volumes that hold something when it starts."""
    empty = {each["name"] for each in pod.get("volumes", []) if "emptyDir" in each}
    mounts = container.get("volumeMounts", [])
    return [each["mountPath"] for each in mounts if each["name"] not in empty]


def _missing_interfaces(config: ClusterConfig, cluster: Any) -> Iterator[str]:
    """Yield the options that name an interface which a pod lacks."""
    workers = [each["template"] for each in cluster["workerGroupSpecs"]]
    for option, pods in (
        ("network_interface", [cluster["headGroupSpec"]["template"], *workers]),
        ("nccl_interface", workers),
    ):
        found = getattr(config, option)
        for interfaces in filter(None, map(_interfaces, pods)) if found else ():
            if found not in interfaces:
                yield (
                    f"cluster.yaml: {option}: found {found!r}; allowed: {', '.join(interfaces)}, "
                    "the interfaces of the pods"
                )
                break


def _interfaces(pod: Any) -> list[str]:
    """Return the interfaces of a pod other than lo; none: the manifests do not tell.

    Container runtimes call the first one eth0. Those of further networks have numbers, unless their
    annotation names them.
    """
    annotations = pod.get("metadata", {}).get("annotations", {})
    if pod["spec"].get("hostNetwork") or pod["spec"].get("resourceClaims"):
        return []
    if any("interface" in each for each in annotations):  # of another plugin, such as GKE's
        return []
    networks = annotations.get(NETWORKS, "").strip()
    if networks.startswith("["):
        names = [each.get("interface", "") for each in yaml.safe_load(networks)]
    else:
        names = [each.partition("@")[2].strip() for each in networks.split(",") if each]
    return ["eth0", *(name or f"net{number}" for number, name in enumerate(names, 1))]


def _traces_kept_in(config: ClusterConfig, cluster: Any, objects: list[Any]) -> Iterator[str]:
    """Yield tracing.endpoint if no policy lets workers reach anything but names and each other."""
    egress = [
        each["spec"]
        for each in objects
        if each["kind"] == "NetworkPolicy" and _limits_egress(each["spec"])
    ]
    for group in cluster["workerGroupSpecs"] if config.tracing.endpoint else ():
        labels = group["template"].get("metadata", {}).get("labels", {})
        policies = [each for each in egress if _selects(each["podSelector"], labels)]
        rules = [rule for each in policies for rule in each.get("egress") or []]
        if policies and not any(_leads_out(rule, labels) for rule in rules):
            yield (
                f"cluster.yaml: tracing.endpoint: found {config.tracing.endpoint!r}, which no "
                f"policy lets the pods of {group['groupName']} reach; allowed: '', or an endpoint "
                "with components/tracing"
            )
            return


def _closed_to_routers(config: ClusterConfig, objects: list[Any]) -> Iterator[str]:
    """Yield port_range if separate routers do not reach the workers' ports by their policies."""
    for each in objects:
        if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] == WORKERS_FROM_ROUTERS:
            ports = each["spec"]["ingress"][0]["ports"][0]
            if (allowed := f"{ports['port']}-{ports['endPort']}") != config.port_range:
                yield (
                    f"cluster.yaml: port_range: found {config.port_range!r}; allowed: {allowed!r}, "
                    "as the network policies of components/routers have it"
                )


def _limits_egress(policy: Any) -> bool:
    return "Egress" in policy["policyTypes"] if "policyTypes" in policy else "egress" in policy


def _leads_out(rule: Any, labels: dict[str, str]) -> bool:
    """Return whether a rule lets pods with these labels reach more than names and each other."""
    selectors = [
        to["podSelector"] if set(to) == {"podSelector"} else {} for to in rule.get("to") or [{}]
    ]
    return any(port.get("port") != DNS_PORT for port in rule.get("ports") or [{}]) and any(
        not each or not _selects(each, labels) for each in selectors
    )


def _selects(selector: Any, labels: dict[str, str]) -> bool:
    return labels.items() >= selector.get("matchLabels", {}).items() and all(
        _meets(each, labels) for each in selector.get("matchExpressions", [])
    )


def _meets(condition: Any, labels: dict[str, str]) -> bool:
    key, operator = condition["key"], condition["operator"]
    if operator in ("Exists", "DoesNotExist"):
        return (key in labels) == (operator == "Exists")
    return (labels.get(key) in condition["values"]) == (operator == "In")


def _ports(pods: Iterable[Any]) -> dict[str, int]:
    """Return the ports that pods open, by name."""
    named = [port for pod in pods for each in pod["containers"] for port in each.get("ports", [])]
    return {each["name"]: each["containerPort"] for each in named}


def _files(config: ClusterConfig) -> Iterator[tuple[str, str]]:
    """Yield the options that name files, and the files."""
    front, tls = config.front_tls, config.tls
    options = {
        "model": str(config.model or ""),
        "secret_file": config.secret_file,
        "router.tenants_file": config.router.tenants_file,
        "tls.certificate_file": tls.certificate_file,
        "tls.key_file": tls.key_file,
        "tls.authority_file": tls.authority_file,
        "front_tls.certificate_file": front.certificate_file,
        "front_tls.key_file": front.key_file,
        "front_tls.client_authority_file": front.client_authority_file,
    }
    yield from ((option, file) for option, file in options.items() if file)


def _names_of_others(objects: list[Any]) -> Iterator[str]:
    """Yield the names of Services in certificates that are of another namespace."""
    for each in objects:
        ours = f".{each['metadata'].get('namespace')}.svc"
        for name in each["spec"].get("dnsNames", []) if each["kind"] == "Certificate" else ():
            if name.endswith(".svc") and not name.endswith(ours):
                yield (
                    f"Certificate {each['metadata']['name']}: dnsNames: found {name!r}; allowed: "
                    f"names of the namespace, as in {name.partition('.')[0]}{ours}"
                )


def _beside(path: Path) -> str:
    return _among(sorted(each.name for each in path.parent.glob("*")), path.name)


def _among(names: Sequence[str], found: str) -> str:
    near = difflib.get_close_matches(found, names, n=1)
    return ", ".join(names) + (f"; did you mean {near[0]}?" if near else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
