"""Answers that are held to a form, through a whole cluster in virtual time, and across deaths."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from grammars.constraint import Constraint
from llm_engine.sampling import SamplingParams
from tests.support.fake_cluster import MODEL, FakeCluster
from tests.support.grammar_cases import (
    GRAMMARS,
    JSON_OBJECT,
    choice,
    follows,
    grammar,
    json_schema,
    regex,
)
from tests.support.history import RequestHistory, check_history
from tests.support.oracle import RequestSpec, expected_choices
from tests.support.rarely import rarely
from tests.support.scenario import MAX_CONTEXT_TOKENS, VOCAB_SIZE, ClusterShape
from tests.support.simulator import in_cluster

END = 0
CHARACTERS = 'abcdefghijklmnopqrs0123456789{}[]":, .-truefalsnu\\'
TEXTS = dict(enumerate(sorted(set(CHARACTERS)), start=1))
TEXTS |= {len(TEXTS) + 1: '{"', len(TEXTS) + 2: '":', len(TEXTS) + 3: "true"}
LIST = json_schema({"type": "array", "items": {"enum": ["a", 1, True]}, "maxItems": 6})
NESTED = json_schema(
    {
        "type": "object",
        "properties": {
            "a": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"b": {"enum": [1, True]}},
                    "required": ["b"],
                    "additionalProperties": False,
                },
                "minItems": 1,
                "maxItems": 3,
            }
        },
        "required": ["a"],
        "additionalProperties": False,
    }
)
BRACKETS = 'root ::= part+\npart ::= [ab] | "(" part* ")" | "[" part* "]"'
assert BRACKETS in GRAMMARS
HELD = (
    JSON_OBJECT,
    LIST,
    choice("abc", "abd", "true"),
    regex("[a-d]{3,9}"),
    NESTED,
    grammar(BRACKETS),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of fewer tokens than the model has, without bytes of their own."""
    assert len(TEXTS) + 1 < VOCAB_SIZE
    tokenizer = Tokenizer(
        models.WordLevel({"<end>": END} | {text: each for each, text in TEXTS.items()}, "<end>")
    )
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.decoder = decoders.Fuse()
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def request(name: str, constraint: Constraint | None, **fields: Any) -> RequestSpec:
    rng = random.Random(name)
    params = SamplingParams(
        temperature=1.5,
        seed=rng.randrange(2**32),
        max_tokens=40,
        ignore_eos=constraint is None,
        constraint=constraint,
        **fields.pop("params", {}),
    )
    prompt = tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(fields.pop("num_tokens", 30)))
    return replace(RequestSpec(name=name, prompt=prompt, params=params), **fields)


def mixed_requests(count: int) -> list[RequestSpec]:
    """Return requests of which some are held to a form, some in several choices."""
    return [
        request(
            f"r{index}",
            (*HELD, None, None)[index % 8],
            num_tokens=5 + 7 * (index % 8),
            n=1 + index // 2 % 2,
        )
        for index in range(count)
    ]


def in_text_cluster(
    folder: Path, body: Callable[[FakeCluster], Coroutine[Any, Any, None]], **shape: Any
) -> None:
    in_cluster(FakeCluster(shape=ClusterShape(**shape), text_folder=folder), body)


def check_forms(history: RequestHistory) -> int:
    """Check the answers of a request; return how many of them came to an end."""
    spec = history.spec
    if spec.params.constraint is None:
        expected = expected_choices(spec, model=MODEL, max_context_tokens=MAX_CONTEXT_TOKENS)
        assert check_history(history, expected) == []
        return 0
    num_ended = 0
    for tokens in answers(history):
        assert set(tokens) <= {END, *TEXTS}, "a token that only pads was drawn"
        assert END not in tokens[:-1]
        if tokens[-1] == END:
            num_ended += 1
            assert follows("".join(TEXTS[each] for each in tokens[:-1]), spec.params.constraint)
        else:
            room = MAX_CONTEXT_TOKENS - len(spec.prompt)
            assert len(tokens) == min(spec.params.max_tokens, room)
    return num_ended


def answers(history: RequestHistory) -> list[list[int]]:
    assert history.ends == ["OK"], history.details
    return [
        [token for delta in history.deltas if delta.choice == choice for token in delta.tokens]
        for choice in range(history.spec.n)
    ]


async def generate_all(cluster: FakeCluster, specs: list[RequestSpec]) -> list[RequestHistory]:
    return list(await asyncio.gather(*(cluster.generate(spec) for spec in specs)))


def test_answers_held_to_a_form_and_others_share_steps(folder: Path) -> None:
    async def body(cluster: FakeCluster) -> None:
        histories = await generate_all(cluster, mixed_requests(18))

        assert sum(map(check_forms, histories)) >= 10

    in_text_cluster(folder, body)


def test_tokens_do_not_depend_on_steps_ahead_or_on_who_prefills(folder: Path) -> None:
    seen: list[list[list[list[int]]]] = []

    async def body(cluster: FakeCluster) -> None:
        for worker in cluster.workers.values():
            worker.engine.max_launched = 2 - len(seen) % 2
        seen.append([answers(each) for each in await generate_all(cluster, mixed_requests(12))])

    for local in (0, 0, 1000):
        in_text_cluster(folder, body, local_prefill_max_tokens=local)

    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("after_tokens", [7, *rarely(1, 15)])
def test_a_killed_decode_worker_changes_no_token(folder: Path, after_tokens: int) -> None:
    seen: list[list[list[list[int]]]] = []
    specs = mixed_requests(10)

    async def body(cluster: FakeCluster) -> None:
        tasks = [asyncio.create_task(cluster.generate(spec)) for spec in specs]
        if seen:
            await asyncio.sleep(0.05 + 0.01 * after_tokens)
            cluster.kill("decode-0")
        histories = [await task for task in tasks]
        for history in histories:
            check_forms(history)
        if seen:
            held = [each for each in histories if each.spec.params.constraint]
            assert sum(each.usage.stats.resumptions for each in held) > 0
        seen.append([answers(each) for each in histories])

    for _ in range(2):
        in_text_cluster(folder, body, num_decode=2)

    assert seen[0] == seen[1]


def test_preempted_answers_go_on_where_they_were(folder: Path) -> None:
    seen: list[list[list[list[int]]]] = []
    specs = [request(f"p{index}", LIST, num_tokens=20) for index in range(8)]
    specs += [request("q", None, num_tokens=20)]

    async def body(cluster: FakeCluster) -> None:
        histories = await generate_all(cluster, specs)
        seen.append([answers(each) for each in histories])
        preemptions = sum(each.usage.stats.preemptions for each in histories)
        assert (preemptions > 0) == (len(seen) == 2)

    in_text_cluster(folder, body, decode_pages=400)
    in_text_cluster(folder, body, decode_pages=40)

    assert seen[0] == seen[1]


def test_cancelled_answers_leave_nothing_behind(folder: Path) -> None:
    async def body(cluster: FakeCluster) -> None:
        leaving = [asyncio.create_task(cluster.generate(spec)) for spec in mixed_requests(8)]
        for index, task in enumerate(leaving):
            await asyncio.sleep(0.003 * index)
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        histories = await generate_all(cluster, mixed_requests(6))

        for history in histories:
            check_forms(history)

    in_text_cluster(folder, body)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"min_tokens": 2}, "sampling.min_tokens"),
        ({"ignore_eos": True}, "sampling.ignore_eos"),
    ],
)
def test_what_contradicts_a_constraint_is_refused(
    folder: Path, params: dict[str, Any], field: str
) -> None:
    async def body(cluster: FakeCluster) -> None:
        spec = request("r", LIST)
        history = await cluster.generate(replace(spec, params=replace(spec.params, **params)))

        assert history.ends == ["INVALID_ARGUMENT"]
        assert field in history.details

    in_text_cluster(folder, body)


def test_a_cluster_without_tokenizer_refuses_constraints() -> None:
    async def body(cluster: FakeCluster) -> None:
        history = await cluster.generate(request("r", LIST))

        assert history.ends == ["INVALID_ARGUMENT"]
        assert "sampling.constraint" in history.details

    in_cluster(FakeCluster(), body)
