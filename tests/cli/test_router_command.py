"""pagewire router as processes of their own: without Ray and torch, killed with SIGKILL."""

import asyncio
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.router_commands import ROUTERS_NAME
from cluster.server import MemberServer
from credentials.config import TlsSettings
from credentials.door import ClusterLinks
from credentials.gate import ServerGate
from credentials.key_file import read_router_keys, write_router_keys
from credentials.party import CONTROLLER_PARTY_NAME
from credentials.secret import ClusterSecret
from pagewire import AsyncClient, AsyncStream, Completion
from pagewire.protos import worker_pb2, worker_pb2_grpc
from pagewire.protos.token_ids import pack_token_ids, unpack_token_ids
from pagewire.routers import CHANNEL_OPTIONS
from router.health import INFERENCE_SERVICE
from router.tenants.file import new_token, token_hash
from router.tokenizer import Tokenizer
from tests.router.scripted_worker import ScriptedWorker, Session, delta
from tests.router.tokenizers_for_tests import TEXTS, byte_level
from tests.support.certificates import Authority
from tests.support.cluster_keys import SECRET, credentials_of
from tests.support.command_line import run_main
from tests.support.free_ports import free_port
from tests.support.grpcurl import grpcurl
from tests.support.rarely import rarely

PROMPT = "the quick brown fox"
TOKENIZER = Tokenizer(byte_level().to_str())
# What the worker's model says: with characters of several tokens, and a stop string at the end.
SAID = TOKENIZER.encode(" ".join([*TEXTS, "the END of it"]), add_special_tokens=False)
STOP = "END"
# What the worker takes for each: there is time to kill a router in the middle.
TOKEN_S = 0.1
# What the shell's line does, and then a look at what was imported.
PROGRAM = """
import atexit, sys
heavy = {'ray', 'torch', 'transformers', 'triton'}
atexit.register(lambda: print('imported:', *sorted(heavy & set(sys.modules)), flush=True))
from cli.__main__ import main
main()
"""


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def keys_path(tmp_path: Path) -> Path:
    path = tmp_path / "router.keys"
    write_router_keys(path, SECRET.router_keys(ROUTERS_NAME))
    return path


async def say(session: Session, submit: worker_pb2.SubmitRequest) -> None:
    """Send SAID, again and again, each choice from another token on."""
    positions = {c.choice: len(unpack_token_ids(c.emitted_token_ids)) for c in submit.choices}
    for index in range(min(positions.values()), submit.sampling.max_tokens):
        await asyncio.sleep(session.worker.token_s)
        if submit.request_id in session.cancelled:
            return
        for choice in [each for each, position in positions.items() if position == index]:
            token = SAID[(index + choice) % len(SAID)]
            session.send(delta(submit, choice, index, token_ids=pack_token_ids([token])))
            positions[choice] += 1
        session.worker.steps += 1


@asynccontextmanager
async def controller_and_worker(
    token_s: float = TOKEN_S, port: int = 0
) -> AsyncIterator[tuple[str, ScriptedWorker]]:
    """A controller that knows one decode worker.

    Args:
        token_s: Seconds that the worker takes for each token.
        port: The controller's; 0: a free one.
    """
    worker = ScriptedWorker("decode-0", token_s=token_s, serve=say)
    credentials = credentials_of("decode", "decode-0", worker.incarnation)
    server = grpc.aio.server(interceptors=[ServerGate(credentials)])
    worker_port = server.add_insecure_port("127.0.0.1:0")
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    worker_pb2_grpc.add_DecodeServiceServicer_to_server(worker, server)
    await server.start()
    keys = SECRET.keys_of("controller", CONTROLLER_PARTY_NAME)
    door = ClusterLinks(TlsSettings()).door
    controller = MemberServer(keys, "127.0.0.1", port, door)
    address = await controller.start()
    controller.publish([replace(worker.member, address=f"127.0.0.1:{worker_port}")])
    try:
        yield address, worker
    finally:
        await controller.stop()
        await server.stop(None)


def start(controller: str, keys: Path, model: Path, *arguments: str) -> subprocess.Popen[str]:
    flags = ["--controller", controller, "--keys", keys, "--model", model, *arguments]
    command = [sys.executable, "-c", PROGRAM, "router", *map(str, flags)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def ready_address(router: subprocess.Popen[str]) -> str:
    """Wait until a router is ready; return its address."""
    said = []
    for line in router.stdout:
        said.append(line)
        if match := re.fullmatch(r"ready: router-\S+ on (\S+) for the cluster at \S+\n", line):
            return match[1]
    raise AssertionError("".join(said) + router.stderr.read())


@asynccontextmanager
async def routers(
    count: int, *arguments: Any
) -> AsyncIterator[list[tuple[str, subprocess.Popen[str]]]]:
    """Processes that serve; yields them with their addresses, and kills them at the end."""
    started = [start(*arguments) for _ in range(count)]
    try:
        found = []
        for each in started:
            # In a thread: the controller answers in this loop.
            found.append((await asyncio.to_thread(ready_address, each), each))
        yield found
    finally:
        for each in started:
            each.kill()
            each.communicate(timeout=10)


@asynccontextmanager
async def gateway(*routers: str) -> AsyncIterator[str]:
    """A process that serves HTTP before routers; yields its address."""
    flags = [each for router in routers for each in ("--router", router)]
    command = [sys.executable, "-m", "cli", "gateway", *flags, "--port", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:

        def address_when_ready() -> str:
            said = []
            for line in process.stdout:  # on a busy host it waits for the routers first
                said.append(line)
                found = r"ready: HTTP on http://(\S+)/v1, .* for the routers at .*\n"
                if match := re.fullmatch(found, line):
                    return match[1]
            raise AssertionError(said)

        try:
            # In a thread: it is ready once a router has a worker, which answers in this loop.
            yield await asyncio.to_thread(address_when_ready)
        finally:
            process.kill()


class HttpStream:
    """The events of one completion; `read` takes them to the end, in a thread of its own."""

    def __init__(self, address: str, **options: Any) -> None:
        body = {"prompt": PROMPT, "stream": True, **options}
        body["stream_options"] = {"include_usage": True}
        self.texts: dict[int, str] = {}  # choice |->
        self.finish_reasons: dict[int, str] = {}
        self.usage: dict[str, Any] = {}
        self._request = urllib.request.Request(
            f"http://{address}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )

    def read(self) -> None:
        with urllib.request.urlopen(self._request, timeout=30) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))
        assert line == b"\n", "the last event is whole"

    def _take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        self.usage = event["usage"] or self.usage
        for choice in event["choices"]:
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice["finish_reason"]:
                self.finish_reasons[index] = choice["finish_reason"]


def connect(address: str) -> grpc.aio.Channel:
    """A connection of its own; by default the channels of a process share one."""
    return grpc.aio.insecure_channel(
        address, options=[*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    )


def resumed(worker: ScriptedWorker) -> int:
    """How many submissions had tokens of an earlier call."""
    return sum(any(c.emitted_token_ids for c in each.choices) for each in worker.submits)


async def begun(streams: Sequence[AsyncStream], http: Sequence[HttpStream] = ()) -> None:
    """Wait until each has some tokens."""
    async with asyncio.timeout(30):
        while min(len(each.completion.token_ids) for each in streams) < 5:
            await asyncio.sleep(0.01)
        while not all(each.texts for each in http):
            await asyncio.sleep(0.01)


async def complete(stream: AsyncStream) -> Completion:
    async with stream:
        async for _ in stream:
            pass
    return stream.completion


def test_a_router_that_is_killed_costs_streams_of_grpc_and_http_nothing(
    keys_path, model_dir
) -> None:
    token_ids = TOKENIZER.encode(PROMPT, add_special_tokens=True)
    long = {"max_tokens": len(SAID)}

    def grpc_streams(client: AsyncClient) -> list[AsyncStream]:
        return [
            client.stream(PROMPT, temperature=0.0, **long),
            client.stream(token_ids, n=2, **long),
            client.stream(PROMPT, stop=[STOP], **long),
        ]

    def http_streams(address: str) -> list[HttpStream]:
        return [
            HttpStream(address, temperature=0.0, **long),
            HttpStream(address, n=2, **long),
            HttpStream(address, stop=[STOP], **long),
        ]

    async def completed(
        streams: list[AsyncStream], http: list[HttpStream], meanwhile: Callable[[], Any]
    ) -> tuple[list[Completion], list[HttpStream]]:
        running = [asyncio.create_task(complete(each)) for each in streams]
        running_http = [asyncio.create_task(asyncio.to_thread(each.read)) for each in http]
        await begun(streams, http)
        meanwhile()
        await asyncio.gather(*running_http)
        return await asyncio.gather(*running), http

    async def main() -> tuple[list[list[Completion]], list[list[HttpStream]], int]:
        async with controller_and_worker() as (controller, worker):
            ports = ("--port", "0", "--port-range", "28100-28199")

            def kill() -> None:
                killed.send_signal(signal.SIGKILL)
                worker.token_s = 0.0

            async with routers(2, controller, keys_path, model_dir, *ports) as found:
                (first, killed), (second, _) = found
                for address in (first, second):
                    assert 28100 <= int(address.rpartition(":")[2]) <= 28199
                async with gateway(first, second) as http, AsyncClient([first, second]) as client:
                    worker.token_s = 0.0
                    calm = await completed(grpc_streams(client), http_streams(http), lambda: None)
                    assert resumed(worker) == 0
                    worker.token_s = TOKEN_S
                    cut = await completed(grpc_streams(client), http_streams(http), kill)
                    return *zip(calm, cut, strict=True), resumed(worker)

    (calm, interrupted), (calm_http, interrupted_http), num_resumed = asyncio.run(main())

    assert num_resumed == 3 + 3
    for before, after in zip(calm, interrupted, strict=True):
        assert after.choices == before.choices
    assert calm[0].text == TOKENIZER.decode(SAID)
    assert calm[2].choices[0].stopped_by == STOP
    assert calm[2].text == calm[0].text[: calm[0].text.index(STOP)]
    assert [each.usage.resumptions for each in interrupted] == [1, 1, 1]

    for before, after in zip(calm_http, interrupted_http, strict=True):
        assert after.texts == before.texts
        assert after.finish_reasons == before.finish_reasons
        assert after.usage == before.usage
    assert calm_http[0].texts == {0: TOKENIZER.decode(SAID)}
    assert calm_http[0].usage["completion_tokens"] == len(SAID)
    assert calm_http[1].usage["completion_tokens"] == 2 * len(SAID)
    assert calm_http[2].finish_reasons == {0: "stop"}


async def health_of(address: str) -> tuple[int, int]:
    """The router's health as probes see it: of the process, and of the service."""
    async with connect(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        asked = [health_pb2.HealthCheckRequest(service=each) for each in ("", INFERENCE_SERVICE)]
        live, ready = [(await stub.Check(each, timeout=10)).status for each in asked]
        return live, ready


def test_a_router_that_starts_first_is_alive_and_is_ready_once_there_is_a_controller(
    keys_path, model_dir
) -> None:
    own = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def main() -> tuple[list[str], list[tuple[int, int]], tuple[int, int]]:
        port = free_port()
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, own[1]))  # it inherits that
        try:
            router = start(f"127.0.0.1:{port}", keys_path, model_dir, "--port", "0")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, own)

        async def line() -> str:
            return await asyncio.to_thread(router.stdout.readline)

        try:
            listening = await asyncio.to_thread(router.stderr.readline)
            address = listening.partition(" address=")[2].strip()
            lines = [await line()]
            healths = [await health_of(address)]
            limits = resource.prlimit(router.pid, resource.RLIMIT_NOFILE)
            async with controller_and_worker(port=port):
                lines.append(await line())
                healths.append(await health_of(address))
        finally:
            router.kill()
            await asyncio.to_thread(router.communicate)
        return [each.replace(str(port), "PORT") for each in lines], healths, limits

    (waiting, ready), healths, limits = asyncio.run(main())

    assert waiting.startswith("waiting for the cluster at 127.0.0.1:PORT: UNAVAILABLE: ")
    assert re.fullmatch(r"ready: router-\S+ on \S+ for the cluster at 127.0.0.1:PORT\n", ready)
    status = health_pb2.HealthCheckResponse
    assert healths == [(status.SERVING, status.NOT_SERVING), (status.SERVING, status.SERVING)]
    assert limits == (own[1], own[1]), "it may open as many files as the system allows"


@pytest.mark.parametrize(
    "knows", ["nobody", "tenants", *rarely("certificates", "whoever connects")]
)
def test_where_other_hosts_can_connect_a_router_must_know_its_clients(
    keys_path, model_dir, tmp_path, knows
) -> None:
    settings = Authority(tmp_path).settings(asks_clients=knows == "certificates")
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(f"acme: {{token_hashes: [{token_hash(new_token())}]}}")
    flags = [
        "--host=0.0.0.0",
        "--port=0",
        *(
            f"--{section}-{name.replace('_', '-')}={path}"
            for section, config in (("tls", settings.inside), ("front-tls", settings.front))
            for name, path in asdict(config).items()
            if name.endswith("_file") and path
        ),
        *([f"--router-tenants-file={tenants}"] if knows == "tenants" else []),
        *(["--insecure"] if knows == "whoever connects" else []),
    ]

    if knows == "nobody":
        where = ("--controller=127.0.0.1:1", f"--keys={keys_path}", f"--model={model_dir}")
        refused = run_main("router", *where, *flags)
        assert (refused.returncode, refused.stdout) == (2, "")
        words = "error: router.tenants_file: found none; allowed: a tenants file"
        assert refused.stderr.startswith(words)
        assert refused.stderr.count("\n") == 1
    else:
        router = start("127.0.0.1:1", keys_path, model_dir, *flags)
        said = router.stdout.readline()
        router.terminate()
        output, errors = router.communicate(timeout=20)
        assert said.startswith("waiting for the cluster at 127.0.0.1:1: UNAVAILABLE: "), errors
        ended = (router.returncode, output.splitlines()[-2:])
        assert ended == (0, ["stopped", "imported:"]), errors
        assert "Traceback" not in errors


def test_a_router_tells_prometheus_and_refuses_a_port_that_is_taken(keys_path, model_dir) -> None:
    def scrape(port: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return answer.read().decode()

    async def main() -> tuple[str, str]:
        port = str(free_port())
        flags = ("--port", "0", "--router-metrics-port", port)
        async with (
            controller_and_worker(token_s=0.001) as (controller, _),
            routers(1, controller, keys_path, model_dir, *flags) as [(address, _)],
        ):
            async with AsyncClient(address) as client:
                await client.generate(PROMPT, max_tokens=3)
            told = await asyncio.to_thread(scrape, port)
            return told, refuse(controller, *flags)

    def refuse(controller: str, *flags: str) -> str:
        arguments = ["--controller", controller, "--keys", keys_path, "--model", model_dir, *flags]
        refused = run_main("router", *map(str, arguments))
        return f"{refused.returncode} {refused.stderr}"

    told, refused = asyncio.run(main())

    assert 'pagewire_worker_state{pool="decode",state="ready",worker_id="decode-0"} 1.0' in told
    assert 'pagewire_router_requests_total{outcome="ok"} 1.0' in told
    assert "pagewire_inter_token_latency_seconds_bucket" in told
    assert re.match(r"1 error: port \d+ on 127.0.0.1 is in use by process \d+ ", refused)
    assert "let --router-metrics-port 0 do without metrics" in refused


def test_many_routers_share_a_port_and_one_that_stops_hands_over(keys_path, model_dir) -> None:
    async def main() -> tuple[list[Completion], int, int]:
        port = str(free_port())
        flags = ("--port", port, "--share-port", "--stop-grace-s", "0")
        async with (
            controller_and_worker() as (controller, worker),
            routers(3, controller, keys_path, model_dir, *flags) as found,
        ):
            (address, killed), (_, stopped), _ = found
            clients = [AsyncClient(address, channel_factory=connect) for _ in range(24)]
            streams = [each.stream(PROMPT, max_tokens=100) for each in clients]
            running = [asyncio.create_task(complete(each)) for each in streams]
            await begun(streams)
            killed.send_signal(signal.SIGKILL)
            async with asyncio.timeout(20):
                while not resumed(worker):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            num_of_killed = resumed(worker)
            stopped.terminate()
            output, errors = await asyncio.to_thread(stopped.communicate, None, 20)
            worker.token_s = 0.0
            completions = await asyncio.gather(*running)
            for each in clients:
                await each.aclose()
        assert stopped.returncode == 0, errors
        assert output.splitlines()[-2:] == ["stopped", "imported:"], "neither Ray nor torch"
        assert "Traceback" not in errors
        return completions, num_of_killed, resumed(worker)

    completions, num_of_killed, num_resumed = asyncio.run(main())

    assert 1 <= num_of_killed < 24, "the others had connections, too"
    assert num_resumed > num_of_killed
    assert len({each.token_ids for each in completions}) == 1
    assert {len(each.token_ids) for each in completions} == {100}


def test_a_port_in_use_is_an_error_unless_it_is_shared(keys_path, model_dir) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ("--controller", "localhost:1", "--keys", keys_path, "--model", model_dir)
        for more in ((), ("--share-port",)):
            result = run_main("router", *map(str, flags), "--port", port, *more)
            assert result.returncode == 1
            assert f"port {port} on 127.0.0.1 is in use" in result.stderr


def test_a_port_that_is_taken_after_it_was_looked_at_is_told_in_a_line(
    keys_path, model_dir, monkeypatch
) -> None:
    monkeypatch.setattr("cli.router_commands.check_port_free", lambda *_, **__: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        flags = ("--controller", "localhost:1", "--keys", keys_path, "--model", model_dir)
        refused = run_main("router", *map(str, flags), "--port", port)

    assert refused.returncode == 1
    assert f"error: cannot listen on port {port} of 127.0.0.1\n" in refused.stderr


def test_wrong_options_end_it_with_words(keys_path, model_dir, tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 31)
    folder = tmp_path / "empty"
    folder.mkdir()
    good = {"--controller": "localhost:1", "--keys": keys_path, "--model": model_dir, "--port": 0}
    for name, value, words in (
        ("--controller", "nowhere", "error: --controller: found 'nowhere'; allowed: host:port"),
        ("--router-tenants-file", tmp_path / "none", "none', which cannot be read: No such"),
        (
            "--keys",
            tmp_path / "none",
            f"error: --keys: found '{tmp_path}/none', which cannot be read: No such file or "
            "directory; allowed: a file that `pagewire router-keys` wrote\n",
        ),
        (
            "--keys",
            secret,
            f"error: --keys: found '{secret}', which contains no keys of a router; allowed: a file "
            "that `pagewire router-keys` wrote\n",
        ),
        ("--model", folder, "tokenizer.json is missing"),
        ("--host", "no.invalid", "host: found 'no.invalid'; allowed: a name or an address"),
        ("--router-max-connections", 0, "--router-max-connections: found 0; allowed"),
    ):
        flags = [str(each) for pair in {**good, name: value}.items() for each in pair]
        result = run_main("router", *flags)
        assert (result.returncode, words in result.stderr) == (2, True), result.stderr


def test_traces_without_what_sends_them_are_refused_with_words(
    keys_path, model_dir, monkeypatch
) -> None:
    monkeypatch.setattr("observability.tracing._MODULES", ("no_such_package.sdk",))
    endpoint = ("--tracing-endpoint", "http://collector:4318/v1/traces")
    flags = ("--controller", "localhost:1", "--keys", str(keys_path), "--model", str(model_dir))

    refused = run_main("router", *flags, "--port", "0", *endpoint)

    assert refused.returncode == 2
    assert "pip install . './server[traces]'" in refused.stderr


def test_keys_come_from_the_secret_file_and_only_their_owner_reads_them(tmp_path) -> None:
    secret, keys = tmp_path / "secret", tmp_path / "keys"
    secret.write_bytes(bytes(range(32)))

    result = run_main("router-keys", str(keys), "--secret-file", str(secret))

    assert (result.returncode, result.stdout) == (0, f"wrote {keys}\n")
    assert read_router_keys(keys) == SECRET.router_keys(ROUTERS_NAME)
    assert keys.stat().st_mode & 0o777 == 0o600
    assert {*tmp_path.iterdir()} == {secret, keys}
    assert read_router_keys(keys) != ClusterSecret(b"o" * 32).router_keys(ROUTERS_NAME)

    secret.write_bytes(b"x" * 31)
    result = run_main("router-keys", str(keys), "--secret-file", str(secret))
    assert result.returncode == 2
    random_bytes = (
        "allowed: a file with 32 to 65536 random bytes, as from `head -c 32 /dev/urandom`"
    )
    assert f"error: secret_file: found '{secret}', which has 31 bytes; {random_bytes}\n" in (
        result.stderr
    )
    secret.write_bytes(b"x" * 32)
    inside = str(secret / "keys")  # no folder, and nothing that could be removed again
    result = run_main("router-keys", inside, "--secret-file", str(secret))
    assert result.returncode == 2
    assert f"error: FILE: found '{inside}', which cannot be written: Not a dir" in result.stderr
    missing = str(tmp_path / "no" / "keys")
    result = run_main("router-keys", str(keys), "--secret-file", missing)
    assert result.returncode == 2
    assert f"error: secret_file: found '{missing}', which cannot be read: No such file or " in (
        result.stderr
    )
    assert f"directory; {random_bytes}\n" in result.stderr
    result = run_main("router-keys", missing, "--secret-file", str(secret))
    assert result.returncode == 2
    assert (
        f"error: FILE: found '{missing}', which cannot be written: No such file or directory; "
        in (result.stderr)
    )


@pytest.mark.parametrize("target", ["a file", "a pipe"])
def test_keys_follow_a_link_and_replace_nothing_but_a_file(tmp_path, target) -> None:
    # As /dev/stdout is a link, to a terminal, a pipe or a file.
    (tmp_path / "secret").write_bytes(bytes(range(32)))
    there, link = tmp_path / "there", tmp_path / "link"
    link.symlink_to(there)
    if target == "a file":
        there.touch()
    else:
        os.mkfifo(there)

    result = run_main("router-keys", str(link), "--secret-file", str(tmp_path / "secret"))

    assert link.is_symlink()
    if target == "a file":
        assert read_router_keys(there) == SECRET.router_keys(ROUTERS_NAME)
    else:
        assert there.is_fifo()
        assert result.returncode == 2
        assert f"error: FILE: found '{link}', which is not a file; allowed: a file" in result.stderr


def test_grpcurl_finds_methods_by_reflection_and_reads_a_stream(
    keys_path: Path, model_dir: Path
) -> None:
    async def scenario() -> tuple[str, dict[str, subprocess.CompletedProcess[str]]]:
        calls = {
            "list": ["list"],
            "describe": ["describe", "pagewire.v1.InferenceService"],
            "health": ["grpc.health.v1.Health/Check"],
            "models": ["pagewire.v1.InferenceService/ListModels"],
            "generate": ["pagewire.v1.InferenceService/Generate"],
            "wrong": ["pagewire.v1.InferenceService/Generate"],
        }
        bodies = {
            "generate": {"text": PROMPT, "sampling": {"max_tokens": 3, "temperature": 0}},
            "wrong": {"text": PROMPT, "sampling": {"max_tokens": 3, "top_p": 7}},
        }
        async with (
            controller_and_worker() as (controller, _),
            routers(1, controller, keys_path, model_dir, "--port", "0") as [(address, _)],
        ):
            async with AsyncClient(address) as client:
                [model] = await client.list_models()
            done = {}
            for name, call in calls.items():
                body = bodies.get(name)
                data = ["-d", json.dumps({"model": model.name, **body})] if body else []
                done[name] = await asyncio.to_thread(grpcurl, *data, address, *call)
            return model.name, done

    name, done = asyncio.run(scenario())

    listed = done["list"].stdout.split()
    assert {"grpc.health.v1.Health", "pagewire.v1.InferenceService"} <= set(listed)
    assert "stream .pagewire.v1.GenerateResponse" in done["describe"].stdout
    assert json.loads(done["health"].stdout) == {"status": "SERVING"}
    assert json.loads(done["models"].stdout)["models"][0]["name"] == name
    messages = done["generate"].stdout.replace("}\n{", "}\0{").split("\0")
    text = "".join(json.loads(each).get("text", "") for each in messages)
    assert text == TOKENIZER.decode(SAID[:3])
    assert json.loads(messages[-1])["usage"]["completion_tokens"] == 3
    assert done["wrong"].returncode != 0
    assert "Code: InvalidArgument" in done["wrong"].stderr
    assert "top_p" in done["wrong"].stderr
