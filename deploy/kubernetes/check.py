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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from cluster.config import ClusterConfig
from cluster.config_file import load_config
from cluster.errors import ConfigError
from options.yaml_text import YamlError, parse_yaml

FILE = "kustomization.yaml"
RENDER_TIMEOUT_S = 60.0
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


def main(words: list[str]) -> int:
    """Check what the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description="Check an overlay before it is applied.")
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


def written_faults(folder: Path) -> Iterator[str]:
    """Yield the faults of a folder's kustomization and of those below it."""
    file = folder / FILE
    if not file.is_file():
        overlays = sorted(each.parent.name for each in folder.parent.glob(f"*/{FILE}"))
        yield f"{folder}: found no {FILE}; allowed: {', '.join(overlays)}"
        return
    try:
        content, _ = parse_yaml(file.read_text(encoding="utf-8"))
    except (YamlError, UnicodeDecodeError) as error:
        yield f"{file}{error}"
        return
    yield from _unknown_fields(file, content, "")
    if not isinstance(content, dict):
        return
    for field in ("resources", "components", "configurations"):
        for value in map(str, content.get(field) or []):
            if re.search(r"://|^[\w.-]+\.\w+/", value):
                continue  # a repository elsewhere
            if not (found := folder / value).exists():
                yield f"{file}: {field}: found {value!r}; allowed: {_beside(found)}"
            elif found.is_dir():
                yield from written_faults(found)
    paths = [each.get("path") for each in content.get("patches") or []]
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
    objects = [each for each in yaml.safe_load_all(done.stdout) if each]
    written = yaml.safe_load((overlay / FILE).read_text(encoding="utf-8"))
    yield from _idle(overlay / FILE, written, objects, done.stdout)
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
    for cluster in (each["spec"] for each in objects if each["kind"] == "RayCluster"):
        yield from _missing_places(config, cluster)


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
        if image.get("newName", image["name"]) not in images:
            yield (
                f"{file}: images: found the name {image['name']!r}, which no container has; "
                f"allowed: the images of containers, now {', '.join(sorted(images))}"
            )


def _missing_places(config: ClusterConfig, cluster: Any) -> Iterator[str]:
    """Yield the pools with more workers than the groups of pods can take."""
    bound = "maxReplicas" if cluster.get("enableInTreeAutoscaling") else "replicas"
    for pool, number in config.workers_of_pools.items() if config.pool_resources else ():
        places = sum(
            each[bound] * int(each.get("resources", {}).get(f"pagewire-{pool}", 0))
            for each in cluster["workerGroupSpecs"]
        )
        if number > places:
            yield (
                f"cluster.yaml: {pool}: found {number} workers; allowed: {places}, as many as the "
                f"pods' {bound} give places of pagewire-{pool}"
            )


def _beside(path: Path) -> str:
    return _among(sorted(each.name for each in path.parent.glob("*")), path.name)


def _among(names: Sequence[str], found: str) -> str:
    near = difflib.get_close_matches(found, names, n=1)
    return ", ".join(names) + (f"; did you mean {near[0]}?" if near else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
