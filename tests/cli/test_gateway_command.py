"""pagewire gateway as a process of its own."""

import json
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request

import pytest
from typer.testing import CliRunner

from cli import commands
from credentials.door import front_door
from tests.http_gateway.raw_http import exchange, request
from tests.observability.trace_collector import collecting
from tests.pagewire.scripted_service import hello, serving_in_thread
from tests.support.certificates import Authority
from tests.support.command_line import run_main
from tests.support.rarely import rarely


def lower_file_limit():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))


def start(*arguments, before=None):
    command = [sys.executable, "-m", "cli", "gateway", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=before
    )
    line = process.stdout.readline()
    found = re.fullmatch(
        r"ready: HTTP on (https?://\S+)/v1, chat page at \1/, for the router at (\S+)\n", line
    )
    assert found, line + process.communicate(timeout=10)[1]
    return process, found[1]


def ask(url, context=None, **body):
    data = json.dumps({"prompt": "x", **body}).encode()
    asked = urllib.request.Request(
        f"{url}/v1/completions", data, {"content-type": "application/json"}
    )
    return json.load(urllib.request.urlopen(asked, timeout=10, context=context))


@pytest.mark.parametrize("number", [signal.SIGINT, *rarely(signal.SIGTERM)])
def test_it_serves_until_a_signal_and_ends_well(number):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving_in_thread(hello) as (router, _):
        process, url = start("--router", router, "--port", "0", before=lower_file_limit)
        try:
            assert ask(url)["choices"][0]["text"] == "Hello"
            limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        finally:
            process.send_signal(number)
            output, errors = process.communicate(timeout=20)

    assert process.returncode == 0, errors
    assert output.splitlines()[-1] == "stopped"
    assert "Traceback" not in errors
    assert "http_request" in errors
    assert limits == (hard, hard), "it may open as many files as the system allows"


def test_a_port_that_is_taken_after_it_was_looked_at_is_told_in_a_line(monkeypatch):
    monkeypatch.setattr("cli.gateway_command.check_port_free", lambda host, port: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused = run_main("gateway", "--port", str(port))

    assert refused.returncode == 1
    assert refused.stderr == f"error: cannot listen on port {port} of 127.0.0.1\n"


def test_it_is_ready_only_once_a_router_answers_that_has_a_worker():
    with serving_in_thread(hello) as (router, service):
        service.is_away, service.has_worker = True, False
        command = [sys.executable, "-m", "cli", "gateway", "--router", router, "--port", "0"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            waiting = process.stdout.readline()
            listening = process.stderr.readline()
            host, _, port = listening.partition("address=")[2].strip().rpartition(":")
            answers = {
                path: exchange((host, int(port)), request(path, method="GET")).status
                for path in ("/health", "/ready", "/metrics")
            }
            service.is_away = False
            idle = process.stdout.readline()
            service.has_worker = True
            ready = process.stdout.readline()
            after = exchange((host, int(port)), request("/ready", method="GET")).status
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=20)

    assert waiting == f"waiting for the router at {router}: away\n"
    assert idle == f"waiting for the router at {router}: no decode worker takes requests\n"
    assert answers == {"/health": 200, "/ready": 503, "/metrics": 503}
    assert ready == (
        f"ready: HTTP on http://{host}:{port}/v1, chat page at http://{host}:{port}/, "
        f"for the router at {router}\n"
    )
    assert after == 200
    assert "router_lost" not in errors, "there was nothing to lose"


def test_options_of_the_section_are_its_flags():
    with serving_in_thread(hello) as (router, _):
        options = ("--log-level", "error", "--http-gateway-max-prompts", "2")
        process, url = start("--router", router, "--port", "0", *options)
        try:
            with pytest.raises(urllib.error.HTTPError, match="400") as refused:
                ask(url, prompt=["a", "b", "c"])
            assert json.load(refused.value)["error"]["message"].endswith("allowed: at most 2")
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=20)

    assert (process.returncode, errors) == (0, "")


def test_a_separate_gateway_sends_its_spans_and_the_last_ones_as_it_stops():
    with serving_in_thread(hello) as (router, service), collecting() as (endpoint, requests):
        process, url = start("--router", router, "--port", "0", "--tracing-endpoint", endpoint)
        try:
            ask(url)
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=20)

    assert process.returncode == 0, errors
    [(_, sent)] = requests
    [resource] = sent.resource_spans
    told = {each.key: each.value.string_value for each in resource.resource.attributes}
    [span] = resource.scope_spans[0].spans
    assert told["service.name"] == "pagewire-gateway"
    assert told["service.instance.id"] == f"gateway-{socket.gethostname()}-{process.pid}"
    assert span.name == "POST /v1/completions"
    above = f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"
    assert [each.traceparent for each in service.requests] == [above]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--router", "nowhere"], "error: --router: found 'nowhere'; allowed: host:port"),
        (["--port", "99999"], "'--port': found '99999'; allowed: an integer, 0 to 65535"),
        (["--port", "x"], "'--port': found 'x'; allowed: an integer"),
        (
            ["--host", "no.invalid", "--port", "0"],
            "host: found 'no.invalid'; allowed: a name or an",
        ),
        (
            ["--http-gateway-max-connections", "0"],
            "--http-gateway-max-connections: found 0; allowed",
        ),
        (
            ["--http-gateway-allow-origins", "x"],
            "--http-gateway-allow-origins: found 'x'; allowed: origins",
        ),
        (["--prefill", "2"], "No such option: --prefill"),
        (["--address", "h:1"], "No such option: --address (Possible options: --router)"),
    ],
)
def test_wrong_options_end_it_with_words(arguments, words):
    result = run_main("gateway", *arguments)

    assert result.returncode == 2
    assert words in result.stderr


def test_traces_without_what_sends_them_are_refused_with_words(monkeypatch):
    monkeypatch.setattr("observability.tracing._MODULES", ("no_such_package.sdk",))
    endpoint = ("--tracing-endpoint", "http://collector:4318/v1/traces")

    refused = run_main("gateway", "--port", "0", *endpoint)

    assert refused.returncode == 2
    assert "pip install . './server[traces]'" in refused.stderr


def test_a_port_in_use_ends_it_with_what_helps():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])

        result = run_main("gateway", "--port", port)

    assert result.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use by process " in result.stderr
    assert "); choose another with --port" in result.stderr


def test_its_port_is_not_that_of_a_router_in_the_help():
    words = " ".join(CliRunner().invoke(commands.app, ["gateway", "--help"]).output.split())

    assert "Port for clients; 0: a free port. [default: 8000" in words


def test_it_connects_and_serves_over_tls(tmp_path):
    authority = Authority(tmp_path)
    door = front_door(authority.settings())
    certificate, key = authority.pair("127.0.0.1")
    flags = (
        *("--front-tls-certificate-file", certificate, "--front-tls-key-file", key),
        *("--router-authority-file", authority.file, "--port", "0"),
    )
    with serving_in_thread(hello, door) as (router, _):
        process, url = start("--router", router, *flags)
        try:
            context = ssl.create_default_context(cafile=authority.file)
            answer = ask(url, context)
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=20)

    assert url.startswith("https://")
    assert answer["choices"][0]["text"] == "Hello"
    assert "PRIVATE KEY" not in errors


@pytest.mark.parametrize("trusts", [False, True], ids=["in clear", "another authority"])
def test_a_router_to_which_it_cannot_connect_is_told_by_its_own_flags(tmp_path, trusts):
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    flags = ("--router-authority-file", other.file) if trusts else ()
    with serving_in_thread(hello, front_door(authority.settings())) as (router, _):
        command = [sys.executable, "-m", "cli", "gateway", "--router", router, "--port", "0"]
        process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True)
        said = process.stdout.readline()
        process.terminate()
        process.communicate(timeout=20)

    remedy = (
        "see tls.authority_file for the authority to trust (--router-authority-file)\n"
        if trusts
        else "in clear; use tls=Tls() (--router-tls)\n"
    )
    assert said.endswith(remedy)


@pytest.mark.parametrize("knows", ["nobody", "certificates", *rarely("whoever connects")])
def test_where_other_hosts_can_connect_it_must_know_its_clients(tmp_path, knows):
    authority = Authority(tmp_path)
    certificate, key = authority.pair("localhost")
    flags = (
        *("--front-tls-certificate-file", certificate, "--front-tls-key-file", key),
        *("--host", "0.0.0.0", "--port", "0"),
        *(("--insecure",) if knows == "whoever connects" else ()),
        *(("--front-tls-client-authority-file", authority.file) if knows == "certificates" else ()),
    )
    with serving_in_thread(hello) as (router, service):
        service.is_away = True
        command = [sys.executable, "-m", "cli", "gateway", "--router", router, *flags]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        process.stdout.readline()  # it is away
        service.is_away = False
        said = process.stdout.readline()
        process.terminate()
        output, errors = process.communicate(timeout=20)

    assert (process.returncode, output.splitlines()[-1]) == (0, "stopped"), errors
    assert "Traceback" not in errors
    if knows == "nobody":  # so it waits still
        told = f"router.tenants_file: the router at {router} has none; allowed: a tenants file, or "
        assert said.startswith(f"waiting for the router at {router}: {told}"), errors
    else:
        assert said.startswith("ready: HTTP on https://localhost:"), errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "error: front_tls.certificate_file: found none; allowed: a certi"),
        (["--front-tls-key-file", "k"], "error: front_tls.certificate_file: found none; allowed"),
        (["--router-key-file", "k"], "error: --router-certificate-file: found none; allowed: a f"),
        (["--router-authority-file", "/nowhere"], "--router-authority-file: /nowhere cannot be re"),
    ],
)
def test_what_is_wrong_with_tls_ends_it_with_one_line(arguments, words):
    result = run_main("gateway", "--port", "0", *arguments)

    assert result.returncode == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_file_with_tls_of_the_cluster_does_not_let_it_reach_other_hosts_in_clear(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("tls: {certificate_file: c, key_file: k, authority_file: a}")
    asked = ("gateway", "--config", str(file), "--port", "0")

    refused = run_main(*asked, "--router", "192.0.2.1:50051", "--router", "localhost:50051")

    assert refused.returncode == 2
    assert refused.stderr == (
        "error: tls.certificate_file: found a file, which encrypts no connection of a gateway, and "
        "no flag that encrypts those to 192.0.2.1:50051; allowed: "
        "--router-authority-file, --router-tls for a public authority, or insecure\n"
    )


def test_a_file_with_tls_of_the_cluster_serves_a_router_of_the_same_host(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("tls: {certificate_file: c, key_file: k, authority_file: a}")
    with serving_in_thread(hello) as (router, _):
        process, url = start("--router", router, "--port", "0", "--config", str(file))
        try:
            assert ask(url)["choices"][0]["text"] == "Hello"
        finally:
            process.terminate()
            process.communicate(timeout=20)
