"""What a host of a Ray tells before a worker loads weights on it."""

import shutil
from pathlib import Path

import pytest

from cluster.demo_model import write_demo_model
from credentials.config import TlsConfig, path_here
from llm_engine.model_identity import ModelIdentity, read_identity
from tests.support.certificates import Authority
from tests.support.interfaces import have_interfaces
from worker.own_host import HostOptions, host_names, look, model_on

NODE = {
    "NodeManagerAddress": "10.0.0.2",
    "NodeManagerHostname": "gpu-a",
    "Resources": {"CPU": 8.0, "pagewire-decode": 1.0, "node:10.0.0.2": 1.0},
}
NAMES = host_names(NODE)
ADDRESS = "10.0.0.2"
CLEAR = TlsConfig()
PLAIN = Path("/models/tiny")
REMEDY = "; a copy of the model must be there, or at a path that model_paths names"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_demo_model(folder)
    return folder


@pytest.fixture(scope="module")
def identity(model: Path) -> ModelIdentity:
    return read_identity(model)


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    have_interfaces(monkeypatch, {"eth0": ["10.0.0.2"], "ib0": ["fd00::2"], "eth1": []})


@pytest.mark.parametrize(
    ("paths", "wanted"),
    [
        ({}, "/models/tiny"),
        ({"10.0.0.2": "/by/address"}, "/by/address"),
        ({"gpu-a": "/by/name"}, "/by/name"),
        ({"pagewire-decode": "/by/resource"}, "/by/resource"),
        ({"gpu-b": "/other", "pagewire-prefill": "/other"}, "/models/tiny"),
        ({"pagewire-decode": "/first", "gpu-a": "/second"}, "/first"),
    ],
)
def test_the_first_path_that_fits_a_host_counts(paths: dict[str, str], wanted: str) -> None:
    assert model_on(paths, PLAIN, NAMES) == Path(wanted)


def test_a_host_with_the_model_at_its_own_path_is_fit(model: Path, identity: ModelIdentity) -> None:
    options = HostOptions(model_paths={"gpu-a": str(model)}, network_interface="ib0")

    found = look(options, PLAIN, NAMES, ADDRESS, identity, CLEAR)

    assert (found.address, found.model, found.problems) == ("fd00::2", model, ())
    assert look(HostOptions(), model, NAMES, ADDRESS, identity, CLEAR).address == ADDRESS


def without_config(model: Path) -> None:
    (model / "config.json").unlink()


def with_other_tokenizer(model: Path) -> None:
    with (model / "tokenizer.json").open("a") as file:
        file.write("\n")


def with_other_weights(model: Path) -> None:
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    end = len(content)
    content[end // 2 :] = bytes(end - end // 2)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (shutil.rmtree, "gpu-a (10.0.0.2) has nothing at {model}"),
        (without_config, "gpu-a (10.0.0.2) has no usable model at {model}: {model}/config.json"),
        (
            with_other_tokenizer,
            "gpu-a (10.0.0.2) has another tokenizer.json at {model} than the router's host",
        ),
        (
            with_other_weights,
            "gpu-a (10.0.0.2) has another configuration or other weights at {model} than",
        ),
    ],
    ids=["none", "damaged", "tokenizer", "weights"],
)
def test_a_host_without_the_model_is_named_with_what_it_has(
    model: Path, identity: ModelIdentity, tmp_path: Path, damage, told: str
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    damage(copy)

    [problem] = look(HostOptions(), copy, NAMES, ADDRESS, identity, CLEAR).problems

    assert problem.startswith(told.format(model=copy))
    assert problem.endswith(REMEDY)


def test_all_that_is_wrong_on_a_host_is_told(identity: ModelIdentity) -> None:
    options = HostOptions(network_interface="eth1", nccl_interface="eth9")

    found = look(options, Path("/nothing"), NAMES, ADDRESS, identity, CLEAR)

    assert [each.partition(",")[0] for each in found.problems[:2]] == [
        "network_interface: found 'eth1'",
        "nccl_interface: found 'eth9'",
    ]
    assert "has nothing at /nothing" in found.problems[2]
    assert found.address == ""


def test_the_loopback_address_does_only_where_ray_is_there_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have_interfaces(monkeypatch, {"lo": ["127.0.0.1"]})
    options = HostOptions(network_interface="lo")

    [problem] = look(options, PLAIN, NAMES, ADDRESS, None, CLEAR).problems

    assert problem == (
        "network_interface: found 'lo', whose address on gpu-a (10.0.0.2) is 127.0.0.1, which no "
        "other host can reach; allowed: one that connects the hosts"
    )
    assert look(options, PLAIN, NAMES, "127.0.0.1", None, CLEAR).problems == ()


def test_a_worker_that_begins_anew_reads_no_model() -> None:
    found = look(HostOptions(), Path("/nothing"), NAMES, ADDRESS, None, CLEAR)

    assert (found.address, found.model, found.problems) == (ADDRESS, Path("/nothing"), ())


def test_a_host_reads_the_certificate_with_its_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = authority.inside_by_host("gpu-a")
    content = Path(authority.file).read_bytes()

    assert look(HostOptions(), PLAIN, NAMES, ADDRESS, None, tls, content).problems == ()

    Path(path_here(tls.certificate_file)).unlink()
    [problem] = look(HostOptions(), PLAIN, NAMES, ADDRESS, None, tls, content).problems
    assert problem == (
        f"tls.certificate_file: on gpu-a (10.0.0.2), {tmp_path}/authority-gpu-a.crt cannot be "
        "read: No such file or directory; allowed: a PEM file that this user can read"
    )


def test_a_host_with_the_files_of_another_cluster_is_not_fit(tmp_path: Path) -> None:
    authority, tls = Authority(tmp_path), Authority(tmp_path, "other").inside()
    expected = Path(authority.file).read_bytes()

    [problem] = look(HostOptions(), PLAIN, NAMES, ADDRESS, None, tls, expected).problems

    assert problem.startswith(
        f"tls.certificate_file: on gpu-a (10.0.0.2), {tls.certificate_file} is not from the "
        "authority of the router's host: "
    )
    assert look(HostOptions(), PLAIN, NAMES, ADDRESS, None, tls).problems == ()
