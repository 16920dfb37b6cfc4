"""The check of an overlay before it is applied names what is wrong, and what is allowed."""

import shutil

import pytest

from cluster.launch import END_TIMEOUT_S, STOP_MARGIN_S
from deploy.kubernetes.check import STOPPING_S, main
from tests.deploy.kubectl import find_kubectl
from tests.deploy.manifest_checks import STOP_SPARE_S
from tests.deploy.overlays import KUBERNETES, OVERLAYS

KUSTOMIZATION, CONFIG = "kustomization.yaml", "cluster.yaml"
SECRET = "secret_file: /etc/pagewire-secret/secret"
FRONT_TLS = """front_tls:
  certificate_file: /etc/pagewire-front-tls/tls.crt
  key_file: /etc/pagewire-front-tls/tls.key
"""


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
        (
            KUSTOMIZATION,
            "  - path: raycluster.yaml\n    target:\n      kind: RayCluster\n",
            "  - raycluster.yaml\n",
            "patches: found 'raycluster.yaml'; allowed: fields and their values",
        ),
        (
            KUSTOMIZATION,
            "resources:\n  - ../../base\n  - disruptionbudgets.yaml\n  - backend-tls.yaml\n",
            "resources: ../../base\n",
            "resources: found '../../base'; allowed: a list",
        ),
        (
            KUSTOMIZATION,
            "../../base\n",
            "../../base\n  - ../production\n",
            "resources: found '../production'; allowed: no folder that contains this one",
        ),
        # These are found in what kustomize makes of it.
        (KUSTOMIZATION, "name: pagewire-router\n    ", "", "images: found the name None, which no"),
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
            "cluster.yaml, line 18: stop_grase_s: found an un",
        ),
        (CONFIG, "decode: 4", "decode: 5", "decode: found 5 workers; allowed: 4, as many as the p"),
        (
            CONFIG,
            "port: 50051",
            "port: 1",
            "port: found 1; allowed: 50051, which is the head pod's",
        ),
        (CONFIG, "http_port: 8000", "http_port: 1", "http_port: found 1; allowed: 8000, which is"),
        (CONFIG, "r_port: 50052", "r_port: 1", "controller_port: found 1; allowed: 50052, which"),
        (CONFIG, "20000-20099", "20000-20098", "port_range: found '20000-20098'; allowed: '20000"),
        (CONFIG, "9401-9401", "9401-9402", "_ports: found '9401-9402'; allowed: '9401-9401', as"),
        (CONFIG, "0.0.0.0", "127.0.0.1", "host: found '127.0.0.1'; allowed: '0.0.0.0', because o"),
        (CONFIG, "host: 0.0.0.0\n", "", "host: found ''; allowed: '0.0.0.0', because other pods c"),
        (CONFIG, "address: auto", "address: ray:6379", "ray_address: found 'ray:6379'; allowed: '"),
        (CONFIG, "grace_s: 30", "grace_s: 43", "stop_grace_s: found 43; allowed: up to 42.5, beca"),
        (CONFIG, "pagewire-secret/s", "s/s", "secret_file: found '/etc/s/secret'; allowed: a path"),
        (CONFIG, f"{SECRET}\n", "", "secret_file: found none; allowed: a file, because the separ"),
        (
            CONFIG,
            "pagewire-tenants/tenants",
            "pagewire/tenants",
            "router.tenants_file: found '/etc/pagewire/tenants.yaml'; allowed: a path in a volume "
            "of the container ray-head, which reads it: /model, /etc/pagewire-tenants, ",
        ),
        (
            CONFIG,
            "tenants_file: /etc/pagewire-tenants/tenants.yaml",
            "max_connections: 9",
            "cluster.yaml: router.tenants_file: found none; allowed: a tenants file, or front_tls.",
        ),
        (
            CONFIG,
            FRONT_TLS,
            "",
            "front_tls.certificate_file: found none; allowed: a certificate, w",
        ),
        (
            CONFIG,
            FRONT_TLS,
            "insecure: true\n",
            "front_tls.certificate_file: found none; allowed: a certificate, because with "
            "components/tls the probes connect over TLS",
        ),
        (
            CONFIG,
            "log_format: json",
            "insecure: true",
            "line 19: insecure: found true; allowed: fa",
        ),
        (
            KUSTOMIZATION,
            "  - ../../components/tls\n",
            "",
            "front_tls.certificate_file: found '/etc/pagewire-front-tls/tls.crt'; allowed: none, "
            "because without components/tls the probes connect in clear",
        ),
        (CONFIG, "tls/ca.crt", "ca.crt", "tls.authority_file: found '/etc/pagewire-ca.crt'; all"),
        (
            KUSTOMIZATION,
            "  - ../../components/tls\n",
            "",
            "tls.key_file: found '/etc/pagewire-tls/",
        ),
        (
            KUSTOMIZATION,
            "namespace: pagewire",
            "namespace: new",
            "Certificate pagewire-front-tls: dnsNames: found 'pagewire-grpc.pagewire.svc'; allowed"
            ": names of the namespace, as in pagewire-grpc.new.svc",
        ),
        (
            CONFIG,
            "e: eth0",
            "e: ens5",
            "network_interface: found 'ens5'; allowed: eth0, the interf",
        ),
        (
            CONFIG,
            "network_interface: eth0",
            "nccl_interface: net1",
            "nccl_interface: found 'net1'; allowed: eth0, the interfaces of the pods",
        ),
        (
            CONFIG,
            "log_format: json",
            "tracing: {endpoint: 'http://c:4318/v1/traces'}",
            "tracing.endpoint: found 'http://c:4318/v1/traces', which no policy lets the pods of "
            "prefill reach; allowed: '', or an endpoint with components/tracing",
        ),
        (
            "raycluster.yaml",
            "Specs/0/replicas\n  value: 2",
            "Specs/0/replicas\n  value: 40",
            "prefill: replicas: found 40; allowed: 1 to 8, by minReplicas and maxReplicas",
        ),
        ("raycluster.yaml", "Specs/0/replicas", "/0/replicas", "kustomize refuses it: "),
        (
            KUSTOMIZATION,
            "behavior: replace",
            "behavior: replaze",
            "configMapGenerator.behavior: found 'replaze'; allowed: create, merge, replace; ",
        ),
    ],
)
def test_what_is_mistyped_is_told(production, file, old, new, told, capsys):
    path = production / file
    path.write_text(path.read_text().replace(old, new))

    assert checked(production) == 2
    assert told in capsys.readouterr().err


def replace(path, *changes):
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


def test_an_autoscaler_needs_places_of_pools(production, capsys):
    replace(production / KUSTOMIZATION, ("components/redis", "components/autoscaling"))
    assert checked(production) == 0

    replace(production / CONFIG, ("pool_resources: true", "pool_resources: false"))
    assert checked(production) == 2
    assert (
        "pool_resources: found False; allowed: True, because the autoscaler starts pods of "
        "prefill, decode only for workers" in capsys.readouterr().err
    )


@pytest.mark.parametrize("networks", ["rdma@ib0", '[{"name": "rdma", "interface": "ib0"}]'])
def test_what_further_networks_and_components_add_is_allowed(production, networks):
    rdma = production.parents[1] / "components" / "rdma" / "raycluster.yaml"
    replace(rdma, ('networks: ""', f"networks: {networks!r}"))
    for component in ("rdma", "tracing"):
        added = ("components:\n", f"components:\n  - ../../components/{component}\n")
        replace(production / KUSTOMIZATION, added)
    tracing = "nccl_interface: ib0\ntracing: {endpoint: 'http://c:4318/v1/traces'}"
    replace(production / CONFIG, ("log_format: json", tracing))

    assert checked(production) == 0


def test_what_kubernetes_does_not_require_may_be_left_out(production):
    policy = """
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: own}
spec:
  podSelector: {matchExpressions: [{key: app.kubernetes.io/name, operator: Exists}]}
  ingress: [{}]
"""
    (production / "own.yaml").write_text(policy)
    removed = "".join(
        f"      - {{op: remove, path: /spec/workerGroupSpecs/0/{each}}}\n"
        for each in ("minReplicas", "maxReplicas", "template/metadata")
    )
    replace(
        production / KUSTOMIZATION,
        ("components/redis", "components/autoscaling"),
        ("resources:\n", "resources:\n  - own.yaml\n"),
        ("patches:\n", f"patches:\n  - target: {{kind: RayCluster}}\n    patch: |\n{removed}"),
    )

    assert checked(production) == 0


def test_what_names_no_image_as_the_base_cannot_be_applied(production, capsys):
    assert checked(KUBERNETES / "base") == 2
    assert "images: found none for pagewire; allowed: newTag, and newName" in (
        capsys.readouterr().err
    )

    unnamed = "  - name: pagewire-router\n    newName: registry.example.com/pagewire-router\n"
    replace(production / KUSTOMIZATION, (f"{unnamed}    newTag: 0.1.0\n", ""))
    assert checked(production) == 2
    assert "images: found none for pagewire-router; allowed" in capsys.readouterr().err


def test_the_time_to_stop_is_that_of_the_launcher():
    sleeps_s = 5  # in the hook of the container up
    assert sleeps_s + 2 * STOP_MARGIN_S + END_TIMEOUT_S + STOP_SPARE_S == STOPPING_S


def test_other_folders_and_programs_are_refused(tmp_path, capsys):
    assert main([str(KUBERNETES / "overlays" / "prod")]) == 2
    assert "prod: found no kustomization.yaml; allowed: cpu-demo, production, single-node" in (
        capsys.readouterr().err
    )
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path}: found no kustomization.yaml; allowed: a folder that has one" in (
        capsys.readouterr().err
    )
    assert main([str(KUBERNETES / "overlays" / "production"), "--kubectl", str(tmp_path)]) == 2
    assert f"--kubectl: found '{tmp_path}', which cannot be run" in capsys.readouterr().err
