"""Constraints are tried in processes that they may end, and only once each."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from grammars.constraint import MAX_BYTES, Constraint
from grammars.errors import InvalidConstraint, NoVocabulary
from router.child_pool import ChildLimits, ChildPool
from router.constraint_check import ChildChecker
from router.request import ServedModel
from router.tenants.tenant import NO_TENANT, TenantRules
from tests.router.tokenizers_for_tests import byte_level
from tests.support.grammar_cases import JSON_OBJECT, choice, grammar, json_schema, regex
from tests.support.wall_clock import assert_within

MODEL = ServedModel(
    name="m",
    fingerprint="f",
    vocab_size=340,
    max_context_tokens=100,
    page_size=8,
    eos_token_ids=(1,),
)
# Each rule is the next one: who calls himself for each of them comes to the end of his stack.
CHAIN = grammar(
    "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(3000)) + '\na3000: "x"\n'
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    byte_level().save(str(folder / "tokenizer.json"))
    return folder


@asynccontextmanager
async def started(folder: Path, **options: Any) -> AsyncIterator[ChildChecker]:
    checker = ChildChecker(folder, **options)
    try:
        yield checker
    finally:
        await checker.close()
        assert not children()


def children() -> list[psutil.Process]:
    return [
        each
        for each in psutil.Process().children()
        if each.status() != psutil.STATUS_ZOMBIE and "grammar_child" in str(each.cmdline())
    ]


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(60):
            return await scenario

    return asyncio.run(limited())


async def reason(checker: ChildChecker, constraint: Constraint) -> str:
    with pytest.raises(InvalidConstraint) as caught:
        await checker.check(constraint, MODEL, NO_TENANT)
    return str(caught.value)


def test_what_can_be_served_passes_and_what_cannot_is_told(folder: Path) -> None:
    async def scenario() -> None:
        async with started(folder, num_children=1) as checker:
            assert not children(), "nobody has asked yet"
            for good in (JSON_OBJECT, choice("a"), regex("[a-z]+"), grammar('root ::= "x"')):
                await checker.check(good, MODEL, NO_TENANT)
            assert "look-around" in await reason(checker, regex("(?=a)b"))
            assert "uniqueItems" in await reason(checker, json_schema({"uniqueItems": True}))
            assert "bytes" in await reason(checker, regex("a" * (MAX_BYTES + 1)))
            assert len(children()) == 1

    run(scenario())


def test_a_constraint_that_ends_its_process_is_refused_and_the_next_one_is_served(
    folder: Path,
) -> None:
    async def scenario() -> None:
        async with started(folder, num_children=1) as checker:
            assert "too large to check" in await reason(checker, CHAIN)
            await checker.check(choice("a"), MODEL, NO_TENANT)

    run(scenario())


def test_a_constraint_that_takes_too_much_time_is_refused(folder: Path) -> None:
    slow = json_schema({"properties": {f"p{i}": {} for i in range(4000)}})

    async def scenario() -> None:
        async with started(folder, num_children=1, limits=ChildLimits(cpu_s=0.1)) as checker:
            assert "processor time" in await reason(checker, slow)

    run(scenario())


def test_a_tenant_does_not_learn_from_the_time_what_another_one_has_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    ask = ChildPool.ask

    async def noting(pool: ChildPool, question: Any, *more: Any, **named: Any) -> Any:
        asked.append(question["choices"])
        return await ask(pool, question, *more, **named)

    monkeypatch.setattr(ChildPool, "ask", noting)

    async def scenario() -> None:
        async with started(folder, num_children=1) as checker:
            for name in ("one", "other", "one", "other"):
                await checker.check(choice("a"), MODEL, TenantRules(name=name))

    run(scenario())
    assert asked == [("a",), ("a",)]


def test_who_asks_for_the_same_at_once_or_again_waits_for_one_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Constraint] = []
    real = ChildChecker._try

    async def noted(
        self: ChildChecker, constraint: Constraint, model: ServedModel, tenant: TenantRules
    ) -> None:
        asked.append(constraint)
        await real(self, constraint, model, tenant)

    monkeypatch.setattr(ChildChecker, "_try", noted)

    async def scenario() -> None:
        async with started(folder) as checker:
            async with asyncio.TaskGroup() as group:
                for _ in range(5):
                    group.create_task(checker.check(choice("a"), MODEL, NO_TENANT))
            await checker.check(choice("a"), MODEL, NO_TENANT)
            for _ in range(2):
                await reason(checker, regex("(a"))
            leaving = asyncio.create_task(checker.check(choice("b"), MODEL, NO_TENANT))
            staying = asyncio.create_task(checker.check(choice("b"), MODEL, NO_TENANT))
            await asyncio.sleep(0)
            leaving.cancel()
            await staying

    run(scenario())

    assert asked == [choice("a"), regex("(a"), regex("(a"), choice("b")]


def test_a_tokenizer_that_cannot_be_read_is_told_each_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(tmp_path) as checker:
            for text in "ab":
                with pytest.raises(NoVocabulary, match="cannot be read"):
                    await checker.check(choice(text), MODEL, NO_TENANT)

    run(scenario())


def test_the_event_loop_goes_on_while_constraints_are_tried(folder: Path) -> None:
    """Counted in processor time of this thread: others may want the cores."""
    hostile = [
        CHAIN,
        regex("(" * 5000 + "a" + ")" * 5000),
        json_schema({"enum": [f"{i:x}" * 3 for i in range(4000)]}),
        regex("|".join(f"{i:x}" for i in range(10_000))),
        grammar("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    ]

    async def scenario() -> float:
        async with started(folder) as checker:
            await checker.check(choice("a"), MODEL, NO_TENANT)
            before = time.thread_time()
            await asyncio.gather(
                *(checker.check(each, MODEL, NO_TENANT) for each in hostile), return_exceptions=True
            )
            return time.thread_time() - before

    assert threading.current_thread() is threading.main_thread()
    assert_within(run(scenario()), 0.5)
