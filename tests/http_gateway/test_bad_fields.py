"""Every field of both front ends, wrong in every way: the same answer over gRPC and HTTP, at once.

The table is `bad_fields.py`. Behind both doors are real workers with a fake model; canaries stream
beside the cases, and no wrong request may reach a worker.
"""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from http_gateway.fields import Fields
from pagewire.protos import inference_pb2, inference_pb2_grpc
from tests.http_gateway.bad_fields import (
    ALL,
    BASES,
    CHAT,
    CLASH,
    DETOKENIZE,
    EMPTY,
    HOSTILE,
    INFINITE,
    NO,
    NOT_HERE,
    RANGE,
    RESPONSE,
    SIZE,
    TEXT,
    TOKENIZE,
    TYPE,
    Field,
    Spelling,
    Value,
    named_cases,
)
from tests.http_gateway.parrot import MARKS, write_folder
from tests.http_gateway.raw_http import RawAnswer, exchange, request
from tests.http_gateway.serving import Gateway, gateway
from tests.http_gateway.whole_cluster import singing, whole_cluster
from tests.support.wall_clock import assert_within, on_this_host

AT_ONCE_S = 1.0
LONGEST_ANSWER = 2000  # bytes: an error repeats no more than a little of what was sent
CASES = {name: (field, kind) for name, field, kind in named_cases()}
# The second schema that is refused for the time that it takes; the first is in each run.
SECOND = "Generate.sampling.constraint.json_schema: hostile 3"
assert SECOND in CASES
REQUESTS = {
    "Generate": inference_pb2.GenerateRequest,
    "Tokenize": inference_pb2.TokenizeRequest,
    "Detokenize": inference_pb2.DetokenizeRequest,
}
# What stands beside a wrong value, so that it alone is wrong: path |-> fields
BESIDE = {
    "chat.messages": {"role": "user", "content": "BAD"},
    "chat.messages.tool_calls": {"name": "f"},
}
# What JSON writes differently: true, null, "x", an array
OF_PYTHON = re.compile(r"\b(True|False|None|NoneType|bool|str|int|float|list|dict|inf|nan)\b")
CODES = {400: code_pb2.INVALID_ARGUMENT, 404: code_pb2.NOT_FOUND}


@dataclass(frozen=True)
class Refusal:
    """What gRPC answers."""

    code: int
    message: str
    fields: tuple[str, ...]
    seconds: float


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = write_folder(tmp_path_factory.mktemp("model"), MARKS["hermes"])
    with gateway(lambda: whole_cluster(folder)) as running:
        # The first constraint of all starts the processes that constraints are tried in.
        warm = json.dumps({"prompt": "BAD", "guided_regex": "("})
        assert exchange(running.host_and_port, request(TEXT, warm), timeout_s=60).status == 400
        with singing(running):
            yield running
        assert not [each for each in running.backend.prompts if "BAD" in each]


@pytest.fixture(scope="module")
def channel(served: Gateway) -> Iterator[grpc.Channel]:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(served.router_address, options=options) as opened:
        yield opened


@pytest.fixture(scope="module")
def resume_token(channel: grpc.Channel) -> bytes:
    """The token of a call for this text with eight tokens."""
    call = generate(channel, inference_pb2.GenerateRequest(**RESUMED))
    return next(iter(call)).resume_token


RESUMED = {"text": "go on", "sampling": {"max_tokens": 8, "ignore_eos": True, "seed": 1}}


def generate(channel: grpc.Channel, message: inference_pb2.GenerateRequest) -> Any:
    return inference_pb2_grpc.InferenceServiceStub(channel).Generate(message, timeout=30)


def build(field: Field, value: Any, resume_token: bytes) -> Any:
    """Return the request with a value at a field's place."""
    kind = REQUESTS[field.method]
    fields: dict[str, Any] = {}
    inner, descriptor, names = fields, kind.DESCRIPTOR, field.grpc.split(".")
    for depth, name in enumerate(names):
        known = descriptor.fields_by_name[name]
        if depth == len(names) - 1:
            inner[name] = value
            break
        descriptor = known.message_type
        below = dict(BESIDE.get(".".join(names[: depth + 1]), {}))
        inner[name] = [below] if known.is_repeated else below
        inner = below
    if names[0] == "chat":
        fields["chat"].setdefault("messages", [BESIDE["chat.messages"]])
    if names[0] == "resume":
        fields = RESUMED | fields
        fields["resume"].setdefault("token", resume_token)
    elif field.method == "Generate" and names[0] not in ("text", "token_ids", "chat"):
        fields["text"] = "BAD"
    elif names == ["model"]:
        fields |= {"text": "BAD"} if field.method == "Tokenize" else {}
    return kind(**fields)


def ask_grpc(channel: grpc.Channel, method: str, message: Any) -> Refusal | None:
    """Make a call that has to be refused; None: it was not."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    started = time.monotonic()
    try:
        if method == "Generate":
            call = generate(channel, message)
            next(iter(call))
            call.cancel()
        else:
            getattr(stub, method)(message, timeout=30)
    except grpc.RpcError as error:
        status = rpc_status.from_call(error)
        status = status or status_pb2.Status(code=error.code().value[0], message=error.details())
        return refusal(status, time.monotonic() - started)
    return None


def ask_many(channel: grpc.Channel, message: Any) -> Refusal | None:
    """Make the same call on a stream of many."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    started = time.monotonic()
    start = inference_pb2.GenerateManyRequest(call_id=7, start=message)
    answers = stub.GenerateMany(iter([start]), timeout=30)
    result = next(iter(answers)).results[0]
    seconds = time.monotonic() - started
    answers.cancel()
    if result.WhichOneof("result") != "error_status":
        return None
    return refusal(status_pb2.Status.FromString(result.error_status), seconds)


def are_alike(one: Refusal, other: Refusal, kind: str) -> bool:
    if kind == HOSTILE:
        # Which limit such a value exceeds first, of time or of size, depends on the host's load.
        return (one.code, one.fields) == (other.code, other.fields)
    return one.message == other.message


def refusal(status: status_pb2.Status, seconds: float) -> Refusal:
    bad = error_details_pb2.BadRequest()
    for each in status.details:
        if each.Is(bad.DESCRIPTOR):
            each.Unpack(bad)
    fields = tuple(each.field for each in bad.field_violations)
    return Refusal(status.code, status.message, fields, seconds)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough if name == SECOND else ()) for name in CASES],
)
def test_a_bad_value_is_refused_alike_by_both_front_ends(
    served: Gateway, channel: grpc.Channel, resume_token: bytes, name: str
) -> None:
    field, kind = CASES[name]
    wrong: list[str] = []
    seconds = [0.0]
    for value in field.kinds[kind]:
        shown = f"{str(value.grpc)[:60]!r}, {str(value.json)[:60]}"
        rests: set[tuple[str, ...]] = set()
        if value.grpc is not NO:
            message = build(field, value.grpc, resume_token)
            answer = ask_grpc(channel, field.method, message)
            wrong += [f"gRPC, {shown}: {each}" for each in judge_grpc(field, value, answer)]
            if answer:
                seconds.append(answer.seconds)
                rests.add(items(answer.fields[0] if answer.fields else ""))
            if field.method == "Generate":
                many = ask_many(channel, message)
                if answer and (many is None or not are_alike(many, answer, kind)):
                    wrong.append(f"GenerateMany, {shown}: {many} is not {answer}")
        if value.json is not NO:
            for spelling in field.http:
                body = spelling.body % value.json
                answered = exchange(
                    served.host_and_port, request(spelling.path, body), timeout_s=30
                )
                seconds.append(answered.seconds)
                where = f"{spelling.path} {spelling.param}"
                wrong += [f"{where}, {shown}: {e}" for e in judge_http(spelling, value, answered)]
                if answered.status >= 400 and kind not in (TYPE, NOT_HERE):
                    rests.add(items(answered.error["param"] or ""))
        if len(rests) > 1 and value.grpc is not NO:
            wrong.append(f"{shown}: they name different items: {rests}")
    assert not wrong, "\n".join(wrong)
    assert_within(max(seconds), on_this_host(AT_ONCE_S))


def test_all_wrong_sampling_options_of_a_request_are_named_at_once(served: Gateway) -> None:
    wrong = {"temperature": -1, "top_k": -2, "seed": "x", "min_p": 2}
    body = json.dumps({"prompt": "BAD", **wrong})
    answer = exchange(served.host_and_port, request(TEXT, body))

    assert answer.status == 400
    lines = answer.error["message"].splitlines()
    assert {line.partition(": found ")[0] for line in lines} == wrong.keys()


def test_a_constraint_that_only_a_worker_finds_too_large_is_refused_alike(
    served: Gateway, channel: grpc.Channel
) -> None:
    regex = "(([a-z]{1,300} ?){1,300}[0-9]?){100,300}"  # no draw ends it early
    sampling = {"constraint": {"regex": regex}, "max_tokens": 200, "temperature": 0}
    message = inference_pb2.GenerateRequest(text="go on and on", sampling=sampling)
    stub = inference_pb2_grpc.InferenceServiceStub(channel)

    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(message, timeout=30))
    status = rpc_status.from_call(refused.value)
    assert status
    told = refusal(status, 0.0)

    assert told.code == code_pb2.INVALID_ARGUMENT
    assert told.fields == ("sampling.constraint.regex",)
    found = "found one with which an answer cannot go on: "
    assert told.message.startswith(f"{told.fields[0]}: {found}")
    assert told.message.endswith("; allowed: a simpler one")
    for name in ("guided_regex", "structured_outputs.regex"):
        fields: dict[str, Any] = {"guided_regex": regex}
        if name != "guided_regex":
            fields = {"structured_outputs": {"regex": regex}}
        body = json.dumps({"prompt": "go on and on", "max_tokens": 200, "temperature": 0, **fields})
        answer = exchange(served.host_and_port, request(TEXT, body), timeout_s=30)
        assert answer.status == 400
        assert answer.error["param"] == name
        assert answer.error["message"] == told.message.replace(told.fields[0], name)


def judge_grpc(field: Field, value: Value, answer: Refusal | None) -> Iterator[str]:
    if answer is None:
        yield "it is accepted"
        return
    if answer.code != CODES[value.code]:
        yield f"{code_pb2.Code.Name(answer.code)} {answer.message[:300]}"
        return
    if not any(is_part(each, field.named) for each in answer.fields):
        yield f"it names {answer.fields}, not {field.named}"
    if value.allowed not in answer.message or "; allowed: " not in answer.message:
        yield f"it does not say {value.allowed!r}: {answer.message[:300]}"
    if len(answer.message.encode()) > LONGEST_ANSWER:
        yield f"it says too much: {len(answer.message)} characters"


def judge_http(spelling: Spelling, value: Value, answer: RawAnswer) -> Iterator[str]:
    if answer.status != value.code:
        yield f"{answer.status} {answer.body[:300]!r}"
        return
    error = answer.error
    if error["type"] != "invalid_request_error":
        yield f"its type is {error['type']}"
    if not is_part(error["param"] or "", spelling.param):
        yield f"it names {error['param']}, not {spelling.param}: {error['message'][:200]}"
    if spelling.param.split("[")[0].split(".")[0] not in error["message"]:
        yield f"its message does not name {spelling.param}: {error['message'][:200]}"
    if value.allowed not in error["message"]:
        yield f"it does not say {value.allowed!r}: {error['message'][:300]}"
    if "; allowed: " not in error["message"]:
        yield f"it does not say what is allowed: {error['message'][:300]}"
    if OF_PYTHON.search(error["message"]):
        yield f"it speaks of Python's values: {error['message'][:300]}"
    if len(answer.body) > LONGEST_ANSWER:
        yield f"it says too much: {len(answer.body)} bytes"


def is_part(found: str, asked: str) -> bool:
    """Whether an error names a field, something within it, or what it is a part of."""
    return bool(found) and (found.startswith(asked) or asked.startswith(found))


def items(field: str) -> tuple[str, ...]:
    """Return which items an error names: of stop[1] the second."""
    return tuple(re.findall(r"\[\d+\]", field))


# Whether the table is whole

TEXTS, BYTES = FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES
FLOATS = {FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE}
INTEGERS = {FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64}
# Fields none of whose values is wrong, and why
HARMLESS = {
    "GenerateRequest.traceparent": "what is none counts as unset",
    "GenerateRequest.tracestate": "what is none counts as unset",
    "GenerateManyRequest.call_id": "test_calls_of_a_stream_that_contradict_each_other_end_it",
    "GenerateManyRequest.more": "test_calls_of_a_stream_that_contradict_each_other_end_it",
    "GenerateManyRequest.timeout_ms": "0 is that of the router, and the router's own limit holds",
    "GenerateManyRequest.interval_ms": "more than 10,000 counts as 10,000",
    "TokenizeRequest.add_special_tokens": "both values are right",
    "TokenizeRequest.add_generation_prompt": "tests/router/test_server.py",
    "TokenizeRequest.continue_final_message": "tests/router/test_server.py",
    "DetokenizeRequest.skip_special_tokens": "both values are right",
    "DetokenizeRequest.with_pieces": "both values are right",
}


def fields_of(message: Descriptor, path: str = "") -> Iterator[tuple[str, FieldDescriptor]]:
    """Yield each field of a message that holds a value, and those of the messages in it."""
    for field in message.fields:
        inner = field.message_type
        if inner is None or field.is_repeated:
            yield f"{path}{field.name}", field
        if inner is not None and inner is not message:
            yield from fields_of(inner, f"{path}{field.name}.")


def test_every_field_of_the_contract_has_cases_of_each_kind() -> None:
    missing = []
    covered: dict[str, set[str]] = {}
    for each in ALL:
        if each.grpc:
            descriptor, names = REQUESTS[each.method].DESCRIPTOR, each.grpc.split(".")
            for name in names[:-1]:
                descriptor = descriptor.fields_by_name[name].message_type
            known = descriptor.fields_by_name[names[-1]]
            covered.setdefault(known.full_name, set()).update(each.kinds, each.fine)
            if each.http:
                covered[known.full_name].add("over HTTP")
    methods = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods
    for method in methods:
        for path, known in fields_of(method.input_type):
            short = known.full_name.removeprefix("pagewire.v1.")
            kinds = covered.get(known.full_name, set())
            if short not in HARMLESS and (lacking := needed(known, kinds) - kinds):
                missing.append(f"{method.name}.{path} ({short}): {sorted(lacking)}")
    assert not missing, "\n".join(missing)


def needed(field: FieldDescriptor, kinds: set[str]) -> set[str]:
    """Return which kinds of bad values a field needs; those of JSON only where HTTP has it."""
    of_json = {TYPE} if "over HTTP" in kinds else set()
    if field.type == FieldDescriptor.TYPE_BOOL:
        return of_json or ({CLASH} if field.name == "finished" else set())
    if field.is_repeated:
        return of_json | {SIZE} | ({EMPTY} if field.type == TEXTS else set())
    if field.type in FLOATS:
        return of_json | {RANGE, INFINITE, SIZE}
    if field.type in INTEGERS:
        return of_json | {RANGE, SIZE}
    if field.type == TEXTS:
        return of_json | {EMPTY, SIZE}
    return of_json | {EMPTY, RANGE, SIZE} if field.type == BYTES else of_json


# Valid requests that have all that the gateway reads: what it takes from them, the table must have.
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"name": "f", "description": "", "parameters": {}, "strict": True}
MESSAGES = [{"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [CALL]}]
SCHEMA = {"name": "x", "description": "", "strict": True, "schema": {}}
CHOSEN = {"type": "function", "function": {"name": "f"}}
RICH = {
    CHAT: [
        {
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": CHOSEN,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {
            "messages": MESSAGES,
            "response_format": {"type": "json_schema", "json_schema": SCHEMA},
        },
    ],
    TEXT: [
        {
            "prompt": "x",
            "stream": True,
            "stream_options": {},
            "structured_outputs": {"regex": "x"},
        }
    ],
    RESPONSE: [
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "reasoning", "content": []},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "f"},
        },
        {"input": "x", "text": {"format": {"type": "json_schema", **SCHEMA}}},
    ],
    TOKENIZE: [{"prompt": "x"}, {"messages": MESSAGES}],
    DETOKENIZE: [{"tokens": [5]}],
}


def test_every_field_that_the_gateway_reads_has_a_case(
    served: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[str] = set()
    sent: list[dict[str, Any]] = []
    own: set[Any] = set()  # tasks that answer what is sent here, beside those of the canaries

    class Noted(dict[str, Any]):
        def __init__(self, path: str, values: Any) -> None:
            super().__init__(values)
            self.path = path

        def pop(self, name: str, *default: Any) -> Any:
            if asyncio.current_task() in own:
                read.add(f"{self.path}.{name}" if self.path else name)
            return super().pop(name, *default)

    dropped: set[str] = set()
    make, drop = Fields.__init__, Fields.drop

    def noting(self: Fields, values: Any, path: str = "") -> None:
        make(self, values, path)
        if values in sent and not path:
            own.add(asyncio.current_task())
        self._left = Noted(path, self._left)

    def noting_dropped(self: Fields, *names: str) -> None:
        dropped.update(map(self.name, names))
        drop(self, *names)

    monkeypatch.setattr(Fields, "__init__", noting)
    monkeypatch.setattr(Fields, "drop", noting_dropped)
    missing = []
    for path, bodies in RICH.items():
        read.clear()
        for body in bodies:
            short = {} if path in (TOKENIZE, DETOKENIZE) else {LIMIT[path]: 1}
            sent[:] = [body | short]
            answer = exchange(served.host_and_port, request(path, json.dumps(sent[0])))
            # The fake workers hold no answer to a form: their refusal comes when all is read.
            assert answer.status == 200 or b"this worker has none" in answer.body, answer.body
        tested: dict[str, set[str]] = {}
        for field in ALL:
            for each in field.http:
                if each.path == path:
                    tested.setdefault(plain(each.param), set()).update(field.kinds)
        missing += [
            f"{path}: {name}"
            for name in sorted(read - dropped)  # what is dropped is right whatever it is
            if plain(name) not in tested  # nor is it in what is refused as a whole
            and tested.get(plain(name.partition(".")[0])) != {NOT_HERE}
        ]
    assert not missing, "\n".join(missing)


LIMIT = {CHAT: "max_tokens", TEXT: "max_tokens", RESPONSE: "max_output_tokens"}


def plain(name: str) -> str:
    """Return a name without the numbers of items."""
    return "".join(each for each in name if not each.isdigit())


def test_a_table_of_many_cases() -> None:
    assert len(CASES) >= 90


# Texts that are none: made for every text of the contract, and for all HTTP bodies

MARK = "Mark"  # replaced by bytes of the same number
BROKEN = b"Ma\xffk"


def texts_of(message: Descriptor, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each text of a message and of the messages in it."""
    for field in message.fields:
        if field.type == TEXTS:
            yield (*path, field.name)
        elif field.message_type and field.message_type is not message:
            yield from texts_of(field.message_type, (*path, field.name))


METHODS = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods
ALL_TEXTS = [(method.name, path) for method in METHODS for path in texts_of(method.input_type)]


@pytest.mark.parametrize(("method", "path"), ALL_TEXTS)
def test_a_text_over_grpc_that_is_no_utf_8_is_refused_by_its_field(
    channel: grpc.Channel, method: str, path: tuple[str, ...]
) -> None:
    known = METHODS_BY_NAME[method]
    message = getattr(inference_pb2, known.input_type.name)()
    inner = message
    for name in path[:-1]:
        field = inner.DESCRIPTOR.fields_by_name[name]
        inner = getattr(inner, name).add() if field.is_repeated else getattr(inner, name)
    last = inner.DESCRIPTOR.fields_by_name[path[-1]]
    if last.is_repeated:
        getattr(inner, path[-1]).extend(["fine", MARK])
    else:
        setattr(inner, path[-1], MARK)
    raw = message.SerializeToString().replace(MARK.encode(), BROKEN)
    started = time.monotonic()

    call = channel.stream_stream(f"/pagewire.v1.InferenceService/{method}")(iter([raw]), timeout=30)
    with pytest.raises(grpc.RpcError) as caught:
        next(call)

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{path[-1]}{'[1]' if last.is_repeated else ''}: byte 2 is not UTF-8" in (
        caught.value.details()
    )
    assert all(name in caught.value.details() for name in path)
    assert_within(time.monotonic() - started, on_this_host(AT_ONCE_S))


METHODS_BY_NAME = {method.name: method for method in METHODS}


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSE, TOKENIZE, DETOKENIZE])
def test_a_body_over_http_that_is_no_utf_8_is_refused_with_the_place(
    served: Gateway, path: str
) -> None:
    body = (BASES[path] % '"model": "%s"' % MARK).encode().replace(MARK.encode(), BROKEN)

    answer = exchange(served.host_and_port, request(path, body))

    assert (answer.status, answer.error["code"]) == (400, "invalid_json")
    assert f"byte {body.index(BROKEN) + 2} is not UTF-8" in answer.error["message"]
    assert_within(answer.seconds, on_this_host(AT_ONCE_S))


# Calls that share a stream

PLAYED = inference_pb2.GenerateRequest(
    text="go on", sampling={"max_tokens": 40, "ignore_eos": True}
)
CONTRADICTIONS = {
    "a call of an id that still runs": (
        [inference_pb2.GenerateManyRequest(call_id=1, start=PLAYED)] * 2,
        "call_id: found 1, which still runs; allowed: one that does not",
    ),
    "too many in a message": (
        [inference_pb2.GenerateManyRequest(more=[inference_pb2.GenerateManyRequest()] * 256)],
        "more: found 256 of them; allowed: at most 255",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_calls_of_a_stream_that_contradict_each_other_end_it(
    channel: grpc.Channel, name: str
) -> None:
    messages, words = CONTRADICTIONS[name]
    stub = inference_pb2_grpc.InferenceServiceStub(channel)

    with pytest.raises(grpc.RpcError) as caught:
        list(stub.GenerateMany(iter(messages), timeout=30))

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in caught.value.details()


HARMLESS_CALLS = {
    "a trace that is none": {"start": PLAYED, "traceparent": "00-" + "x" * 10_000},
    "what is no state of a trace": {"start": PLAYED, "tracestate": "," * 10_000},
    "more time than there is": {"start": PLAYED, "timeout_ms": 2**32 - 1},
    "messages that come late": {"start": PLAYED, "interval_ms": 2**32 - 1},
}


@pytest.mark.parametrize("name", HARMLESS_CALLS)
def test_what_cannot_be_wrong_changes_no_answer(channel: grpc.Channel, name: str) -> None:
    fields = dict(HARMLESS_CALLS[name])
    start = inference_pb2.GenerateRequest()
    start.CopyFrom(fields.pop("start"))
    start.traceparent = fields.pop("traceparent", "")
    start.tracestate = fields.pop("tracestate", "")
    call = inference_pb2.GenerateManyRequest(call_id=2**64 - 1, start=start, **fields)
    stub = inference_pb2_grpc.InferenceServiceStub(channel)

    results = [
        each for many in stub.GenerateMany(iter([call]), timeout=20) for each in many.results
    ]

    assert {each.call_id for each in results} == {2**64 - 1}
    assert sum(len(each.response.token_ids) for each in results) == 4 * 40
    assert results[-1].response.HasField("usage")
