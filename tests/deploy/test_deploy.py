"""The files of deploy/ name paths, commands and flags that exist."""

import json
import re
import shlex
import subprocess
import sys
import threading
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path

import grpc
import pytest
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from packaging.requirements import Requirement

from cluster.config import ClusterConfig
from cluster.config_options import config_options
from deploy.docker.healthcheck import SERVICE, arguments, main
from tests.support.certificates import Authority
from tests.support.distributions import SERVER, serving_modules_with
from tests.support.typed_commands import check_command

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def instructions(stage):
    """Instructions of one stage of the Dockerfile and those below it, in order."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", text))
    stages = {}  # name |-> instructions
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            below, _, current = rest.partition(" AS ")
            stages[current] = [*stages.get(below, ())]
        else:
            stages[current].append((name, rest.strip()))
    return stages[stage]


@pytest.mark.parametrize(
    ("stage", "extras"),
    [("router", {"traces"}), ("cpu", {"engine", "traces"}), ("cuda", {"cuda", "traces"})],
)
def test_an_image_installs_wheels_alone_and_runs_as_a_user_who_is_not_root(stage, extras):
    steps = dict(instructions(stage))  # the last of each kind
    made = [rest for _, rest in instructions(stage) if "useradd" in rest]
    copied = [rest for name, rest in instructions(stage) if name in ("COPY", "ADD")]

    assert json.loads(steps["ENTRYPOINT"]) == ["pagewire"]
    assert ("CMD" in steps) is (stage != "router"), "a router needs a controller and keys"
    if "CMD" in steps:
        check_command(["pagewire", *json.loads(steps["CMD"])])
    assert steps["USER"] in made[0]
    assert instructions(stage)[-1][0] == "USER"
    assert copied == ["--chmod=0644 healthcheck.py healthcheck.py"], "user 1000 may read it"
    installs = pip_installs(stage)
    options = re.compile("--no-cache-dir --only-binary :all: -c /tmp/(wheels/)?constraints.txt ")
    assert all(map(options.match, installs))
    ours = re.search(
        r"/tmp/wheels/pagewire-\*\.whl .*pagewire_server-\*\.whl\)\[(.*)\]\"$", installs[-1]
    )
    assert set(ours[1].split(",")) == extras
    assert extras <= SERVER["project"]["optional-dependencies"].keys()


def pip_installs(stage):
    """What follows each `pip install`."""
    runs = [" ".join(rest.split()) for name, rest in instructions(stage) if name == "RUN"]
    return [each for run in runs for each in re.findall(r"pip install (.*?)(?: &&|$)", run)]


@pytest.mark.parametrize(("stage", "extras"), [("cpu", ["engine"]), ("cuda", ["engine", "cuda"])])
def test_what_is_large_is_not_installed_again_when_pagewire_changes(stage, extras):
    *runs, last = [rest for name, rest in instructions(stage) if name == "RUN"]
    assert last.startswith("--mount=type=bind,source=wheels,target=/tmp/wheels ")
    assert not any("source=wheels," in each for each in runs)

    optional = SERVER["project"]["optional-dependencies"]
    needed = {Requirement(each).name for extra in extras for each in optional[extra]}
    installed = set(pip_installs(stage)[-2].partition("/tmp/constraints.txt ")[2].split())
    assert installed == needed - {"pagewire-server", "safetensors"}


def test_torch_without_cuda_comes_alone_from_its_index():
    """What it depends on need not be there in the versions of constraints.txt."""
    first = pip_installs("cpu")[0]

    assert first.endswith('--index-url "$TORCH_INDEX" --no-deps torch')
    (index,) = [rest for name, rest in instructions("cpu") if name == "ARG"]
    assert index == "TORCH_INDEX=https://download.pytorch.org/whl/cpu"


def test_the_health_check_asks_the_port_that_is_served():
    steps = dict(instructions("cpu"))
    check = json.loads(steps["HEALTHCHECK"].partition("CMD ")[2])
    command = json.loads(steps["CMD"])

    assert check[1] == "/opt/pagewire/healthcheck.py"
    grpc_port, http_port = steps["EXPOSE"].split()
    assert check[2].rpartition(":")[2] == command[command.index("--port") + 1] == grpc_port
    assert int(http_port) == ClusterConfig().http_port


@pytest.fixture
def health_server():
    server = grpc.server(futures.ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None)


def test_health_is_told_by_the_exit_code(health_server):
    servicer, address = health_server

    assert main([address]) == 1, "the service is unknown"
    servicer.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    assert main([address]) == 1
    servicer.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    script = DEPLOY / "docker" / "healthcheck.py"
    assert subprocess.run([sys.executable, script, address], timeout=30).returncode == 0
    assert main(["127.0.0.1:1"]) == 1, "nobody listens"


def test_health_is_asked_over_tls_where_an_authority_is_given(tmp_path):
    authority = Authority(tmp_path)
    certificate, key = (Path(each).read_bytes() for each in authority.pair("localhost"))
    server = grpc.server(futures.ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    port = server.add_secure_port("localhost:0", credentials)
    server.start()
    address = f"localhost:{port}"

    alive = main([address, "--service=", "--authority-file", authority.file])
    in_clear = main([address, "--service="])
    unread = main([address, "--service=", "--authority-file", str(tmp_path / "none.pem")])
    server.stop(None)

    assert (alive, in_clear, unread) == (0, 1, 1)


@pytest.fixture
def gateway():
    class Answers(BaseHTTPRequestHandler):
        status = 503

        def do_GET(self):
            self.send_response(self.status if self.path == "/ready" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Answers, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_gateway_is_healthy_when_it_is_ready(gateway, monkeypatch):
    answers, url = gateway
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # of a host, not for this

    assert main([f"{url}/ready"]) == 1
    answers.status = 200
    assert main([f"{url}/ready"]) == 0
    assert main([f"{url}/other"]) == 1
    assert main(["http://127.0.0.1:1/ready"]) == 1, "nobody listens"


def shell_commands():
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip():
                yield shlex.split(line)


def test_the_commands_of_the_readme_can_be_typed():
    built, served = [], []
    for words in shell_commands():
        for word in words:
            if word.startswith(("deploy/", "./deploy")):
                assert (ROOT / word).exists(), word
        if words[:2] == ["docker", "run"]:
            image = next(at for at, word in enumerate(words) if word.startswith("pagewire:"))
            assert words[image].removeprefix("pagewire:") in built
            if command := words[image + 1 :]:
                served.append(["pagewire", *command])
            if "--health-cmd" in words:
                python, script, *rest = shlex.split(words[words.index("--health-cmd") + 1])
                assert (python, script) == ("python", "/opt/pagewire/healthcheck.py")
                arguments(rest)
        if words[:2] == [".venv/bin/ray", "exec"] and " serve " in words[-1]:
            served.append(shlex.split(words[-1]))
        if words[:2] == ["docker", "build"]:
            built.append(words[words.index("--target") + 1])
            assert instructions(built[-1])
    for words in served:
        check_command(words)
    assert [words[1] for words in served] == ["serve", "gateway", "serve"]


LISTENS = re.compile(r"\.add_port\(|\.create_server\(|\.server_bind\(|\blistener\.bind\(")
SERVERS = {
    "router/process.py": ("router",),
    "observability/metrics_server.py": ("metrics of a router", "metrics of a worker"),
    "http_gateway/server.py": ("HTTP gateway",),
    "cluster/server.py": ("controller",),
    "worker/process.py": ("worker",),
    "kv_transfer/proven_sockets.py": ("pages into a decode worker",),
}
OPTIONS_OF_PORTS = ("port", "http_port", "metrics_port", "controller_port", "worker_metrics_ports")
PROBES = {"options/ports.py"}  # which only look whether a port is free


def test_the_table_for_firewalls_has_every_server_and_the_ports_of_its_options():
    assert serving_modules_with(LISTENS) == SERVERS.keys() | PROBES

    text = (DEPLOY / "README.md").read_text(encoding="utf-8").partition("| who listens |")[2]
    rows = [line.split(" | ") for line in text.partition("\n\n")[0].splitlines()[2:]]
    ports = {who.removeprefix("| "): port for who, port, *_ in rows}
    assert ports.keys() == {*chain.from_iterable(SERVERS.values()), "NCCL", "Ray"}
    for name, option in config_options().items():
        if name.rpartition(".")[2] in OPTIONS_OF_PORTS:
            (of_it,) = [each for each in ports.values() if f"`{name}` ({option.default}" in each]
            assert of_it


def test_ray_accepts_the_description_of_the_cluster():
    from ray.autoscaler._private.util import prepare_config, validate_config
    from ray.scripts.scripts import start

    described = yaml.safe_load((DEPLOY / "ray" / "cluster.yaml").read_text(encoding="utf-8"))
    validate_config(prepare_config(described))

    assert described["max_workers"] == len(described["provider"]["worker_ips"])
    starts = [
        described[f"{kind}_start_ray_commands"][-1].rpartition("; ")[2]
        for kind in ("head", "worker")
    ]
    for kind in ("head", "worker"):
        assert "export RAY_AUTH_MODE=token;" in described[f"{kind}_start_ray_commands"][-1]
    assert "~/.ray/auth_token" in described["file_mounts"]
    known = {option for parameter in start.params for option in parameter.opts}
    for command in starts:
        executable, verb, *flags = shlex.split(command)
        assert (Path(executable).name, verb) == ("ray", "start")
        assert {flag.partition("=")[0] for flag in flags} <= known
