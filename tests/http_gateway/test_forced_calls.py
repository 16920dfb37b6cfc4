"""Answers that must call functions, by OpenAI's client, before a model that draws at random."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai as openai_package
import pytest
from openai import OpenAI

from grammars.matcher import Grammar, Vocabulary
from grammars.vocabulary import read_vocabulary
from grammars.wire import constraint_from_proto
from pagewire import Client, InvalidRequestError, forced_calls
from pagewire.protos import worker_pb2
from pagewire.protos.token_ids import pack_token_ids
from tests.http_gateway.conftest import gateways, openai
from tests.http_gateway.serving import Gateway
from tests.router.scripted_worker import EOS, LENGTH, STOP, ScriptedWorker, Session
from tests.support.token_bits import token_ids

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]
SCHEMAS = {"weather": SCHEMA, "time": {"maxProperties": 0}}
FORMATS = ("hermes", "llama3_json", "mistral")
ONE = {"type": "function", "function": {"name": "weather"}}


def random_model(folder: Path) -> ScriptedWorker:
    """Return a worker whose answers are drawn at random from those that their form allows."""
    vocabulary: list[Vocabulary] = []
    rng = random.Random(0)

    async def serve(session: Session, submit: worker_pb2.SubmitRequest) -> None:
        if not vocabulary:
            known = read_vocabulary(folder, 400)
            known.texts[EOS] = b""  # a text in the tokenizer, the end to this worker
            vocabulary.append(Vocabulary(known, [EOS]))
        constraint = constraint_from_proto(submit.sampling)
        assert constraint is not None
        matcher = Grammar(constraint, vocabulary[0]).begin()
        for index in range(submit.sampling.max_tokens):
            allowed = list(token_ids(matcher.allowed()))
            token_id = EOS if EOS in allowed and rng.random() < 0.7 else rng.choice(allowed)
            if token_id != EOS:
                matcher.accept([token_id])
            is_last = index == submit.sampling.max_tokens - 1
            finish = STOP if token_id == EOS else LENGTH if is_last else 0
            delta = worker_pb2.TokenDelta(
                request_id=submit.request_id,
                attempt=submit.attempt,
                first_index=index,
                token_ids=pack_token_ids([token_id]),
                finish_reason=finish,
            )
            session.send(delta)
            await asyncio.sleep(0)
            if finish:
                return

    return ScriptedWorker("decode-0", serve=serve, max_context_tokens=4096)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Gateway]]:
    with gateways(tmp_path_factory.mktemp, random_model) as start:
        yield start


@pytest.fixture(params=FORMATS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def client(models: Callable[[str], Gateway], kind: str) -> OpenAI:
    return openai(models(kind))


def ask(**options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "x"}]
    return {"model": "tiny", "messages": messages, "max_tokens": 2000, "tools": TOOLS, **options}


def check(calls: list[tuple[str, str]]) -> None:
    assert calls
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def made(message: Any) -> list[tuple[str, str]]:
    return [(each.function.name, each.function.arguments) for each in message.tool_calls or ()]


def test_an_answer_that_must_call_consists_of_calls(client: OpenAI) -> None:
    seen = set()
    for _ in range(10):
        [choice] = client.chat.completions.create(**ask(tool_choice="required")).choices

        check(made(choice.message))
        assert not choice.message.content
        assert choice.finish_reason == "tool_calls"
        seen |= {name for name, _ in made(choice.message)}
    assert seen == {"weather", "time"}


def test_a_function_that_is_named_is_the_one_that_is_called(client: OpenAI) -> None:
    for _ in range(5):
        [choice] = client.chat.completions.create(**ask(tool_choice=ONE)).choices

        check(made(choice.message))
        assert {name for name, _ in made(choice.message)} == {"weather"}
        assert choice.finish_reason == "stop", "as OpenAI has it"


def test_one_call_is_made_if_only_one_is_wanted(client: OpenAI) -> None:
    for _ in range(5):
        answer = client.chat.completions.create(
            **ask(tool_choice="required", parallel_tool_calls=False)
        )
        message = answer.choices[0].message

        check(made(message))
        assert len(made(message)) == 1


def test_forced_calls_are_streamed(client: OpenAI) -> None:
    request = ask(tool_choice="required")
    with client.chat.completions.stream(**request) as stream:
        [choice] = stream.get_final_completion().choices

    check(made(choice.message))
    assert choice.finish_reason == "tool_calls"


def test_strict_functions_are_parsed_by_the_official_client(client: OpenAI) -> None:
    strict = {**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}
    answer = client.chat.completions.parse(**ask(tools=[strict], tool_choice="required"))

    for each in answer.choices[0].message.tool_calls or ():
        assert isinstance(each.function.parsed_arguments, dict)
        check([(each.function.name, each.function.arguments)])


def test_a_response_makes_the_calls_that_it_must(client: OpenAI) -> None:
    tools = [{"type": "function", "strict": True, **each["function"]} for each in TOOLS]
    named: Any = {"type": "function", "name": "time"}
    every = client.responses.create(model="", input="x", tools=tools, tool_choice="required")
    one = client.responses.create(model="", input="x", tools=tools, tool_choice=named)

    check([(each.name, each.arguments) for each in every.output])
    assert {each.name for each in one.output} == {"time"}
    assert one.tool_choice.name == "time"


def test_a_grpc_client_holds_answers_to_calls(models: Callable[[str], Gateway], kind: str) -> None:
    address = models(kind).router_address
    with Client(address) as client:
        [model] = client.list_models()
        constraint = forced_calls(model, TOOLS, function="weather", is_parallel=False)
        answer = client.chat(
            [{"role": "user", "content": "x"}],
            tools=TOOLS,
            constraint=constraint,
            max_tokens=2000,
            skip_special_tokens=False,
        )

    begin = {
        "hermes": '<tool_call>\n{"name": "weather", "arguments": ',
        "llama3_json": '{"name": "weather", "parameters": ',
        "mistral": "[TOOL_CALLS]weather[ARGS]",
    }[kind]
    assert answer.text.startswith(begin)


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"tool_choice": "always"}, "tool_choice", "'required', or a function"),
        ({"tool_choice": 5}, "tool_choice", "'required', or a function"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "the function ''"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.type", "'function'"),
        ({"tool_choice": {**ONE, "x": 1}}, "tool_choice.x", "unknown"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "one of the tools: weather, time",
        ),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "without tools"),
        ({"tool_choice": ONE, "tools": []}, "tool_choice", "there is none"),
        ({"tool_choice": "required", "guided_regex": "a"}, "tools", "absent with guided_regex"),
        ({"tool_choice": "required", "min_tokens": 3}, "min_tokens", "0 where"),
        (
            {
                "tool_choice": "required",
                "tools": [*TOOLS, {**ONE, "function": {"name": "f", "parameters": {"not": {}}}}],
            },
            "tools",
            "parameters of 'f'",
        ),
    ],
)
def test_what_cannot_be_called_is_refused_by_its_field(
    models: Callable[[str], Gateway], options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai_package.BadRequestError) as caught:
        openai(models("hermes")).chat.completions.create(**ask(max_tokens=5), extra_body=options)

    assert caught.value.param == param
    assert words in caught.value.message


def test_calls_that_no_template_teaches_cannot_be_forced(
    models: Callable[[str], Gateway],
) -> None:
    served = models("plain")
    with pytest.raises(openai_package.BadRequestError, match="no known format of calls") as caught:
        openai(served).chat.completions.create(**ask(tool_choice="required"))
    assert caught.value.param == "tools"
    with Client(served.router_address) as client:
        [model] = client.list_models()
        with pytest.raises(InvalidRequestError, match="has a known format of tool calls"):
            forced_calls(model, TOOLS)
