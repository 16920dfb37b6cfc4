"""Answers that are held to a form, from text to text through real engines and connections."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cluster.demo_model import write_demo_model
from pagewire import AsyncClient, InvalidRequestError
from tests.cluster.in_process import in_process_cluster
from tests.support.trained_model import trained_path

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "likes": {"type": "array", "items": {"enum": ["sea", "salt", "gulls"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
CHAIN = "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(3000)) + '\na3000: "x"\n'


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    write_demo_model(folder)
    return folder


def in_cluster(model: Path, body: Callable[[AsyncClient], Awaitable[Any]], **options: Any) -> Any:
    async def scenario() -> Any:
        sizes = {"num_prefill": 1, "num_decode": 1} | options
        async with in_process_cluster(model, has_text=True, **sizes) as client:
            return await body(client)

    return asyncio.run(scenario())


def test_each_kind_of_form_is_kept_beside_answers_without_one(demo: Path) -> None:
    async def body(client: AsyncClient) -> None:
        async def ask(constraint: Any, seed: int) -> Any:
            return await client.generate(
                "the sea", constraint=constraint, seed=seed, temperature=1.5, max_tokens=120
            )

        plain = await client.generate("the sea", seed=1, max_tokens=40, ignore_eos=True)
        asked: list[Any] = [
            {"json_schema": SCHEMA},
            {"json_object": True},
            {"regex": "[a-f]{3,8}( sea)?"},
            {"choice": ["yes", "no", "per haps"]},
            {"grammar": 'root ::= "x" y*\ny ::= "," [0-9]'},
        ]
        tasks = [ask(each, seed) for each in asked for seed in range(2)]
        beside = client.generate("the sea", seed=1, max_tokens=40, ignore_eos=True)
        *found, again = await asyncio.gather(*tasks, beside)

        assert again.token_ids == plain.token_ids
        assert again.text == plain.text
        ended = [each for each in found if each.finish_reason == "stop"]
        assert len(ended) >= 6
        for each in found[0:2]:
            if each.finish_reason == "stop":
                jsonschema.validate(json.loads(each.text), SCHEMA)
        for each in found[6:8]:
            assert each.text in ("yes", "no", "per haps")
            assert each.finish_reason == "stop"
        assert all(each.usage.pages_moved > 0 for each in found), "none was prefilled elsewhere"

    in_cluster(demo, body)


def test_hostile_constraints_are_refused_and_other_streams_get_their_tokens(demo: Path) -> None:
    hostile: list[Any] = [
        {"grammar": CHAIN},
        {"regex": "(" * 5000 + "a" + ")" * 5000},
        {"json_schema": {"$ref": "http://169.254.169.254/latest"}},
        {"json_schema": {"description": "x" * (3 << 20)}},
        {"json_schema": {"type": "array", "uniqueItems": True}},
    ]

    async def body(client: AsyncClient) -> None:
        options: dict[str, Any] = {"seed": 1, "max_tokens": 60, "ignore_eos": True}
        plain = await client.generate("the sea", **options)
        beside = asyncio.create_task(client.generate("the sea", **options))
        outcomes = await asyncio.gather(
            *(client.generate("x", constraint=each, max_tokens=5) for each in hostile),
            return_exceptions=True,
        )

        for outcome in outcomes:
            assert isinstance(outcome, InvalidRequestError), outcome
            assert outcome.violations[0].field.startswith("sampling.constraint")
        assert (await beside).token_ids == plain.token_ids
        good = await client.generate("x", constraint={"choice": ["a"]}, max_tokens=5)
        assert good.text == "a"

    in_cluster(demo, body)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_trained_model_says_in_json_what_it_was_told() -> None:
    question = "Alice is 41 years old and likes gulls. Tell me about Alice, in JSON."

    async def body(client: AsyncClient) -> Any:
        return await client.chat(
            [{"role": "user", "content": question}],
            constraint={"json_schema": SCHEMA},
            temperature=0.0,
            max_tokens=60,
        )

    answer = in_cluster(
        trained_path(), body, page_size=16, num_pages=600, chunk_pages=16, is_large=True
    )

    found = json.loads(answer.text)
    jsonschema.validate(found, SCHEMA)
    assert answer.finish_reason == "stop"
    assert found["name"] == "Alice"
    assert found["age"] == 41
