"""Each way to ask for a form over HTTP reaches the worker as the same constraint."""

import json
from collections.abc import Iterator
from typing import Any

import openai as openai_package
import pytest
from openai import OpenAI
from pydantic import BaseModel

from pagewire.protos import common_pb2
from tests.http_gateway.conftest import openai
from tests.http_gateway.parrot import parrot, write_folder
from tests.http_gateway.serving import gateway, real_router
from tests.router.scripted_worker import ScriptedWorker

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "{}"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[OpenAI, ScriptedWorker]]:
    folder = write_folder(tmp_path_factory.mktemp("m"), "{% if tools %}<tool_call>{% endif %}")
    worker = parrot(folder)
    with gateway(lambda: real_router(worker, folder)) as running:
        yield openai(running), worker


def constraint(worker: ScriptedWorker) -> common_pb2.Constraint:
    params = worker.submits[-1].sampling
    assert params.HasField("constraint")
    return params.constraint


def asked(schema: Any) -> dict[str, Any]:
    form = {"name": "x", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


WAYS = {
    "schema": (asked(SCHEMA), {"json_schema": json.dumps(SCHEMA)}),
    "object": ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    "guided_json": ({"guided_json": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}),
    "guided_json-text": (
        {"guided_json": json.dumps(SCHEMA)},
        {"json_schema": json.dumps(SCHEMA)},
    ),
    "guided_regex": ({"guided_regex": "[ab]+"}, {"regex": "[ab]+"}),
    "guided_choice": ({"guided_choice": ["x", "y"]}, {"choice": {"texts": ["x", "y"]}}),
    "guided_grammar": ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    "structured": ({"structured_outputs": {"regex": "a"}}, {"regex": "a"}),
    "structured-object": (
        {"structured_outputs": {"json_object": True, "json": None}},
        {"json_object": True},
    ),
}


@pytest.mark.parametrize(("body", "expected"), WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("path", ["chat", "completions"])
def test_each_way_to_ask_reaches_the_worker(
    served: tuple[OpenAI, ScriptedWorker], body: dict, expected: dict, path: str
) -> None:
    client, worker = served
    if path == "chat":
        client.chat.completions.create(**ASK, extra_body=body)
    else:
        client.completions.create(model="tiny", prompt="x", extra_body=body)

    assert constraint(worker) == common_pb2.Constraint(**expected)


def test_a_response_is_asked_for_by_its_text_format(
    served: tuple[OpenAI, ScriptedWorker],
) -> None:
    client, worker = served
    form = {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}

    answer = client.responses.create(model="tiny", input="{}", text={"format": form})

    assert constraint(worker) == common_pb2.Constraint(json_schema=json.dumps(SCHEMA))
    assert answer.text.format.type == "json_schema"
    assert answer.text.format.schema_ == SCHEMA
    plain = client.responses.create(model="tiny", input="{}")
    assert not worker.submits[-1].sampling.HasField("constraint")
    assert plain.text.format.type == "text"


def test_the_official_client_parses_answers_into_classes(
    served: tuple[OpenAI, ScriptedWorker],
) -> None:
    class Person(BaseModel):
        name: str
        age: int

    client, worker = served
    text = '{"name": "A", "age": 3}'
    answer = client.chat.completions.parse(
        model="tiny", messages=[{"role": "user", "content": text}], response_format=Person
    )

    assert answer.choices[0].message.parsed == Person(name="A", age=3)
    assert "age" in constraint(worker).json_schema


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (asked({"uniqueItems": True}), "response_format.json_schema.schema", "uniqueItems"),
        (asked([]), "response_format.json_schema.schema", "mapping"),
        (asked(False), "response_format.json_schema.schema", "schema is false"),
        ({"guided_json": False}, "guided_json", "schema is false"),
        ({"structured_outputs": {"json": False}}, "structured_outputs.json", "schema is false"),
        ({"guided_regex": False}, "guided_regex", "bool"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "cannot be read"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "absent with"),
        (asked(SCHEMA) | {"guided_regex": "a"}, "guided_regex", "absent with response_format"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "false"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens", "0 where"),
        (asked(SCHEMA) | {"tools": [TOOL]}, "tools", "absent with response_format"),
    ],
)
def test_what_is_wrong_is_named_as_the_request_has_it(
    served: tuple[OpenAI, ScriptedWorker], body: dict[str, Any], param: str, words: str
) -> None:
    client, worker = served
    num_submits = len(worker.submits)

    with pytest.raises(openai_package.BadRequestError) as caught:
        client.chat.completions.create(**ASK, extra_body=body)

    assert caught.value.param == param
    assert words in caught.value.message
    assert len(worker.submits) == num_submits, "a worker was bothered"


def test_tools_that_may_not_be_called_forbid_no_form(
    served: tuple[OpenAI, ScriptedWorker],
) -> None:
    client, worker = served

    client.chat.completions.create(
        **ASK, extra_body={**asked(SCHEMA), "tools": [TOOL], "tool_choice": "none"}
    )

    assert constraint(worker).json_schema
