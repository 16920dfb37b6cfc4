"""What a strict type checker says about a user's program."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import asyncio
from collections.abc import Mapping

from pagewire import AsyncClient, Client, Completion, Delta, Message, OverloadedError
from pagewire import PagewireError, SamplingOptions, Usage

OPTIONS: SamplingOptions = {"temperature": 0.7, "stop": "END", "seed": None}


def use(client: Client, history: list[Mapping[str, str]], ids: list[int]) -> str | None:
    completion: Completion = client.generate(
        "x", model="m", timeout_s=3, temperature=0, top_p=0.9, top_k=3, min_p=0.1,
        repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, seed=1, max_tokens=4,
        min_tokens=1, stop=["a"], stop_token_ids=(1, 2), ignore_eos=True, n=2, logprobs=1,
    )
    client.chat([{"role": "user", "content": "hi"}, Message(role="user", content="x")], **OPTIONS)
    client.chat(history, n=2, logprobs=0, ignore_eos=False, stop_token_ids=range(3))
    with client.stream(ids, stop="x", min_tokens=2, presence_penalty=1) as stream:
        for delta in stream:
            top: float = delta.logprobs[0].top[0][1]
            same: Delta = delta
    usage: Usage | None = stream.completion.usage
    return completion.choices[0].finish_reason


async def use_async(history: list[Message]) -> float | None:
    try:
        async with AsyncClient("h:1", default_timeout_s=5) as client:
            async with client.stream_chat(history, frequency_penalty=0.5, n=1) as stream:
                first: Delta = await anext(stream)
                async for delta in stream:
                    text: str = delta.text
    except OverloadedError as error:
        return error.retry_after_s
    except PagewireError as error:
        code: str = error.code
    return None


asyncio.run(use_async([]))
"""

MISTAKES = [
    ("temprature=1.0", "temprature"),
    ('n="2"', '"n"'),
    ("stop=5", '"stop"'),
    ("ignore_eos=2", '"ignore_eos"'),
    ("logprobs=1.5", '"logprobs"'),
    ("timeout_s=[1]", '"timeout_s"'),
    ("model=None", '"model"'),
]

WRONG_PROMPTS = ["generate(5)", 'chat("hello")', "chat([5])", "tokenize([1])"]


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """Return what mypy says of programs; the runs share what it knows of libraries."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"]
    command += ["--follow-imports=silent", "--cache-dir", str(tmp_path_factory.mktemp("cache"))]

    def run(*paths):
        result = subprocess.run(
            [*command, *map(str, paths)], cwd=ROOT, capture_output=True, text=True, timeout=100
        )
        return result.stdout.splitlines()

    return run


def test_correct_programs_pass(tmp_path, check):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    assert check(program, *(ROOT / "examples").glob("*.py")) == []


def test_mistakes_are_found(tmp_path, check):
    program = tmp_path / "mistakes.py"
    calls = [
        f"client.{method}({given}, {mistake})"
        for mistake, _ in MISTAKES
        for method, given in (("generate", '"x"'), ("stream", "[1]"), ("chat", "[]"))
    ]
    program.write_text("\n".join(["from pagewire import Client", "client = Client()", *calls]))

    errors = [line for line in check(program) if ": error: " in line]

    found = {int(line.split(":")[1]) for line in errors}
    assert found == set(range(3, 3 + len(calls)))
    for number, (_, name) in enumerate(MISTAKES):
        assert name in next(line for line in errors if f":{3 + 3 * number}:" in line)


def test_wrong_prompts_are_found(tmp_path, check):
    program = tmp_path / "prompts.py"
    calls = [f"Client().{call}" for call in WRONG_PROMPTS]
    program.write_text("\n".join(["from pagewire import Client", *calls]))

    errors = [line for line in check(program) if "arg-type" in line or "list-item" in line]

    assert {int(line.split(":")[1]) for line in errors} == set(range(2, 2 + len(calls)))
