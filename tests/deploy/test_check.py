"""The check of an overlay before it is applied names what is wrong, and what is allowed."""

import shutil

import pytest

from deploy.kubernetes.check import main
from tests.deploy.kubectl import find_kubectl
from tests.deploy.test_kubernetes import KUBERNETES, OVERLAYS

KUSTOMIZATION, CONFIG = "kustomization.yaml", "cluster.yaml"


@pytest.fixture
def production(tmp_path):
    copied = shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    return copied / "overlays" / "production"


def checked(folder):
    return main([str(folder), "--kubectl", str(find_kubectl())])


@pytest.mark.parametrize("name", OVERLAYS)
def test_our_overlays_can_be_applied(name, capsys):
    assert checked(KUBERNETES / "overlays" / name) == 0
    assert capsys.readouterr().out.endswith(f"{name} can be applied\n")


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        (KUSTOMIZATION, "components:", "componets:", "found the field 'componets'; allowed: api"),
        (KUSTOMIZATION, "components:", "componets:", "; did you mean components?"),
        (KUSTOMIZATION, "newTag: 0.1.0-cuda", "tag: 1", "found the field 'images.tag'; allowed: n"),
        (KUSTOMIZATION, "target:", "targt:", "found the field 'patches.targt'; allowed: path, pa"),
        (KUSTOMIZATION, "kind: RayCl", "knd: RayCl", "found the field 'patches.target.knd'; allo"),
        (
            KUSTOMIZATION,
            "components/redis",
            "components/rediss",
            "components: found '../../components/rediss'; allowed: autoscaling, gateway, "
            "monitoring, rdma, redis, routers, tls, tracing; did you mean redis?",
        ),
        (KUSTOMIZATION, "  - backend-tls", "  - backnd-tls", "resources: found 'backnd-tls.yaml'"),
        (KUSTOMIZATION, "path: ray", "path: rey", "found the path 'reycluster.yaml'; allowed: bac"),
        (KUSTOMIZATION, "- cluster.yaml", "- clster.yaml", "; did you mean cluster.yaml?"),
        (KUSTOMIZATION, "namespace:", "- namespace:", f"{KUSTOMIZATION}, line"),
        # These are found in what kustomize makes of it.
        (
            KUSTOMIZATION,
            "kind: RayCl",
            "kind: RayKl",
            "patches.target.kind: found 'RayKluster'; al",
        ),
        (KUSTOMIZATION, "name: pagewire-router", "name: router", "images: found the name 'router'"),
        (
            CONFIG,
            "stop_grace_s",
            "stop_grase_s",
            "cluster.yaml, line 17: stop_grase_s: found an un",
        ),
        (CONFIG, "decode: 4", "decode: 5", "decode: found 5 workers; allowed: 4, as many as the p"),
        ("raycluster.yaml", "Specs/0/replicas", "/0/replicas", "kustomize refuses it: "),
    ],
)
def test_what_is_mistyped_is_told(production, file, old, new, told, capsys):
    path = production / file
    path.write_text(path.read_text().replace(old, new))

    assert checked(production) == 2
    assert told in capsys.readouterr().err


def test_other_folders_and_programs_are_refused(tmp_path, capsys):
    assert main([str(KUBERNETES / "overlays" / "prod")]) == 2
    assert "prod: found no kustomization.yaml; allowed: cpu-demo, production, single-node" in (
        capsys.readouterr().err
    )
    assert main([str(KUBERNETES / "overlays" / "production"), "--kubectl", str(tmp_path)]) == 2
    assert f"--kubectl: found '{tmp_path}', which cannot be run" in capsys.readouterr().err
