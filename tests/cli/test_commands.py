import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from cli import commands, serving_commands
from cli.flags import add_command
from cluster.config import ClusterConfig
from cluster.config_file import load_config
from cluster.config_options import config_options
from cluster.demo_model import demo_model_dir
from cluster.errors import ConfigError
from decode_worker.config import DecodeConfig
from tests.support.command_line import run_main
from tests.support.rarely import rarely

GRACE = "a finite number, 0 to 2592000"
SERVE_FLAGS = """
    --config --controller-port --cpu-pages-mib --cpu-threads --decode --device
    --dtype --gpu-memory-fraction --help --host --http-port --insecure --log-format --log-level
    --model --model-paths --nccl-interface --network-interface --num-pages
    --page-size --page-transport --pool-resources --port --port-range --prefill --ray-address
    --secret-file --served-model-name --start-timeout-s --stop-grace-s
    --worker-metrics-ports --workers-per-gpu
"""
FLAGS = {
    "generate": """--address --authority-file --certificate-file --frequency-penalty --help
        --ignore-eos --json --key-file --max-tokens --min-p --min-tokens --model --presence-penalty
        --ray-address --repetition-penalty --seed --server-name --stop --temperature --timeout-s
        --tls --token-file --top-k --top-p""",
    "chat": """--address --authority-file --certificate-file --help --key-file --max-tokens --model
        --ray-address --seed --server-name --system --temperature --timeout-s --tls --token-file
        --top-k --top-p""",
    "status": """--address --authority-file --certificate-file --help --json --key-file --once
        --ray-address --server-name --tls --token-file --wide""",
    "top": """--address --authority-file --certificate-file --help --interval --key-file --once
        --ray-address --server-name --tls --token-file""",
    "down": "--config --grace-s --help --ray-address",
    "scale": "--config --decode --grace-s --help --pool --prefill --ray-address",
    "move": "--config --grace-s --help --ray-address --to",
    "drain": "--config --grace-s --help --here --ray-address",
    "restart": "--config --grace-s --help --ray-address",
    "doctor": "--config --help --host --json --model --port",
    "gateway": """--config --front-tls-certificate-file --front-tls-client-authority-file
        --front-tls-key-file --help --host --http-gateway-allow-hosts --http-gateway-allow-origins
        --http-gateway-body-timeout-s --http-gateway-comment-period-s --http-gateway-head-timeout-s
        --http-gateway-idle-timeout-s --http-gateway-max-body-mib --http-gateway-max-connections
        --http-gateway-max-head-bytes --http-gateway-max-prompts --http-gateway-request-timeout-s
        --http-gateway-resume-s --http-gateway-slow-client-timeout-s
        --http-gateway-stream-interval-s --insecure
        --log-format --log-level --network-interface --port --router
        --router-authority-file --router-certificate-file
        --router-key-file --router-server-name --router-tls --stop-grace-s --tracing-endpoint
        --tracing-sample-ratio""",
    "router": """--config --controller --decode-worker-local-prefill-max-tokens
        --decode-worker-max-running-sequences --front-tls-certificate-file
        --front-tls-client-authority-file --front-tls-key-file --help --host --insecure --keys
        --log-format --log-level --model --network-interface --port --port-range
        --router-coalesce-ms --router-connect-timeout-s
        --router-dead-after-s --router-decode-load-s --router-default-min-p
        --router-default-repetition-penalty --router-default-temperature --router-default-top-k
        --router-default-top-p --router-forget-dead-after-s --router-gpu-bytes-per-s
        --router-max-active-requests --router-max-backlog-s --router-max-connections
        --router-max-expected-wait-s --router-max-index-pages --router-max-prefill-candidates
        --router-max-prompt-chars --router-max-resumptions --router-metrics-port
        --router-new-work-weight --router-page-pressure-s
        --router-prefill-tokens-per-s
        --router-reconnect-delay-s --router-request-timeout-s --router-resume-wait-s
        --router-retry-delay-s --router-slow-client-timeout-s --router-speculative-ttl-s
        --router-stuck-after-s --router-tcp-bytes-per-s --router-tenants-file
        --router-worker-wait-s --share-port --stop-grace-s --tls-allow-plain-nccl
        --tls-authority-file --tls-certificate-file --tls-key-file --tls-server-name
        --tracing-endpoint --tracing-sample-ratio""",
    "router-keys": "--config --help --ray-address --secret-file",
    "version": "--help",
}


def flags_of(command):
    group = get_command(commands.app)
    context = group.make_context("pagewire", ["version"])
    parameters = group.get_command(context, command).get_params(context)
    return sorted(each for one in parameters for each in one.opts if each.startswith("--"))


def test_every_option_is_in_the_reference():
    page = (Path(commands.__file__).parents[1] / "docs" / "configuration.md").read_text("utf-8")

    assert [path for path in config_options() if f"`{path}`" not in page] == []


def pagewire(*arguments):
    command = [sys.executable, "-m", "cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_commands_are_a_decision():
    group = get_command(commands.app)
    names = group.list_commands(group.make_context("pagewire", ["version"]))

    assert sorted(names) == sorted([*FLAGS, "demo", "serve", "tokens", "up"])


@pytest.mark.parametrize("command", sorted(FLAGS))
def test_flags_are_a_decision(command):
    assert flags_of(command) == FLAGS[command].split()


@pytest.mark.parametrize("command", ["serve", "up", "demo"])
def test_every_option_is_a_flag(command):
    sections = (
        "--tls-",
        "--front-tls-",
        "--http-gateway-",
        "--router-",
        "--prefill-worker-",
        "--decode-worker-",
        "--tracing-",
        "--transfer-",
    )
    flags = flags_of(command)

    assert [each for each in flags if not each.startswith(sections)] == SERVE_FLAGS.split()
    assert {option.flag for option in config_options().values()} <= set(flags)


def test_a_mapping_has_an_entry_in_each_word():
    given = []
    app = typer.Typer()

    def command(config):
        given.append(config)

    add_command(app, command)
    words = ["--ray-address", "auto", "--model-paths", "a=/x=y", "--model-paths", "fd00::2=/z"]

    CliRunner().invoke(app, words, catch_exceptions=False)
    CliRunner().invoke(app, words[:2], catch_exceptions=False)
    with pytest.raises(ConfigError, match=r"^--model-paths: found 'a'; allowed: .* as a flag$"):
        CliRunner().invoke(app, [*words[:2], "--model-paths", "a"], catch_exceptions=False)

    assert [each.model_paths for each in given] == [{"a": "/x=y", "fd00::2": "/z"}, None]


@pytest.mark.parametrize(
    ("command", "num_gpus", "shown"),
    [
        ("serve", 0, {"--port": 50051, "--prefill": 1, "--prefill-worker-max-step-tokens": 256}),
        ("serve", 2, {"--device": "auto", "--prefill-worker-max-step-tokens": 2048}),
        ("demo", 0, {"--port": 0, "--prefill": 2, "--device": "cpu", "--num-pages": 0}),
        ("demo", 0, {"--http-port": 0}),
        ("serve", 0, {"--http-port": 8000}),
        ("gateway", 0, {"--host": "127.0.0.1", "--http-gateway-max-connections": 1000}),
        ("demo", 2, {"--workers-per-gpu": 2, "--device": "cuda", "--num-pages": 4096}),
    ],
)
def test_help_shows_the_defaults_of_the_command_on_this_host(monkeypatch, command, num_gpus, shown):
    for name in ("count_gpus", "most_gpus"):
        monkeypatch.setattr(serving_commands, name, lambda: num_gpus)

    words = " ".join(CliRunner().invoke(commands.app, [command, "--help"]).output.split())

    for flag, default in shown.items():
        assert re.search(rf" {flag} <.*?\(default: (.*?)\)", words)[1] == str(default)


def test_help_shows_all_flags_whole_in_80_columns_by_section():
    shown = CliRunner().invoke(commands.app, ["serve", "--help"], env={"COLUMNS": "80"}).output

    options = config_options().values()
    for option in options:
        assert re.search(rf"^  {option.flag}( |$|/)", shown, re.M), option.flag
    headings = [line[:-1] for line in shown.splitlines() if re.match(r"\w+:$", line)]
    assert headings == ["Options", *dict.fromkeys(each.section for each in options if each.section)]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (
            ["serve"],
            2,
            "error: model: found none; allowed: the path of a checkpoint folder or GGUF",
        ),
        (["generate", "x", "--address", "127.0.0.1:1"], 1, "127.0.0.1:1"),
        *rarely(
            (["serve", "--page-size", "3"], 2, "error: --page-size: found 3; allowed: 16, 32"),
            (
                ["demo", "--prefill", "0"],
                2,
                "prefill: found 0; allowed: 1 or more, because the demo",
            ),
            (["demo", "--device", "cuda"], 1, "device: found 'cuda'; allowed: 'cpu', because"),
            (
                ["serve", "--model", "/nowhere"],
                2,
                "model: found '/nowhere'; allowed: an existing folder",
            ),
            (
                ["serve", "--port", "abc"],
                2,
                "'--port': found 'abc'; allowed: an integer, 0 to 65535",
            ),
            (
                ["generate", "x", "--top-p", "2", "--top-k", "-1"],
                2,
                "error: --top-k: found -1; all",
            ),
            (["demo", "--host", "no.invalid"], 2, "host: found 'no.invalid'; allowed: a name or"),
        ),
    ],
)
def test_a_process_that_cannot_work_ends_with_words(arguments, exit_code, words):
    if "cuda" in arguments and serving_commands.count_gpus():
        pytest.skip("this host has GPUs")

    result = pagewire(*arguments)

    assert result.returncode == exit_code
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["serve", "--model="], 2, "error: --model: found ''; allowed: the path of"),
        (["demo", "--model="], 2, "error: --model: found ''; allowed: the path of"),
        (["doctor", "--model="], 2, "error: --model: found ''; allowed: the path of"),
        (["serve", "--prefil", "3"], 2, "--prefill"),
        (["doctor", "--port", "abc"], 2, "'--port': found 'abc'; allowed: an integer, 0 to 65535"),
        (["demo", "--transfer-post-s", "x"], 2, "found 'x'; allowed: a finite"),
        (["down", "--grace-s", "-1"], 2, f"'--grace-s': found '-1'; allowed: {GRACE}\n"),
        (["down", "--grace-s", "1e300"], 2, f"'--grace-s': found '1e300'; allowed: {GRACE}\n"),
        (["drain", "x", "--grace-s", "abc"], 2, f"'--grace-s': found 'abc'; allowed: {GRACE}\n"),
        (["scale", "--grace-s", "inf"], 2, f"'--grace-s': found 'inf'; allowed: {GRACE}\n"),
        (["up", "--model-paths", "foo"], 2, "error: --model-paths: found 'foo'; allowed: a mapp"),
        (["up", "--model-paths", "a=/x", "--model-paths", "b"], 2, "--model-paths: found 'b'; all"),
        (["scale", "--pool", "small"], 2, "error: --pool: found 'small'; allowed: a pool and the"),
        (["scale", "--decode", "2", "--pool", "decode=3"], 2, "decode=3', but decode is given twi"),
        (["scale"], 2, "error: --prefill, --decode, --pool: found none of them; allowed: at least"),
        (["top", "--interval", "x"], 2, "'--interval': found 'x'; allowed: a number\n"),
        (["generate", "x", "--top-k", "y"], 2, "found 'y' (str); allowed: an integer"),
        (["chat", "--top-p", "y"], 2, "found 'y' (str); allowed: a number, above 0"),
        (["chat", "--timeout-s", "y"], 2, "found 'y' (str); allowed: seconds, above"),
        (["generate", "x", "--timeout-s", "0"], 2, "error: --timeout-s: found 0.0; allowed: sec"),
        (["generate", "x", "--stop", ""], 2, "error: --stop: found 0 characters; allowed: 1"),
        (["generate", ""], 2, "error: prompt: found an empty text; allowed: at least one"),
        (["generate"], 2, "Missing argument 'prompt'.\n"),
        # As from a variable of the shell that is not set.
        (["down", "--config", ""], 2, "'--config': found ''; allowed: a path\n"),
        (["doctor", "--config="], 2, "'--config': found ''; allowed: a path\n"),
        (["status", "--token-file", ""], 2, "'--token-file': found ''; allowed: a path\n"),
        (["generate", "x", "--authority-file", ""], 2, "'--authority-file': found ''; allowed: a"),
        (["status", "--certificate-file="], 2, "'--certificate-file': found ''; allowed: a path"),
        (["gateway", "--router-authority-file", ""], 2, "'--router-authority-file': found ''; al"),
        (["router-keys", ""], 2, "'file': found ''; allowed: a path\n"),
        (["tokens", "new", "acme", "--out", ""], 2, "'--out': found ''; allowed: a path\n"),
        (["tokens", "new", "acme", "--out", "a", "--out", "b"], 2, "'--out': it is given twice\n"),
        (["status", "--address", ""], 2, "error: --address: found ''; allowed: host:port"),
        (["serve", "--port", "1", "--prefill", "2", "--port", "3"], 2, "given twice"),
        (["serve", "--insecure", "--no-insecure"], 2, "given twice"),
        (["generate", "x", "--temperature", "nan"], 2, "error: --temperature: found nan"),
        (["chat", "--max-tokens", "0"], 2, "error: --max-tokens: found 0; allowed: 1 to"),
        (["chat", "--address", "nonsense"], 2, "error: --address: found 'nonsense'"),
        (["status", "--address", "nonsense"], 2, "error: --address: found 'nonsense'"),
        (["status", "--once", "--address", "127.0.0.1:1"], 1, "127.0.0.1:1"),
        (["generate", "x", "--address", "127.0.0.1:1"], 1, "`pagewire serve` and `pagewire up`"),
    ],
)
def test_what_cannot_work_is_refused_with_words(arguments, exit_code, words):
    result = run_main(*arguments)

    assert result.returncode == exit_code
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_version_is_an_option_too():
    result = CliRunner().invoke(commands.app, ["--version"])

    assert (result.exit_code, result.output) == (0, f"pagewire {metadata.version('pagewire')}\n")


def test_help_tells_the_exit_codes():
    shown = CliRunner().invoke(commands.app, ["--help"]).output

    for line in commands.EXIT_CODES.splitlines()[1:]:
        assert f"\n  {line}\n" in shown, "a line of its own"
    assert "..." not in shown.replace("[ARGS]...", ""), "no summary is cut off"


def test_an_address_of_all_interfaces_comes_with_one_to_connect_to():
    config = ClusterConfig()
    assert serving_commands._where(config, "10.0.0.1:5") == "10.0.0.1:5"
    for host in ("0.0.0.0", "[::]"):
        address = serving_commands._where(config, f"{host}:5")
        assert address.startswith(f"{host}:5, for clients localhost:5 or ")


@pytest.mark.parametrize(
    ("device", "options", "remedy"),
    [
        ("cpu", {"cpu_pages_mib": 31}, "pagewire up --cpu-pages-mib 32"),
        ("cuda", {"num_pages": 9}, "pagewire up --num-pages 128"),
        (
            "cpu",
            {"cpu_pages_mib": 32, "pools.small.role": "decode", "pools.small.num_pages": 9},
            "more memory for pages in pools.small; the context takes 32.0 MiB",
        ),
        ("cuda", {}, "pagewire up --gpu-memory-fraction 0.95; the context takes 32 MiB"),
        ("cuda", {"gpu_memory_fraction": 0.95}, "GPUs that have 32 MiB for pages beside the"),
    ],
)
def test_a_context_that_the_pages_do_not_hold_is_noted_with_what_helps(device, options, remedy):
    # 8192 tokens of context; a page of 64 tokens takes 256 KiB in float32.
    config = load_config(None, {"model": demo_model_dir(), "dtype": "float32"} | options)

    note = serving_commands.context_note(config, device, 576, "up")

    said = "note: a request may have 576 tokens, although the model could serve 8192; more with "
    assert note.startswith(said + remedy)
    assert serving_commands.context_note(config, device, 8192, "up") == ""


def test_steps_on_cpus_are_short_and_longer_than_a_batch(monkeypatch):
    short = {
        "prefill_worker.max_step_tokens": 256,
        "decode_worker.step_budget_ms": 0.0,
        "decode_worker.max_step_tokens": 512,
    }

    def steps(most_gpus, **given):
        monkeypatch.setattr(serving_commands, "most_gpus", lambda: most_gpus)
        return serving_commands.serve_defaults(given)

    assert steps(0) == steps(4, device="cpu") == short
    for other in (steps(4), steps(None), steps(0, device="cuda"), steps(0, ray_address="auto")):
        assert other == {}
    given = {"decode_worker.max_running_sequences": 900}
    assert steps(0, **given).keys() == short.keys() - {"decode_worker.max_step_tokens"}
    DecodeConfig(max_step_tokens=short["decode_worker.max_step_tokens"])  # does not raise


def test_demo_uses_the_gpus_there_are(monkeypatch):
    def workers(num_gpus, **given):
        monkeypatch.setattr(serving_commands, "count_gpus", lambda: num_gpus)
        defaults = serving_commands.demo_defaults(given)
        assert (defaults["prefill"], defaults["decode"]) == (2, 2)
        assert ("router.default_temperature" in defaults) == ("model" not in given)
        return defaults["device"], defaults["workers_per_gpu"]

    assert workers(0) == ("cpu", 1)
    assert workers(1) == ("cuda", 4)  # both pools share it
    assert workers(2) == ("cuda", 2)
    assert workers(3) == ("cuda", 2)
    assert workers(4) == ("cuda", 1)
    assert workers(8) == ("cuda", 1)
    assert workers(8, device="cpu") == ("cpu", 1)


@pytest.mark.parametrize(
    ("words", "found"), [([], "none of them"), (["decode-1", "--here"], "'decode-1' and --here")]
)
def test_a_drain_is_of_one_worker_or_of_this_host(words, found):
    with pytest.raises(ConfigError, match=f"WORKER, --here: found {found}; allowed: one of them"):
        get_command(commands.app)(["drain", *words], standalone_mode=False)
