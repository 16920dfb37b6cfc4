import asyncio
import copy
import functools
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest

import pagewire
from pagewire import AsyncClient, Client, InvalidRequestError, Message, ToolCall
from pagewire.arguments import (
    MAX_TIMEOUT_S,
    check_address,
    check_sampling,
    check_token_ids,
)
from pagewire.chat_arguments import check_messages
from pagewire.protos.grpc_options import MAX_MESSAGE_BYTES
from pagewire.types import SamplingOptions
from router.errors import InvalidRequest
from router.request import AskedSampling, SamplingDefaults, ServedModel
from router.validation import complete_sampling

DEEP = functools.reduce(lambda inner, _: [inner], range(5_000), [])
HUGE = 10**5000  # more digits than Python shows
# Of no type that any argument has, or not finite; None is apart, as options take it for absent.
NEVER = [object(), b"x", {"a": 1}, {1}, 1j, math.nan, math.inf, -math.inf, "\ud800", [[]], [None]]
NOT_A_NUMBER = [*NEVER, "1", True, [1], HUGE, -HUGE, np.zeros(2), np.bool_(True)]
NOT_AN_INTEGER = [*NOT_A_NUMBER, 0.5, 1.0, -1, Fraction(1, 2), np.float32(1)]
NOT_A_TEXT = [*NEVER, 5, True, ["a"], Message(role="user", content="x")]
NOT_TOKEN_IDS = [
    *NEVER,
    5,
    True,
    [True],
    [-1],
    [2**32],
    [HUGE],
    ["1"],
    [1.0],
    iter([1]),
    np.int64(1),
]
BAD_OPTIONS = {
    "temperature": [*NOT_A_NUMBER, -0.1, 1e-4, 1001, 1e300],
    "top_p": [*NOT_A_NUMBER, 0, -0.1, 1.1],
    "top_k": [*NOT_AN_INTEGER, 2**32],
    "min_p": [*NOT_A_NUMBER, -0.1, 1.1],
    "repetition_penalty": [*NOT_A_NUMBER, 0, -1, 1001],
    "presence_penalty": [*NOT_A_NUMBER, -2.1, 2.1],
    "frequency_penalty": [*NOT_A_NUMBER, -2.1, 2.1],
    "seed": [*NOT_AN_INTEGER, 2**64],
    "max_tokens": [*NOT_AN_INTEGER, 0, 2**32],
    "min_tokens": [*NOT_AN_INTEGER, 2**32],
    "stop": [*NEVER, 5, True, "", [""], ["a", 5], ["a"] * 17, "a" * 1025, iter(["a"]), {"a"}],
    "stop_token_ids": [*NOT_TOKEN_IDS, "1", [1] * 257],
    "ignore_eos": [*NEVER, 0, 1, "True", np.bool_(True)],
    "n": [*NOT_AN_INTEGER, 0, 65],
    "logprobs": [*NOT_AN_INTEGER, 21],
    "skip_special_tokens": [*NEVER, 0, 1, "True", np.bool_(True)],
    "constraint": [
        "json",
        5,
        [],
        {},
        {"json": {}},
        {"json_schema": {}, "regex": "a"},
        {"json_schema": 5},
        {"json_schema": {"a": object()}},
        {"json_schema": {"a": float("nan")}},
        {"json_object": False},
        {"json_object": 1},
        {"regex": 5},
        {"regex": "\ud800"},
        {"choice": "ab"},
        {"choice": []},
        {"choice": ["a", ""]},
        {"choice": ["a", 5]},
        {"choice": ["a"] * 1001},
        {"grammar": None},
    ],
}
NOT_MESSAGES = [
    *NEVER,
    None,
    5,
    "hello",
    [],
    (),
    ["hello"],
    [5],
    Message(role="user", content="x"),
    {"role": "user", "content": "x"},
    [{"role": "user"}],
    [{"content": "x"}],
    [{}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": ["x"]}],
    [{"role": "", "content": "x"}],
    [{"role": "user", "content": "\ud800"}],
    [{"role": "user", "content": "x", "nickname": "nobody"}],
    [{"role": "user", "content": "x", "name": 5}],
    [{"role": "user", "content": "x", "tool_call_id": ["c"]}],
    [{"role": "assistant", "content": "x", "reasoning_content": b"x"}],
    [{"role": "assistant", "tool_calls": []}],
    [{"role": "assistant", "tool_calls": "f"}],
    [{"role": "assistant", "tool_calls": ["f"]}],
    [{"role": "assistant", "tool_calls": [{}]}],
    [{"role": "assistant", "tool_calls": [{"function": {}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "strict": True}}]}],
    [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}],
    [{"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f"}}]}],
    [Message(role=5, content="x")],
    [Message(role="user", content=None)],
    [Message(role="user", content="x", name=None, tool_calls=(ToolCall(name=""),))],
    iter([Message(role="user", content="x")]),
]
NOT_TOOLS = [*NEVER, 5, True, "f", {"type": "function"}, ["f"], [{"a": {1}}], [{"a": math.nan}]]
NOT_TOOLS += [[{"a": "\ud800"}], DEEP]
NOT_A_TIMEOUT = [*NOT_A_NUMBER, 0, -1, MAX_TIMEOUT_S + 1]
CHAT = [Message(role="user", content="x")]


class NoChannel:
    """Counts what would be sent."""

    def __init__(self, address):
        self.address = address

    def unary_unary(self, *arguments, **options):
        return self._send

    unary_stream = stream_stream = unary_unary

    def _send(self, request, timeout):
        raise AssertionError(f"sent {request}")

    async def close(self):
        pass


def cases():
    prompts = [*NOT_TOKEN_IDS, None, "", [], np.zeros((2, 2), int), range(-1, 3)]
    for name, values in BAD_OPTIONS.items():
        yield from ((f"sampling.{name}", ("x",), {name: each}, "stream") for each in values)
    yield from (("prompt", (each,), {}, "stream") for each in prompts)
    yield from (("prompt.chat.messages", (each,), {}, "stream_chat") for each in NOT_MESSAGES)
    yield from (("input.chat.messages", (each,), {}, "tokenize_chat") for each in NOT_MESSAGES)
    yield from (
        ("prompt.chat.tools", (CHAT,), {"tools": each}, "stream_chat") for each in NOT_TOOLS
    )
    yield from (("token_ids", (each,), {}, "detokenize") for each in NOT_TOKEN_IDS)
    yield from (
        ("skip_special_tokens", ([1],), {"skip_special_tokens": each}, "detokenize")
        for each in [*NEVER, None, 0, 1]
    )
    yield from (("input.text", (each,), {}, "tokenize") for each in [*NOT_A_TEXT, None, ""])
    for method, given in METHODS.items():
        yield from (("timeout_s", given, {"timeout_s": each}, method) for each in NOT_A_TIMEOUT)
        if given:
            models = [*NOT_A_TEXT, None]
            yield from (("model", given, {"model": each}, method) for each in models)


METHODS = {
    "generate": ("x",),
    "chat": (CHAT,),
    "stream": ("x",),
    "stream_chat": (CHAT,),
    "tokenize": ("x",),
    "tokenize_chat": (CHAT,),
    "detokenize": ([1],),
    "list_models": (),
    "status": (),
}


def test_every_bad_argument_is_refused_by_name_before_anything_is_sent():
    accepted, misnamed = [], []

    async def scenario():
        async with AsyncClient("h:1", channel_factory=NoChannel) as client:
            for field, given, options, method in cases():
                try:
                    result = getattr(client, method)(*given, **options)
                    if asyncio.iscoroutine(result):
                        await result
                except InvalidRequestError as error:
                    (violation,) = error.violations
                    if not violation.field.startswith(field) or "allowed: " not in str(error):
                        misnamed.append((field, str(error)))
                else:
                    accepted.append((field, given, options))

    asyncio.run(scenario())

    assert not accepted
    assert not misnamed


def test_every_method_and_option_has_its_bad_values():
    names = {name for name in vars(AsyncClient) if not name.startswith("_")} - {"aclose", "address"}

    assert set(METHODS) == names
    assert list(BAD_OPTIONS) == list(SamplingOptions.__annotations__)


def test_the_sync_client_refuses_the_same():
    with Client("127.0.0.1:1") as client:
        for field, given, options, method in list(cases())[::17]:
            with pytest.raises(InvalidRequestError) as caught:
                getattr(client, method)(*given, **options)
            assert caught.value.violations[0].field.startswith(field)


def test_unknown_options_are_refused_with_the_known_ones():
    with pytest.raises(InvalidRequestError, match=r"sampling\.temprature: .*allowed: temperature"):
        check_sampling({"temprature": 1.0})
    with pytest.raises(InvalidRequestError, match=r"option \(did you mean 'temperature'\?\); "):
        check_sampling({"temprature": 1.0})
    with pytest.raises(InvalidRequestError, match=r"did you mean constraint=\{'regex': \.\.\.\}"):
        check_sampling({"regex": "a+"})


@pytest.mark.parametrize("kind", [AsyncClient, Client])
@pytest.mark.parametrize(
    "address",
    [
        *[
            "",
            "localhost",
            "localhost:",
            ":50051",
            "h:0",
            "h:65536",
            "h:port",
            "h:1:2",
            "::1:50051",
        ],
        *[
            "http://h:1",
            "dns:///h:1",
            "unix:/tmp/x",
            "h :1",
            "h:1\n",
            "h:\uff11",
            b"h:1",
            None,
            50051,
        ],
    ],
)
def test_addresses_that_are_not_host_and_port_are_refused(kind, address):
    with pytest.raises(InvalidRequestError, match=r"address: found .*allowed: host:port"):
        kind(address)


@pytest.mark.parametrize(
    "address", ["localhost:1", "10.0.0.1:65535", "[::1]:50051", "my_host-1.a:80"]
)
def test_addresses_of_host_and_port_are_taken(address):
    assert check_address(address) == address


def test_a_default_timeout_must_be_a_time():
    for value in [*NOT_A_TIMEOUT, None]:
        with pytest.raises(InvalidRequestError, match="default_timeout_s: found"):
            AsyncClient("h:1", default_timeout_s=value)


def test_none_and_empty_sequences_are_as_good_as_absent():
    checked = check_sampling(dict.fromkeys(SamplingOptions.__annotations__) | {"stop": []})

    assert checked == {"stop": []}


def test_numbers_of_other_libraries_are_taken():
    checked = check_sampling({"top_k": np.int64(3), "top_p": np.float32(0.5), "temperature": 1})

    assert checked == {"top_k": 3, "top_p": 0.5, "temperature": 1.0}
    assert [type(each) for each in checked.values()] == [int, float, float]


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), range(1, 3), np.array([1, 2], np.int32)])
def test_token_ids_may_be_any_sequence_of_integers(ids):
    assert check_token_ids("prompt.token_ids", ids).tolist() == [1, 2]


def test_one_stop_string_may_stand_alone():
    assert check_sampling({"stop": "END"}) == {"stop": ["END"]}


def test_a_chat_of_too_many_messages_is_refused_in_the_routers_words():
    with pytest.raises(InvalidRequestError, match="found 10001 messages; allowed: at most 10000"):
        check_messages("prompt.chat.messages", [{"role": "user", "content": "x"}] * 10_001)


def test_all_wrong_options_are_named_at_once():
    with pytest.raises(InvalidRequestError) as caught:
        check_sampling({"top_p": 2, "temprature": 1, "n": 0, "seed": 5})

    fields = [each.field for each in caught.value.violations]
    assert fields == ["sampling.top_p", "sampling.temprature", "sampling.n"]
    assert all(
        field in line for field, line in zip(fields, str(caught.value).splitlines(), strict=True)
    )


def test_min_tokens_beyond_max_tokens_are_refused():
    with pytest.raises(InvalidRequestError, match=r"min_tokens: found 5; allowed: at most 4"):
        check_sampling({"min_tokens": 5, "max_tokens": 4})


@pytest.mark.parametrize("method", ["generate", "tokenize"])
def test_a_request_beyond_the_size_limit_is_refused_with_size_and_limit(method):
    async def scenario():
        async with AsyncClient("h:1", channel_factory=NoChannel) as client:
            await getattr(client, method)("x" * MAX_MESSAGE_BYTES)

    with pytest.raises(InvalidRequestError, match=r"found a request of \d+ bytes.*67108864 bytes"):
        asyncio.run(scenario())


# Values that the wire can carry, so that the router can be asked too.
REFUSED_BY_BOTH = [
    *({"temperature": each} for each in (-1.0, math.nan, math.inf, 2000.0)),
    *({"top_p": each} for each in (0.0, -1.0, 1.5, math.nan)),
    *({"min_p": each} for each in (-1.0, 1.5, math.nan)),
    *({"repetition_penalty": each} for each in (0.0, 2000.0, math.inf)),
    *({"presence_penalty": each} for each in (-3.0, 3.0, math.nan)),
    *({"frequency_penalty": each} for each in (-3.0, 3.0, math.nan)),
    *({"top_k": -1}, {"seed": 2**64}, {"seed": -1}, {"max_tokens": 0}, {"min_tokens": -1}),
    *({"n": 0}, {"n": 65}, {"logprobs": 21}, {"min_tokens": 5, "max_tokens": 4}),
    *({"stop": ("",)}, {"stop": ("a",) * 17}, {"stop": ("a" * 1025,)}),
    {"stop_token_ids": (1,) * 257},
]
TAKEN_BY_BOTH = [
    *({"temperature": each} for each in (0.0, 1e-3, 1e3)),
    *({"top_p": 1.0}, {"top_p": 1e-6}, {"min_p": 0.0}, {"min_p": 1.0}, {"top_k": 2**32 - 1}),
    *({"repetition_penalty": 1e-3}, {"repetition_penalty": 1e3}, {"seed": 2**64 - 1}, {"n": 64}),
    *({"presence_penalty": -2.0}, {"frequency_penalty": 2.0}, {"max_tokens": 2**32 - 1}),
    *({"min_tokens": 4, "max_tokens": 4}, {"logprobs": 20}, {"stop": ("a" * 1024,) * 16}),
    {"stop_token_ids": (1,) * 256},
]


def judge_as_router(options):
    model = ServedModel(
        name="m",
        max_context_tokens=100,
        vocab_size=100,
        page_size=16,
        fingerprint="f",
        eos_token_ids=(1,),
    )
    complete_sampling(
        AskedSampling(**options),
        defaults=SamplingDefaults(),
        model=model,
        prompt_len=1,
        has_tokenizer=True,
        draw_seed=lambda: 0,
    )


@pytest.mark.parametrize("options", REFUSED_BY_BOTH, ids=lambda options: str(options)[:40])
def test_client_and_router_refuse_with_the_same_words(options):
    with pytest.raises(InvalidRequest) as by_router:
        judge_as_router(options)
    with pytest.raises(InvalidRequestError) as by_client:
        check_sampling(options)

    assert str(by_client.value) == str(by_router.value)


@pytest.mark.parametrize("options", TAKEN_BY_BOTH, ids=lambda options: str(options)[:40])
def test_client_and_router_take_the_same_extremes(options):
    judge_as_router(options)
    check_sampling(options)


def test_errors_survive_a_process_boundary():
    error = pagewire.OverloadedError("full", code="RESOURCE_EXHAUSTED", retry_after_s=3.0)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is pagewire.OverloadedError
        assert (str(again), again.code, again.retry_after_s) == ("full", error.code, 3.0)
