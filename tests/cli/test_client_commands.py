"""The commands as a user meets them, against a scripted router: processes, where that matters."""

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import threading
import time
from contextlib import contextmanager

import grpc
import pytest
from google.rpc import error_details_pb2

from pagewire.protos import common_pb2
from tests.cli.client_commands import COMMANDS, PAGEWIRE
from tests.pagewire.scripted_service import (
    ScriptedService,
    abort,
    answer,
    response,
    retry_after,
    serving_in_thread,
    usage,
    violation,
)
from tests.support.command_line import run_main
from tests.support.rarely import rarely
from tests.support.waiting import wait_until
from tests.support.wall_clock import assert_within

WAIT_S = 30
ERASED_LINE = "\x1b[1A\x1b[2K"  # that above, by rich at the end of what it showed there


async def endless(request, context):
    while True:
        yield response("word " * 100, [1])
        await asyncio.sleep(0.001)


async def refuse_two(request, context):
    if request.chat.messages[-1].content == "two":
        await abort(context, grpc.StatusCode.UNAVAILABLE, "no worker is left")
    async for each in answer(request, context):
        yield each


async def break_off(request, context):
    yield response("half of", [1])
    await abort(context, grpc.StatusCode.UNAVAILABLE, "no worker is left")


def pagewire(*arguments, text="", stdout=subprocess.PIPE, **variables):
    return subprocess.run(
        [*PAGEWIRE, *arguments],
        input=text,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=WAIT_S,
        env=os.environ | variables,
    )


@contextmanager
def running(*arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE):
    process = subprocess.Popen(
        [*PAGEWIRE, *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_generate_prints_the_text_and_accounts_for_it_apart():
    with serving_in_thread(answer) as (address, service):
        options = ["--address", address, "--stop", "x", "--ignore-eos", "--min-p", "0.5"]
        options += ["--repetition-penalty", "1.5", "--presence-penalty", "-1"]
        options += ["--frequency-penalty", "2", "--min-tokens", "3"]
        result = pagewire("generate", "-", *options, text="hello")

    assert (result.returncode, result.stdout) == (0, "echo hello\n")
    assert "pages_moved=3" in result.stderr
    sampling = service.requests[0].sampling
    assert list(sampling.stop) == ["x"]
    assert sampling.ignore_eos
    assert (sampling.min_p, sampling.repetition_penalty, sampling.min_tokens) == (0.5, 1.5, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 2)
    assert not sampling.HasField("temperature")


@pytest.mark.parametrize(
    ("command", "text", "offset", "answered"),
    [
        (("generate", "-"), b"caf\xe9", 3, b""),
        (("chat",), "größe\n".encode() + b"caf\xe9\n", 11, "echo größe\n".encode()),
        *rarely((("chat",), b"caf\xe9\n", 3, b"")),
    ],
)
@pytest.mark.parametrize("errors", ["strict", *rarely("surrogateescape")])  # as locales have it
def test_input_that_is_not_utf8_is_refused_before_it_is_sent(
    command, text, offset, answered, errors
):
    with serving_in_thread(answer) as (address, service):
        result = subprocess.run(
            [*PAGEWIRE, *command, "--address", address],
            input=text,
            capture_output=True,
            timeout=WAIT_S,
            env=os.environ | {"PYTHONIOENCODING": f"utf-8:{errors}"},
        )

    assert (result.returncode, result.stdout) == (2, answered)
    assert result.stderr.decode() == (
        f"error: standard input: found byte 0xe9 at offset {offset}; allowed: text in UTF-8\n"
    )
    assert "caf" not in str(service.requests)


@pytest.mark.parametrize(
    ("command", "shown"),
    [(("generate", "x"), "half of\n"), (("chat",), "half of\n"), (("generate", "x", "--json"), "")],
)
def test_an_error_after_a_part_of_the_answer_has_a_line_of_its_own(command, shown):
    with serving_in_thread(break_off) as (address, _):
        result = run_main(*command, "--address", address, text="x\n")

    assert (result.returncode, result.stdout) == (1, shown)
    assert result.stderr == "error: no worker is left\n"


def chat_on_a_terminal(address, typed, stderr=subprocess.PIPE):
    near, far = pty.openpty()
    with running("chat", "--address", address, stdin=far, stderr=stderr) as process:
        os.write(near, typed)
        shown, errors = process.communicate(timeout=WAIT_S)
    os.close(near)
    os.close(far)
    return subprocess.CompletedProcess("chat", process.returncode, shown, errors)


def test_chat_on_a_terminal_has_an_error_on_a_line_of_its_own():
    with serving_in_thread(break_off) as (address, _):
        result = chat_on_a_terminal(address, b"one\n\n", stderr=subprocess.STDOUT)

    assert (result.returncode, result.stdout) == (
        0,
        "> half of\nerror: no worker is left\n> ",
    )


def test_generate_prints_json_with_what_the_client_derives():
    with serving_in_thread(answer) as (address, _):
        result = run_main("generate", "hello", "--address", address, "--json")

    assert (result.returncode, result.stderr) == (0, "")
    content = json.loads(result.stdout)
    assert (content["text"], content["finish_reason"]) == ("echo hello", "stop")
    assert content["choices"][0]["token_ids"] == [1, 2]
    counts = {"prompt_tokens": 40, "cached_tokens": 32, "completion_tokens": 2, "pages_moved": 3}
    assert counts.items() <= content["usage"].items()


def test_the_account_tells_of_faults_only_where_there_were_some():
    async def after_faults(request, context):
        account = usage()
        account.stats.prefill_retries, account.stats.resumptions = 1, 2
        stop = common_pb2.FINISH_REASON_STOP
        yield response("echo", [1], finish_reason=stop, usage=account)

    with serving_in_thread(answer) as (address, _):
        smooth = run_main("generate", "hello", "--address", address)
    with serving_in_thread(after_faults) as (address, _):
        broken = run_main("generate", "hello", "--address", address)

    assert smooth.stderr.endswith(" tpot_ms=0.0\n")
    assert broken.stderr.endswith(" tpot_ms=0.0 prefill_retries=1 resumptions=2\n")


def test_a_full_context_is_noted_where_it_ended_the_answer():
    async def until_full(request, context):
        length = common_pb2.FINISH_REASON_LENGTH
        yield response("echo", [1, 2], finish_reason=length, usage=usage())

    with serving_in_thread(until_full) as (address, _):
        cut, whole = (
            run_main("generate", "hello", "--address", address, "--max-tokens", limit)
            for limit in ("3", "2")
        )

    said = "note: the context of 42 tokens, prompt included, was full before --max-tokens 3\n"
    assert cut.stderr.endswith(f" tpot_ms=0.0\n{said}")
    assert whole.stderr.endswith(" tpot_ms=0.0\n")


def test_chat_remembers_what_was_said_and_ends_with_its_input():
    with serving_in_thread(answer) as (address, service):
        result = run_main("chat", "--address", address, "--system", "brief", text="one\n\ntwo\n")

    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "echo one\necho two\n"
    probe, _, second = service.requests
    assert [each.content for each in probe.chat.messages] == ["brief", "?"]
    assert [each.content for each in second.chat.messages] == ["brief", "one", "echo one", "two"]


def test_chat_on_a_terminal_goes_on_after_an_error_without_its_question():
    with serving_in_thread(refuse_two) as (address, service):
        result = chat_on_a_terminal(address, b"one\ntwo\nthree\n\n")

    assert (result.returncode, result.stderr) == (0, "error: no worker is left\n")
    assert result.stdout == "> echo one\n> > echo three\n> "
    last = service.requests[-1].chat.messages
    assert [each.content for each in last] == ["one", "echo one", "three"]


def test_an_error_ends_a_chat_whose_questions_come_from_a_pipe():
    with serving_in_thread(refuse_two) as (address, _):
        result = run_main("chat", "--address", address, text="one\ntwo\nthree\n")

    assert (result.returncode, result.stdout) == (1, "echo one\n")
    assert result.stderr == "error: no worker is left\n"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("generate", "x"), "Gr??e ? ?\n"),
        (("status", "--once"), "decode-0"),
        *rarely((("generate", "x", "--json"), '"text": "Gr??e ? ?"'), (("chat",), "Gr??e ? ?\n")),
    ],
)
def test_what_a_terminal_cannot_show_becomes_a_question_mark(command, words):
    async def greet(request, context):
        stop = common_pb2.FINISH_REASON_STOP
        yield response("Grüße → \U0001f600", [1], finish_reason=stop, usage=usage())

    with serving_in_thread(greet) as (address, _):
        result = pagewire(*command, "--address", address, text="x\n", PYTHONIOENCODING="ascii")

    assert result.returncode == 0, result.stderr
    assert words in result.stdout
    assert "Traceback" not in result.stderr


def test_chat_tells_before_the_first_question_that_nobody_is_there():
    with serving_in_thread(answer) as (address, _):
        pass
    started_at = time.monotonic()
    with running("chat", "--address", address) as process:  # its input stays open
        assert process.wait(WAIT_S) == 1
        stdout, stderr = process.stdout.read(), process.stderr.read()

    assert_within(time.monotonic() - started_at, 15)
    assert stdout == ""
    assert f"error: no connection to {address}" in stderr
    assert "pagewire serve" in stderr


def test_chat_tells_before_the_first_question_that_the_model_cannot_chat(monkeypatch):
    async def refuse(self, request, context):
        detail = violation("input.chat", "found a chat; allowed: text or token_ids")
        await abort(context, grpc.StatusCode.INVALID_ARGUMENT, "no chat template", detail)

    monkeypatch.setattr(ScriptedService, "Tokenize", refuse)
    with serving_in_thread(answer) as (address, _):
        result = run_main("chat", "--address", address, text="hello\n")

    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: input.chat: found a chat; allowed: text or token_ids\n"


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 2),
        (grpc.StatusCode.NOT_FOUND, 2),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 1),
        (grpc.StatusCode.UNAVAILABLE, 1),
    ],
)
def test_a_wrong_request_ends_with_2_also_where_the_router_refuses_it(code, exit_code):
    async def refuse(request, context):
        await abort(context, code, "not so")
        yield

    with serving_in_thread(refuse) as (address, _):
        result = run_main("generate", "x", "--address", address)

    assert (result.returncode, result.stderr) == (exit_code, "error: not so\n")


def test_who_is_refused_for_want_of_room_is_told_when_to_try_again():
    async def refuse(request, context):
        await abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many", retry_after(61.2))
        yield

    with serving_in_thread(refuse) as (address, _):
        result = run_main("generate", "x", "--address", address)

    assert (result.returncode, result.stderr) == (1, "error: too many; try again in 62 s\n")


@pytest.mark.parametrize("found", ["the call has no token", "the token is unknown"])
def test_a_refused_token_is_told_by_the_ways_to_give_one(found):
    told = f"{found}; allowed: `authorization: Bearer TOKEN` with a token of this cluster"

    async def refuse(request, context):
        await abort(context, grpc.StatusCode.UNAUTHENTICATED, told)
        yield

    with serving_in_thread(refuse) as (address, _):
        result = run_main("generate", "x", "--address", address)

    ways = "(by --token-file or PAGEWIRE_TOKEN)"
    assert (result.returncode, result.stderr) == (1, f"error: {told} {ways}\n")


def test_a_lost_router_is_told_at_once_on_standard_error():
    async def lose_one(request, context):
        if not request.HasField("resume"):
            yield response("half ", [1], resume_token=b"t")
            reason = error_details_pb2.ErrorInfo(reason="ROUTER_STOPS", domain="pagewire")
            await abort(context, grpc.StatusCode.UNAVAILABLE, "the router stopped", reason)
        end = common_pb2.FINISH_REASON_STOP
        yield response("whole", [2], first_index=1, finish_reason=end, usage=usage())

    with serving_in_thread(lose_one) as (address, _):
        result = run_main("generate", "x", "--address", address)

    assert (result.returncode, result.stdout) == (0, "half whole\n")
    told = f"router at {address} lost, trying again for up to 30 s\nprompt_tokens="
    assert result.stderr.startswith(told)


def test_the_name_that_a_gateway_has_for_an_address_leads_to_the_one_here():
    result = run_main("generate", "x", "--router", "localhost:1")

    assert result.returncode == 2
    assert "No such option: --router (Possible options: --address)" in result.stderr


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND])
def test_what_the_router_says_of_fields_is_told_by_the_flags_that_set_them(code):
    lines = [
        "sampling.top_k: found 9; allowed: 0 to 4, less than sampling.top_p",
        "sampling.logprobs: found 99; allowed: 0 to 20",
        "model: found 'x'; allowed: 'tiny', or empty",
        "input.text: found 9 characters; allowed: at most 8",
        "prompt.text: found 9 characters; allowed: at most 8",
        "sampling.stop[1]: found 0 characters; allowed: 1 to 8",
        "sampling.stop_token_ids[1]: found 9; allowed: 0 to 8",
    ]

    async def refuse(request, context):
        details = error_details_pb2.BadRequest()
        for field, _, description in (each.partition(": ") for each in lines):
            details.field_violations.add(field=field, description=description)
        await abort(context, code, "in other words", details)
        yield

    with serving_in_thread(refuse) as (address, _):
        result = run_main("generate", "x", "--address", address)

    told = [
        lines[0].replace("sampling.top_k", "--top-k"),
        lines[1],  # has no flag
        lines[2].replace("model", "--model"),
        lines[3],
        lines[4].replace("prompt.text", "prompt"),
        lines[5].replace("sampling.stop[1]", "--stop"),
        lines[6],
    ]
    assert result.stderr.splitlines() == [f"error: {each}" for each in told]


def test_chat_on_a_terminal_names_flags_too():
    async def refuse(request, context):
        wrong = violation("sampling.top_k", "found 9; allowed: 0 to 4")
        await abort(context, grpc.StatusCode.INVALID_ARGUMENT, "in other words", wrong)
        yield

    with serving_in_thread(refuse) as (address, _):
        result = chat_on_a_terminal(address, b"one\n\n")

    assert result.stderr.startswith("error: --top-k: found 9; allowed: 0 to 4")


def shown_until(terminal, pattern):
    """Return what a terminal shows; raises OSError if its process ends without such words."""
    shown = ""
    while not re.search(pattern, shown):
        shown += os.read(terminal, 1000).decode()
    return shown


def test_a_long_wait_for_the_first_token_is_shown_to_a_terminal_alone(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes no terminal of a pipe
    is_shown = threading.Event()

    async def answer_late(request, context):
        deadline = time.monotonic() + WAIT_S
        while not is_shown.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        async for each in answer(request, context):
            yield each

    near, far = pty.openpty()
    with serving_in_thread(answer_late) as (address, service):
        command = ("generate", "hello", "--address", address)
        with running(*command) as piped:
            wait_until(lambda: service.requests)
            with running(*command, stderr=far) as watched:
                os.close(far)
                wait = shown_until(near, r"waiting for the first token, [3-9] s")
                is_shown.set()
                end = shown_until(near, "ttft_ms")
                answers = [process.stdout.read() for process in (piped, watched)]
            account = piped.stderr.read()
    os.close(near)

    assert not re.search("first token, [01] s", wait)
    assert ERASED_LINE in end[: end.index("prompt_tokens")]
    assert answers == ["echo hello\n"] * 2
    assert account.startswith("prompt_tokens")


def test_an_interrupt_of_a_long_wait_clears_its_line(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")

    async def never_answer(request, context):
        await asyncio.sleep(WAIT_S)
        yield response()

    near, far = pty.openpty()
    with (
        serving_in_thread(never_answer) as (address, _),
        running("generate", "hello", "--address", address, stderr=far) as process,
    ):
        os.close(far)
        shown_until(near, r"waiting for the first token, [2-9] s")
        process.send_signal(signal.SIGINT)
        sent_at = time.monotonic()

        assert process.wait(WAIT_S) == 130
        assert_within(time.monotonic() - sent_at, 5)  # not with the next token
        assert process.stdout.read() == ""
        shown_until(near, re.escape(ERASED_LINE))
    os.close(near)


def test_chat_needs_no_standard_error():
    with serving_in_thread(answer) as (address, _):
        closed = ["sh", "-c", 'exec "$@" 2>&-', "sh", *PAGEWIRE, "chat", "--address", address]
        result = subprocess.run(
            closed, input="hello\n", stdout=subprocess.PIPE, text=True, timeout=WAIT_S
        )

    assert (result.returncode, result.stdout) == (0, "echo hello\n")


def test_chat_refuses_a_time_limit_before_the_first_question():
    result = run_main("chat", "--timeout-s", "0")

    assert result.returncode == 2
    assert result.stderr.startswith("error: --timeout-s: found 0.0; allowed: seconds, above 0")


@pytest.mark.parametrize("command", [("chat",), ("generate", "x", "--max-tokens", "9")])
def test_an_interrupt_in_the_middle_of_an_answer_leaves_cleanly(command):
    with serving_in_thread(endless) as (address, service):
        with running(*command, "--address", address) as process:
            process.stdin.write("hello\n")
            process.stdin.flush()
            assert "word" in process.stdout.read(200)
            process.send_signal(signal.SIGINT)
            assert process.stdout.read().endswith("\n"), "a shell's prompt would follow the answer"
            stderr = process.stderr.read()

            assert process.wait(WAIT_S) == 130, stderr
            assert "Traceback" not in stderr
        wait_until(service.cancelled.is_set)


def test_an_interrupt_before_a_question_leaves_cleanly():
    with (
        serving_in_thread(answer) as (address, service),
        running("chat", "--address", address) as process,
    ):
        wait_until(lambda: service.requests)
        time.sleep(
            1.0
        )  # until it asks; and a signal just before the process sleeps in its read does not wake it
        process.send_signal(signal.SIGINT)

        assert process.wait(WAIT_S) == 130
        assert process.stdout.read() == process.stderr.read() == ""


def test_the_end_of_input_in_the_middle_of_an_answer_ends_the_chat_after_it():
    with (
        serving_in_thread(answer) as (address, _),
        running("chat", "--address", address) as process,
    ):
        stdout, stderr = process.communicate("hello\n", timeout=WAIT_S)

    assert (process.returncode, stdout, stderr) == (0, "echo hello\n", "")


def test_a_reader_that_leaves_early_ends_generate_without_a_traceback():
    with serving_in_thread(endless) as (address, service):
        with running("generate", "x", "--address", address) as process:
            assert process.stdout.read(5) == "word "
            process.stdout.close()

            assert process.wait(WAIT_S) == 1
            assert process.stderr.read() == ""
        wait_until(service.cancelled.is_set)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_that_is_gone_ends_a_command_in_silence(command):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with serving_in_thread(answer) as (address, _), os.fdopen(write_end, "w") as pipe:
        result = pagewire(*command, "--address", address, text="x\n", stdout=pipe)

    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_output_that_cannot_be_written_ends_a_command_with_one_line(command):
    with serving_in_thread(answer) as (address, _), open("/dev/full", "w") as full:
        result = pagewire(*command, "--address", address, text="x\n", stdout=full)

    reason = "standard output cannot be written: No space left on device"
    assert (result.returncode, result.stderr) == (1, f"error: {reason}\n")


@pytest.mark.parametrize("command", [["generate", "-"], ["chat"]], ids=["generate", "chat"])
def test_a_closed_input_is_told_in_one_line(command):
    with serving_in_thread(answer) as (address, _):
        closed = ["sh", "-c", 'exec "$@" <&-', "sh", *PAGEWIRE, *command, "--address", address]
        result = subprocess.run(closed, capture_output=True, text=True, timeout=WAIT_S)

    told = "error: standard input: found none, as it is closed; allowed: text in UTF-8\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", told)


def test_a_closed_output_is_told_before_anything_is_asked():
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *PAGEWIRE, "generate", "x"]
    result = subprocess.run(closed, stderr=subprocess.PIPE, text=True, timeout=WAIT_S)

    assert (result.returncode, result.stderr) == (1, "error: standard output is closed\n")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), ("decode-0", "ready", "6/10", "75%")),  # nobody would see a live one
        (("--once", "--wide"), ("h:1", "0000000000000007", "6/10", "75%")),
        *rarely((("--once",), ("decode-0", "ready", "6/10", "75%"))),
    ],
)
def test_status_prints_one_table_and_rates(flags, words):
    with serving_in_thread(answer) as (address, _):
        result = run_main("status", *flags, "--address", address)

    row = next(line for line in result.stdout.splitlines() if "decode-0" in line)
    assert set(words) <= set(row.split())
    assert "last 1 s: 0 requests/s · 0 tokens/s · " in result.stdout
    assert result.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, *rarely(signal.SIGTERM, signal.SIGHUP)])
def test_status_shows_a_live_table_until_it_is_stopped(number):
    terminal, stdout = os.openpty()
    with (
        serving_in_thread(answer) as (address, service),
        running("status", "--address", address, stdout=stdout) as process,
    ):
        wait_until(lambda: service.num_statuses > 1)
        process.send_signal(number)

        assert process.wait(WAIT_S) == 0
        assert b"decode-0" in os.read(terminal, 10_000)
        assert process.stderr.read() == ""
    os.close(stdout)
    os.close(terminal)


def test_live_status_outlasts_a_router_that_is_away():
    terminal, stdout = os.openpty()
    shown = b""
    with (
        serving_in_thread(answer) as (address, service),
        running("status", "--address", address, stdout=stdout) as process,
    ):
        wait_until(lambda: service.num_statuses > 1)
        service.is_away = True
        while b"the router has not answered for" not in shown:
            shown += os.read(terminal, 10_000)
        service.is_away = False
        answered = service.num_statuses
        wait_until(lambda: service.num_statuses > answered + 1)
        process.send_signal(signal.SIGINT)

        assert process.wait(WAIT_S) == 0
        assert process.stderr.read() == ""
    os.close(stdout)
    os.close(terminal)
