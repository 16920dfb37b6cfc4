"""The wheels as users install them, in environments that hold nothing else.

What a wheel depends on is linked from this environment, by what the metadata name: no index is
needed, and what is imported without being named is missing.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import threading
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from cluster.demo_model import write_demo_model
from credentials.key_file import write_router_keys
from credentials.secret import ClusterSecret
from pagewire.protos import common_pb2
from tests.pagewire.scripted_service import response, serving_in_thread, usage
from tests.support.distributions import CLIENT, ROOT, SERVER
from tests.support.wall_clock import assert_within

HEAVY = {"torch", "ray", "triton", "numpy", "transformers", "tokenizers", "nvidia-nccl-cu13"}
ENGINE = {"ray", "safetensors", "torch", "triton"}
EXTRAS = SERVER["project"]["optional-dependencies"]
DEPLOY = ROOT / "deploy"
ROUTERS = DEPLOY / "kubernetes" / "components" / "routers"

PROGRAM = """
import sys
from pagewire import Client

with Client(sys.argv[1]) as client:
    print(client.generate("hello", max_tokens=2).text)
    with client.stream_chat([{"role": "user", "content": "again"}]) as stream:
        print(*(delta.text for delta in stream), sep="|")
"""

TYPED = """
from pagewire import AsyncClient, Client, Completion, PagewireError

def ask(client: Client) -> str | None:
    answer = client.generate("x", max_tokens=2)
    reveal_type(answer)
    return answer.finish_reason

async def ask_later(client: AsyncClient) -> int:
    with_usage: Completion = await client.chat([{"role": "user", "content": "x"}])
    reveal_type(client.stream("x"))
    return with_usage.usage.prompt_tokens if with_usage.usage else 0
"""

IMPORT = """
import time
began_s = time.process_time()
from pagewire import AsyncClient, Client
took_s = time.process_time() - began_s
import sys
print(took_s, *sorted({each.partition(".")[0] for each in sys.modules}))
"""


@contextmanager
def killed_after(timeout_s: float, process: subprocess.Popen[str]) -> Iterator[None]:
    """End a process that has not ended in time."""
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Environment:
    """A virtual environment; its programs see neither this tree nor this environment."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True, with_pip=False)
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))

    def install(self, *wheels: Path) -> None:
        pip = [sys.executable, "-m", "pip", f"--python={self.python}", "install", "--quiet"]
        # Where this tree is on the path, and was installed, pip finds the distribution there.
        environment = {key: os.environ[key] for key in os.environ if key != "PYTHONPATH"}
        # What is imported is compiled then; the rest would take seconds.
        command = [*pip, "--no-deps", "--no-index", "--no-compile", *wheels]
        subprocess.run(command, cwd=self.folder, env=environment, check=True, timeout=60)

    def link(self, distribution: metadata.Distribution) -> None:
        base = Path(str(distribution.locate_file(""))).resolve()
        files = [
            each
            for each in distribution.files or ()
            if ".." not in each.parts and "__pycache__" not in each.parts
        ]
        for folder in {each.parent for each in files}:
            (self.site / folder).mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # of another distribution
                # To compile the files again would take seconds.
                os.symlink(f"{base}/{folder}/__pycache__", self.site / folder / "__pycache__")
        for each in map(str, files):  # there are thousands: Path objects would take seconds
            os.symlink(f"{base}/{each}", f"{self.site}/{each}")

    def run(self, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder)} | variables
        return subprocess.run(
            list(map(str, words)),
            cwd=self.folder,  # not where the tree is
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def run_until(self, wanted: str, *words: object) -> str:
        """Run a program until a line matches, then end it; return what it wrote."""
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = list(map(str, words))
        with subprocess.Popen(command, cwd=self.folder, env=environment, **pipes) as process:
            lines = []
            with killed_after(60, process):
                for line in process.stdout:
                    lines.append(line)
                    if re.search(wanted, line):
                        break
                process.terminate()
                lines += process.stdout
        return "".join(lines)


def needed_by(distribution: metadata.Distribution) -> dict[str, metadata.Distribution]:
    """Return what a distribution depends on, and that in turn, by name; without extras."""
    found: dict[str, metadata.Distribution] = {}
    open_ones = [distribution]
    while open_ones:
        for text in open_ones.pop().requires or ():
            requirement = Requirement(text)
            name = re.sub(r"[-_.]+", "-", requirement.name).lower()
            is_wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if is_wanted and name not in found:
                found[name] = metadata.distribution(name)
                open_ones.append(found[name])
    return found


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Build both wheels as the images get them."""
    folder = tmp_path_factory.mktemp("wheels") / "built"
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0: pip reads it as a `no`
    environment = os.environ | offline | {"PYTHON": sys.executable}
    build = [DEPLOY / "docker" / "build_wheels.sh", folder]
    subprocess.run(build, env=environment, check=True, timeout=100, umask=0o077)
    assert (folder / "constraints.txt").exists()
    return {each.name.partition("-")[0]: each for each in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def client(wheels, tmp_path_factory):
    """An environment as `pip install pagewire` makes it."""
    environment = Environment(tmp_path_factory.mktemp("client"))
    environment.install(wheels["pagewire"])
    [installed] = metadata.distributions(name="pagewire", path=[str(environment.site)])
    for each in needed_by(installed).values():
        environment.link(each)
    return environment


@pytest.fixture(scope="module")
def light(wheels, tmp_path_factory):
    """An environment as `pip install pagewire[router]` and the image of routers make it."""
    environment = Environment(tmp_path_factory.mktemp("light"))
    environment.install(*wheels.values())
    [installed] = metadata.distributions(name="pagewire-server", path=[str(environment.site)])
    needed = needed_by(installed)
    del needed["pagewire"]
    for each in needed.values():
        environment.link(each)
    return environment


@pytest.fixture(scope="module")
def both(wheels, tmp_path_factory):
    """An environment as `pip install pagewire[server]` makes it, but for what comes with it."""
    environment = Environment(tmp_path_factory.mktemp("both"))
    environment.install(*wheels.values())
    # Behind the wheels. The .pth files in there do nothing, so a tree that is installed stays out.
    others = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (environment.site / "others.pth").write_text("\n".join(others))
    return environment


def files_in(wheel):
    with zipfile.ZipFile(wheel) as content:
        return set(content.namelist())


def test_the_client_installs_one_name(wheels):
    files = files_in(wheels["pagewire"])

    assert {each.partition("/")[0] for each in files} == {"pagewire", "pagewire-0.1.0.dist-info"}
    assert {"pagewire/py.typed", "pagewire/protos/inference_pb2.pyi"} <= files


def test_the_server_has_the_rest_and_no_file_of_the_client(wheels):
    files = files_in(wheels["pagewire_server"])
    tops = {each.partition("/")[0] for each in files}

    own = {each.partition(".")[0] for each in SERVER["tool"]["setuptools"]["packages"]}
    assert tops == own | {"pagewire_server-0.1.0.dist-info"}
    assert files.isdisjoint(files_in(wheels["pagewire"]))
    assert {"protos/inference.proto", "cli/commands.py", "http_gateway/page/index.html"} <= files


def test_files_of_the_wheels_bear_neither_the_time_nor_the_umask_of_the_build(wheels):
    for each in wheels.values():
        with zipfile.ZipFile(each) as content:
            files = [one for one in content.infolist() if not one.filename.endswith("/RECORD")]
        assert {one.date_time for one in files} == {(1980, 1, 1, 0, 0, 0)}
        assert {one.external_attr >> 16 & 0o777 for one in files} == {0o644}
        assert each.stat().st_mode & 0o444 == 0o444, "who builds the image may be another user"


def test_what_a_client_depends_on_is_a_decision(client):
    direct = {Requirement(each).name for each in CLIENT["project"]["dependencies"]}
    [installed] = metadata.distributions(name="pagewire", path=[str(client.site)])

    assert direct == {"googleapis-common-protos", "grpcio", "protobuf", "rich", "typer"}
    assert HEAVY.isdisjoint(needed_by(installed))
    assert len(needed_by(installed)) < 20


def test_the_client_is_imported_fast_and_brings_nothing_heavy(client):
    runs = [client.run(client.python, "-c", IMPORT) for _ in range(5)]

    assert [each.stderr for each in runs] == [""] * 5
    took_s, *modules = zip(*(each.stdout.split() for each in runs), strict=True)
    assert_within(min(map(float, took_s)), 0.3)  # other tests keep the cores busy
    assert (HEAVY | {"typer", "rich", "pydantic"}).isdisjoint(each[0] for each in modules)


def test_the_client_generates(client):
    async def answer(request, context):
        last = request.chat.messages[-1].content if request.chat.messages else request.text
        yield response("echo ", [1])
        stop = common_pb2.FINISH_REASON_STOP
        yield response(last, [2], first_index=1, finish_reason=stop, usage=usage())

    with serving_in_thread(answer) as (address, _):
        program = client.run(client.python, "-c", PROGRAM, address)
        pagewire = client.folder / "bin" / "pagewire"
        command = client.run(pagewire, "generate", "hi", "--address", address)
        status = client.run(pagewire, "status", "--once", "--address", address)

    assert (program.stdout, program.stderr) == ("echo hello\necho |again\n", "")
    assert command.stdout == "echo hi\n"
    assert "pages_moved=3" in command.stderr
    assert "decode-0" in status.stdout


def test_without_the_server_its_commands_say_how_to_get_it(client):
    pagewire = client.folder / "bin" / "pagewire"

    result = client.run(pagewire, "serve", "--model", "m")
    versions = client.run(pagewire, "version")

    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "error: `pagewire serve` needs the server: `pip install . './server[engine]'` in "
        "Pagewire's repository\n"
    )
    assert versions.stdout.startswith("pagewire 0.1.0\ngrpcio ")


@pytest.mark.thorough
def test_a_strict_type_checker_knows_the_client(client, tmp_path):
    (client.folder / "typed.py").write_text(TYPED)
    checker = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"]

    result = client.run(
        *checker, f"--python-executable={client.python}", f"--cache-dir={tmp_path}", "typed.py"
    )

    assert result.stdout.splitlines() == [
        'typed.py:6: note: Revealed type is "pagewire.types.Completion"',
        'typed.py:11: note: Revealed type is "pagewire.async_client.AsyncStream"',
    ]


@pytest.mark.thorough
def test_with_the_server_the_command_offers_all(both):
    pagewire = both.folder / "bin" / "pagewire"

    shown = both.run(pagewire, "--help").stdout
    refused = both.run(pagewire, "serve", "--model", "/nowhere")

    commands = re.findall(r"^  (\w+) ", shown, re.MULTILINE)
    assert {"generate", "chat", "status", "serve", "up", "doctor"} <= set(commands)
    assert (refused.returncode, "model: found '/nowhere'" in refused.stderr) == (2, True)


def test_what_a_router_depends_on_brings_no_engine(light):
    [installed] = metadata.distributions(name="pagewire-server", path=[str(light.site)])

    assert needed_by(installed).keys().isdisjoint(ENGINE)
    assert {Requirement(each).name for each in EXTRAS["engine"]} == ENGINE
    assert not any((light.site / each).exists() for each in ENGINE)


def test_without_the_engine_routers_and_gateways_start_and_the_rest_says_what_is_missing(light):
    """The command lines of the manifests, in the environment of their image."""
    (light.folder / "model").mkdir()
    write_demo_model(light.folder / "model")
    write_router_keys(light.folder / "keys", ClusterSecret.generate().router_keys("routers"))
    pagewire = light.folder / "bin" / "pagewire"
    (light.folder / "cluster.yaml").write_text("model: model\ninsecure: true\nport: 0\n")
    deployment = yaml.safe_load((ROUTERS / "deployment.yaml").read_text(encoding="utf-8"))
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    name, *words = container["command"]
    here = {"--config": "cluster.yaml", "--keys": "keys", "--controller": "127.0.0.1:1"}
    here["--router-metrics-port"] = "0"
    flags = [each.partition("=")[0] for each in words[1:]]
    router = [words[0], *(f"{each}={here[each]}" for each in flags)]
    gateway = ["gateway", "--router=127.0.0.1:1", "--port=0", "--insecure"]

    started = [
        light.run_until("ready: |waiting for", pagewire, *each) for each in (router, gateway)
    ]
    serve = light.run(pagewire, "serve", "--config", "cluster.yaml", "--http-port", "0")

    assert name == "pagewire"
    assert "for the cluster at 127.0.0.1:1" in started[0]
    assert "no connection to 127.0.0.1:1" in started[1], "that of its router alone is missing"
    assert (serve.returncode, serve.stdout) == (2, ""), serve.stderr
    assert re.fullmatch(
        r"error: this needs (ray|torch): `pip install . './server\[engine\]'` in Pagewire's "
        r"repository\n",
        serve.stderr,
    )


@pytest.mark.cluster
@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_the_command_of_the_image_serves_a_model_and_ends_in_order(both):
    write_demo_model(both.folder)
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    [command] = re.findall(r'^CMD (\["serve".+\])$', dockerfile, re.MULTILINE)
    here = {"/model": str(both.folder), "50051": "0"}
    words = [here.get(each, each) for each in json.loads(command)]

    written = both.run_until(
        "^(ready|error): ", both.folder / "bin" / "pagewire", *words, "--http-port", "0"
    )

    assert re.search(r"^ready: .+ on 0\.0\.0\.0:\d+", written, re.MULTILINE), written
    assert written.splitlines()[-1] == "stopped"


@pytest.mark.cluster
@pytest.mark.thorough
@pytest.mark.timeout(150)
def test_the_commands_of_the_pods_start_and_end_a_cluster(both):
    write_demo_model(both.folder)
    program = both.folder / "bin" / "pagewire"
    config = both.folder / "cluster.yaml"
    sizes = {"prefill": 1, "decode": 1, "page_size": 16, "num_pages": 256}
    model = {"model": str(both.folder), "device": "cpu", "port": 0, "http_port": 0}
    config.write_text(json.dumps(sizes | model), encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="pw", dir="/tmp") as folder:  # sockets: short paths
        up = both.run(program, "up", "--config", config, RAY_TMPDIR=folder)
        drain = both.run(program, "drain", "--here", RAY_TMPDIR=folder)
        down = both.run(program, "down", RAY_TMPDIR=folder)

    assert up.returncode == 0, up.stderr
    assert up.stdout.splitlines()[-1].startswith("ready: pagewire serves"), up.stdout
    assert drain.stderr.startswith("error: --here: found the host of the cluster's controller")
    assert (down.returncode, down.stdout.splitlines()[-1]) == (0, "stopped"), down.stderr


@pytest.mark.thorough
def test_client_and_server_share_a_process(both):
    code = """
import cluster.config, pagewire.client, pagewire.wire, protos, router.server, worker.server
from pagewire.protos import inference_pb2, worker_pb2
print(pagewire.__file__, router.server.__file__, protos.__file__)
print(inference_pb2.DESCRIPTOR.name, worker_pb2.DESCRIPTOR.name)
"""
    result = both.run(both.python, "-c", code)

    assert result.stderr == ""
    files, names = result.stdout.splitlines()
    assert all(Path(each).is_relative_to(both.site) for each in files.split())
    assert names == "pagewire/protos/inference.proto pagewire/protos/worker.proto"
