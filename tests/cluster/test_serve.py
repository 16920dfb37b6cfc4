"""What the README starts, as processes: serve and demo on the CPU."""

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import psutil
import pytest
from rich.console import Console

import pagewire
from cli.demo import run_demo
from cli.demo_text import DOCUMENT
from cluster.demo_model import demo_model_dir
from cluster.ray_listeners import open_sockets
from tests.cluster.in_process import in_process_cluster
from tests.support.free_ports import free_port
from tests.support.processes import kill_session, processes_of_session
from tests.support.reflection import services_of

pytestmark = pytest.mark.xdist_group("ray")


@pytest.mark.thorough
def test_demo_shows_a_disaggregated_cluster():
    model = demo_model_dir()

    shown = demo("--model", str(model), "--prefill", "1", "--decode", "1")

    assert model.name in shown
    check_waves(shown)


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "workers",
    [("--prefill", "1", "--decode", "1"), ()],
    ids=["1 + 1", "as many as it chooses"],
)
def test_answers_of_the_demo_with_its_trained_model_are_right(workers):
    shown = demo(*workers)

    assert "SmolLM2-135M-Instruct" in shown
    for answer in ("Agnes Thorne", "whale oil", "21 miles", "in Paris", "silver medal"):
        assert shown.count(answer) == 2, "in both waves"
    check_waves(shown)


def demo(*arguments):
    """Return what the demo prints."""
    result = subprocess.run(
        [sys.executable, "-m", "cli", "demo", "--device", "cpu", *arguments],
        capture_output=True,
        text=True,
        timeout=290,
        env=os.environ | {"COLUMNS": "140"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def check_waves(shown):
    """Check that pages moved, and that all ended."""
    check_moved(shown)
    assert "stopped" in shown


def check_moved(shown):
    """Check that pages moved, the document's in the first wave alone."""
    moved = re.search(r"first wave moved (\d+) pages, the second (\d+)", shown)
    assert int(moved[1]) > int(moved[2]) > 0


def test_the_waves_of_the_demo_pass_with_real_engines(monkeypatch):
    monkeypatch.setattr("cli.demo.DOCUMENT", DOCUMENT[:800])
    monkeypatch.setattr("cli.demo.MAX_TOKENS", 3)
    shown = io.StringIO()

    async def scenario():
        sizes = {"num_prefill": 1, "num_decode": 1, "page_size": 16, "num_pages": 512}
        # As if the model were large: on a busy host passes take as long.
        async with in_process_cluster(
            demo_model_dir(), has_text=True, is_large=True, **sizes
        ) as client:
            await run_demo(client.address, None, Console(file=shown, width=140))

    asyncio.run(scenario())

    check_moved(shown.getvalue())


def test_serve_answers_with_fewer_pages_than_context_and_says_why_it_ends_when_ray_does():
    command = [sys.executable, "-m", "cli", "serve", "--model", str(demo_model_dir())]
    # Pages for 512 tokens, while the model's context is 8192.
    command += ["--port", "0", "--device", "cpu", "--stop-grace-s", "1", "--cpu-pages-mib", "2"]
    command += ["--http-port", str(free_port())]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        lines = []
        while not lines or not lines[-1].startswith("ready"):
            lines.append(server.stdout.readline())
            assert lines[-1], server.communicate(timeout=30)[1]
        address = re.search(r"127\.0\.0\.1:\d+", lines[-1])[0]
        with pagewire.Client(address, default_timeout_s=30) as direct:
            [model] = direct.list_models()
            services = services_of(address)
            processes = psutil.Process(server.pid).children(recursive=True)
            actors = [each for each in processes if each.name().startswith("ray::")]
            names = {each.name() for each in actors}
            priorities = {each.nice() for each in actors}
            reachable = {each.name(): open_sockets(each) for each in processes}
            fitting = direct.generate([5] * 500, max_tokens=12, ignore_eos=True)
            with pytest.raises(pagewire.InvalidRequestError, match="512"):
                direct.generate([5] * 600)
        http = re.search(
            r"HTTP on (http://127\.0\.0\.1:\d+/v1), chat page at http://127\.0\.0\.1:\d+/\n",
            lines[-1],
        )[1]
        with urllib.request.urlopen(f"{http}/models", timeout=30) as listed:
            [shown] = json.load(listed)["data"]
        question = json.dumps({"prompt": [5] * 200, "max_tokens": 7, "ignore_eos": True}).encode()
        request = urllib.request.Request(
            f"{http}/completions", question, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answered:
            completed = json.load(answered)
        client = [sys.executable, "-m", "cli", "generate", "The pages", "--address"]
        answer = subprocess.run(
            [*client, address, "--max-tokens", "5"], capture_output=True, text=True, timeout=30
        )
        children = {each.name(): each.pid for each in psutil.Process(server.pid).children()}
        os.kill(children["raylet"], signal.SIGKILL)
        output, errors = server.communicate(timeout=30)
        left = processes_of_session(server.pid)
    finally:
        kill_session(server.pid)

    assert "DeprecationWarning" not in output + errors, "Ray's own are not for users"
    assert not any(reachable.values()), f"other hosts reach {reachable}"
    assert priorities == {psutil.Process().nice()}, "workers do not give way to others"
    assert "ray::PrefillActor" in names
    assert "ray::GatewayActor" in names
    assert (shown["id"], shown["max_model_len"]) == (model.name, 512)
    assert completed["usage"]["completion_tokens"] == 7
    assert "ray::IDLE" not in names, "nothing runs that has nothing to do"
    assert answer.returncode == 0, answer.stderr
    assert "completion_tokens=5" in answer.stderr
    assert model.max_context_tokens == 512
    assert {"pagewire.v1.InferenceService", "grpc.health.v1.Health"} <= set(services)
    assert len(fitting.token_ids) == 12
    assert fitting.usage.bytes_moved > 0
    assert server.returncode == 1
    assert re.search(r"^error: Ray's raylet on this host has ended, ", errors, re.M)
    assert "Traceback" not in errors
    assert left == {}
    assert "a request may have 512 tokens, although the model could serve 8192" in lines[-2]
