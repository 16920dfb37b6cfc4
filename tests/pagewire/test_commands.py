"""The command line of a client: what it has, and what it says of the rest."""

import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from cli import commands as all_commands
from cluster.config import ClusterConfig
from options.option import options_of
from pagewire.cli import commands
from pagewire.cli.__main__ import SERVER
from tests.pagewire.scripted_service import serving_in_thread

OWN = {
    "chat": """--address --authority-file --certificate-file --help --key-file --max-tokens --model
        --seed --server-name --system --temperature --timeout-s --tls --token-file --top-k
        --top-p""",
    "generate": """--address --authority-file --certificate-file --frequency-penalty --help
        --ignore-eos --json --key-file --max-tokens --min-p --min-tokens --model --presence-penalty
        --repetition-penalty --seed --server-name --stop --temperature --timeout-s --tls
        --token-file --top-k --top-p""",
    "status": """--address --authority-file --certificate-file --help --json --key-file --once
        --server-name --tls --token-file --wide""",
    "top": """--address --authority-file --certificate-file --help --interval --key-file --once
        --server-name --tls --token-file""",
    "version": "--help",
}


def commands_of(app):
    group = get_command(app)
    context = group.make_context("pagewire", ["version"])
    return {name: group.get_command(context, name) for name in group.list_commands(context)}


def test_commands_and_flags_of_a_client_are_a_decision():
    found = commands_of(commands.app)

    assert sorted(found) == sorted(OWN)
    for name, command in found.items():
        parameters = command.get_params(command.make_context(name, [], resilient_parsing=True))
        flags = [each for one in parameters for each in one.opts if each.startswith("--")]
        assert sorted(flags) == OWN[name].split()


def test_the_others_are_those_of_the_server():
    rest = set(commands_of(all_commands.app)) - set(OWN)

    assert sorted(rest) == list(commands.SERVER_COMMANDS)


@pytest.mark.parametrize("command", commands.SERVER_COMMANDS)
def test_a_command_of_the_server_says_in_one_line_how_to_get_it(command):
    result = CliRunner().invoke(commands.app, [command, "--model", "x"])

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: `pagewire {command}` needs the server: {commands.INSTALL_SERVER}\n"
    )


def test_a_slip_is_not_taken_for_the_server():
    result = CliRunner().invoke(commands.app, ["sreve"])

    assert result.exit_code == 2
    assert "No such command 'sreve'" in result.stderr


def test_the_help_tells_of_the_server_and_of_exit_codes():
    output = CliRunner().invoke(commands.app, ["--help"]).output

    shown = " ".join(output.split())
    assert f"serve, tokens, up need the server: {commands.INSTALL_SERVER}." in shown
    for line in commands.EXIT_CODES.splitlines()[1:]:
        assert f"\n  {line}\n" in output, "a line of its own"
    assert "..." not in output.replace("[ARGS]...", ""), "no summary is cut off"


def test_a_router_that_is_not_there_is_told_in_two_lines():
    code = "from pagewire.cli.commands import main; main()"
    command = [sys.executable, "-c", code, "status", "--once", "--address", "127.0.0.1:1"]

    result = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert result.returncode == 1
    error, remedy = result.stderr.splitlines()
    assert error == "error: no connection to 127.0.0.1:1: Connection refused"
    assert remedy == "No router answers there; name another one by --address."


def test_whoever_names_the_http_gateway_is_told_the_port_of_the_router():
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as gateway:
        serving = threading.Thread(target=gateway.serve_forever)
        serving.start()
        address = f"127.0.0.1:{gateway.server_port}"
        code = "from pagewire.cli.commands import main; main()"
        command = [sys.executable, "-c", code, "status", "--once", "--address", address]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        finally:
            gateway.shutdown()
            serving.join(10)

    assert result.returncode == 1
    error, remedy = result.stderr.splitlines()
    told = f"error: something answers at {address}, but it is not a Pagewire router"
    assert error.startswith(told)
    assert remedy == commands.OTHER_REMEDY
    ports = {options_of(ClusterConfig)[name].default for name in ("port", "http_port")}
    assert ports == set(map(int, re.findall(r"\b\d+\b", remedy)))


def test_the_command_of_the_server_replaces_that_of_the_client(tmp_path):
    # As an installed distribution names it.
    installed = tmp_path / "other_server-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: other-server\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[{SERVER}]\nserver = builtins:print\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['pagewire'];"
    code += "from pagewire.cli import __main__ as own; assert own._command_line() is print"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_interrupt_while_modules_are_imported_ends_it_in_silence():
    code = """
import importlib.abc, os, signal, sys
from pagewire.cli.__main__ import main

class Interrupter(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "grpc":
            os.kill(os.getpid(), signal.SIGINT)

assert "grpc" not in sys.modules
sys.meta_path.insert(0, Interrupter())
main()
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )

    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_the_client_alone_answers():
    async def script(request, context):
        yield None

    with serving_in_thread(script) as (address, _):
        result = CliRunner().invoke(commands.app, ["status", "--once", "--address", address])

    assert result.exit_code == 0
    assert "decode-0" in result.output


@pytest.mark.parametrize("module", ["pagewire", "pagewire.cli.__main__"])
@pytest.mark.parametrize("own", [{}, {"GRPC_VERBOSITY": "DEBUG"}])
def test_grpc_is_told_to_be_quiet_before_it_is_imported(own, module):
    code = f"""import os, sys
import {module}
print(os.environ["GRPC_VERBOSITY"], "grpc" in sys.modules)"""
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"}

    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | own,
        capture_output=True,
        text=True,
        check=True,
    )

    assert result.stdout.split() == [own.get("GRPC_VERBOSITY", "ERROR"), "False"]
