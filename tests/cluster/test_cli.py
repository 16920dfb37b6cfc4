import subprocess
import sys

import pytest
from typer.main import get_command

from cluster import cli
from cluster.config import config_options
from cluster.demo import QUESTIONS, Wave, check_waves
from cluster.errors import DemoError
from pagewire import Choice, Completion, Usage

SERVE_FLAGS = """
    --config --cpu-pages-mib --cpu-threads --decode --deterministic --device --dtype
    --gpu-memory-fraction --help --host --log-format --log-level --model --num-pages --page-size
    --port --prefill --ray-address --served-model-name --start-timeout-s --stop-grace-s
"""
FLAGS = {
    "generate": """--address --help --json --max-tokens --model --seed --stop --temperature
        --timeout-s --top-k --top-p""",
    "chat": """--address --help --max-tokens --model --seed --system --temperature --timeout-s
        --top-k --top-p""",
    "status": "--address --help --json --once --wide",
    "doctor": "--help --host --json --model --port",
    "version": "--help",
}


def flags_of(command):
    group = get_command(cli.app)
    parameters = group.commands[command].get_params(group.make_context("pagewire", ["version"]))
    return sorted(each for one in parameters for each in one.opts if each.startswith("--"))


def pagewire(*arguments):
    command = [sys.executable, "-m", "cluster.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_commands_are_a_decision():
    assert sorted(get_command(cli.app).commands) == sorted([*FLAGS, "demo", "serve"])


@pytest.mark.parametrize("command", sorted(FLAGS))
def test_flags_are_a_decision(command):
    assert flags_of(command) == FLAGS[command].split()


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_every_option_is_a_flag(command):
    sections = ("--router-", "--prefill-worker-", "--decode-worker-", "--transfer-")
    flags = flags_of(command)

    assert [each for each in flags if not each.startswith(sections)] == SERVE_FLAGS.split()
    assert {option.flag for option in config_options().values()} <= set(flags)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["serve"], 2, "model is not set"),
        (["serve", "--model", "/nowhere"], 2, "model is /nowhere; it must be an existing folder"),
        (["serve", "--page-size", "3"], 2, "command line: page_size is 3"),
        (["serve", "--prefil", "3"], 2, "--prefill"),
        (["demo", "--device", "cuda"], 1, "need 4 GPUs, and there are 0"),
        (["generate", "x", "--address", "127.0.0.1:1"], 1, "127.0.0.1:1"),
        (["status", "--once", "--address", "127.0.0.1:1"], 1, "127.0.0.1:1"),
    ],
)
def test_what_cannot_work_is_refused_with_words(arguments, exit_code, words):
    if "cuda" in arguments and cli.count_gpus():
        pytest.skip("this host has GPUs")

    result = pagewire(*arguments)

    assert result.returncode == exit_code
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_demo_uses_the_gpus_there_are(monkeypatch):
    def workers(num_gpus, **given):
        monkeypatch.setattr(cli, "count_gpus", lambda: num_gpus)
        defaults = cli.demo_defaults(given)
        return defaults["device"], defaults["prefill"], defaults["decode"]

    assert workers(0) == ("cpu", 2, 2)
    assert workers(1) == ("cpu", 2, 2)
    assert workers(2) == ("cuda", 1, 1)
    assert workers(3) == ("cuda", 2, 1)
    assert workers(4) == ("cuda", 2, 2)
    assert workers(8) == ("cuda", 2, 2)
    assert workers(8, device="cpu") == ("cpu", 2, 2)


def wave(title="wave", **changes):
    counts = dict.fromkeys(Usage.__dataclass_fields__, 0)
    counts |= {"decode_workers": (), "pages_moved": 5, "bytes_moved": 500, **changes}
    choice = Choice(text="x", token_ids=(1,), logprobs=(), finish_reason="length", stopped_by=None)
    completion = Completion(request_id="r", choices=(choice,), usage=Usage(**counts))
    return Wave(title=title, completions=(completion,) * len(QUESTIONS))


def test_demo_accepts_a_disaggregated_cluster():
    check_waves(wave(), wave(pages_moved=1))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (wave(bytes_moved=0), wave(pages_moved=1), "no byte moved"),
        (wave(decode_computed_tokens=2), wave(pages_moved=1), "decode workers computed 16"),
        (wave(), wave(pages_moved=1, decode_computed_tokens=1), "decode workers computed 8"),
        (wave(), wave(pages_moved=5), "not fewer"),
        (wave(), Wave(title="second", completions=()), "0 of 8 answers"),
    ],
)
def test_demo_refuses_a_cluster_that_only_looks_right(first, second, words):
    with pytest.raises(DemoError, match=words):
        check_waves(first, second)
