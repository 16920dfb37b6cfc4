import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from pagewire.protos import common_pb2
from tests.pagewire.scripted_service import abort, response, retry_after, serving_in_thread, usage

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name, *arguments, text=""):
    result = example(name, *arguments, text=text)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def example(name, *arguments, text=""):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=30,
        env={"PYTHONPATH": str(EXAMPLES.parent)},
    )


def test_shared_prefix_accounts_for_each_question(tmp_path):
    async def script(request, context):
        finish = common_pb2.FINISH_REASON_LENGTH
        yield response("42", [1], finish_reason=finish, usage=usage())

    (tmp_path / "document").write_text("text")
    with serving_in_thread(script) as (address, service):
        out = run_example("shared_prefix.py", str(tmp_path / "document"), "--address", address)

    assert out.count("42\n[40 prompt tokens, 32 of them cached, 3 pages moved") == 3
    assert all(request.text.startswith("text\n\nQ: ") for request in service.requests)


def test_many_prompts_tries_again_what_was_refused_and_keeps_the_order():
    refused = []

    async def script(request, context):
        if request.text not in refused:
            refused.append(request.text)
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            await abort(context, code, "full", retry_after(seconds=0.05))
        yield response(request.text.upper(), [1])

    with serving_in_thread(script) as (address, service):
        out = run_example("many_prompts.py", "--address", address, text="a\nb\n\nc\n")

    assert out == "a → A\nb → B\nc → C\n"
    assert len(service.requests) == 6


@pytest.mark.parametrize(
    ("name", "arguments"), [("many_prompts.py", []), ("shared_prefix.py", [__file__])]
)
def test_an_error_is_one_line(name, arguments):
    async def script(request, context):
        await abort(context, grpc.StatusCode.INTERNAL, "a bug")
        yield

    with serving_in_thread(script) as (address, _):
        result = example(name, *arguments, "--address", address, text="a\nb\n")

    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_where_nobody_serves_the_error_says_so():
    result = example("shared_prefix.py", __file__, "--address", "localhost:1")

    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("error: no connection to localhost:1: ")
