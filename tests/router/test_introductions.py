"""Decode workers hear of prefill workers before requests need them."""

from typing import Any

import pytest

from router import wire
from tests.router.scripted_worker import ScriptedWorker, running_router
from tests.support.virtual_time import run_virtual, wait_until


def test_each_decode_worker_hears_of_all_prefill_workers_that_are_ready() -> None:
    async def main() -> None:
        decodes = [ScriptedWorker(f"decode-{index}") for index in range(2)]
        async with running_router(*decodes) as tested:
            assert not any(each.met for each in decodes), "there is nobody to meet"

            await tested.add(*(ScriptedWorker(f"prefill-{i}", pool="prefill") for i in range(2)))
            both = ["prefill-0:1", "prefill-1:1"]
            await wait_until(lambda: all(each.met[-1:] == [both] for each in decodes))

            late = ScriptedWorker("decode-2")
            await tested.add(late)
            await wait_until(lambda: late.met == [both])

            before = [list(each.met) for each in decodes]
            await tested.add(ScriptedWorker("prefill-0", incarnation=2, pool="prefill"))
            both[0] = "prefill-0:2"
            await wait_until(lambda: all(each.met[-1] == both for each in (*decodes, late)))
            assert [each.met[: len(told)] for each, told in zip(decodes, before, strict=True)] == (
                before
            )
            assert not any(each.submits for each in decodes)

            registry = tested.router.registry
            for worker in registry.ready("prefill"):
                registry.report_broken(worker, "it is gone")
            await wait_until(lambda: all(each.met[-1] == [] for each in (*decodes, late)))
            await wait_until(lambda: all(each.met[-1] == both for each in (*decodes, late)))

    run_virtual(main())


def test_a_decode_worker_that_fails_to_meet_serves_and_is_told_again() -> None:
    async def main() -> None:
        shy = ScriptedWorker("decode-0", is_shy=True)
        async with running_router(shy, ScriptedWorker("prefill-0", pool="prefill")) as tested:
            answer = await tested.generate(max_tokens=3)
            assert answer.error is None
            assert not shy.met

            shy.is_shy = False
            await wait_until(lambda: shy.met == [["prefill-0:1"]], timeout_s=10.0)

    run_virtual(main())


def test_a_bug_in_one_introduction_ends_not_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    meet, num_bugs = wire.meet, 1

    async def crash_once(*args: Any, **options: Any) -> None:
        nonlocal num_bugs
        num_bugs -= 1
        if num_bugs == 0:
            raise ZeroDivisionError("a bug")
        await meet(*args, **options)

    async def main() -> None:
        monkeypatch.setattr(wire, "meet", crash_once)
        worker = ScriptedWorker("decode-0")
        async with running_router(worker, ScriptedWorker("prefill-0", pool="prefill")):
            await wait_until(lambda: worker.met == [["prefill-0:1"]], timeout_s=10.0)

    run_virtual(main())


def test_what_changes_during_introductions_is_told_right_after_them() -> None:
    async def main() -> None:
        slow = ScriptedWorker("decode-0", meet_s=1.0)
        async with running_router(slow) as tested:
            await tested.add(ScriptedWorker("prefill-0", pool="prefill"))
            await tested.add(ScriptedWorker("prefill-1", pool="prefill"))
            assert not slow.met, "it still meets the first one"

            await wait_until(lambda: slow.met[-1:] == [["prefill-0:1", "prefill-1:1"]], timeout_s=3)

    run_virtual(main())


def test_a_slow_decode_worker_does_not_delay_what_others_are_told() -> None:
    async def main() -> None:
        slow, other = ScriptedWorker("decode-0", meet_s=4.0), ScriptedWorker("decode-1")
        async with running_router(slow, other) as tested:
            await tested.add(ScriptedWorker("prefill-0", pool="prefill"))
            await wait_until(lambda: other.met == [["prefill-0:1"]])
            await tested.add(ScriptedWorker("prefill-1", pool="prefill"))
            both = ["prefill-0:1", "prefill-1:1"]

            await wait_until(lambda: other.met[-1:] == [both], timeout_s=0.5)
            assert not slow.met
            await wait_until(lambda: slow.met[-1:] == [both], timeout_s=10.0)

    run_virtual(main())


def test_a_channel_that_was_closed_before_the_call_ends_no_introductions() -> None:
    async def main() -> None:
        closed, other = ScriptedWorker("decode-0"), ScriptedWorker("decode-1")
        async with running_router(closed, other) as tested:
            await tested.router.registry.get("decode-0").channel.close()
            await tested.add(ScriptedWorker("prefill-0", pool="prefill"))
            await wait_until(lambda: other.met == [["prefill-0:1"]])

            await tested.add(ScriptedWorker("decode-0", incarnation=2))
            late = ScriptedWorker("decode-2")
            await tested.add(late)
            await wait_until(lambda: late.met == [["prefill-0:1"]], timeout_s=10.0)

    run_virtual(main())


def test_a_decode_worker_that_drains_still_hears_of_prefill_workers() -> None:
    async def main() -> None:
        leaving = ScriptedWorker("decode-0")
        async with running_router(leaving, ScriptedWorker("decode-1")) as tested:
            leaving.heartbeat["draining"] = True
            await wait_until(lambda: tested.state("decode-0") == "DRAINING")
            await tested.add(ScriptedWorker("prefill-0", pool="prefill"))

            await wait_until(lambda: leaving.met == [["prefill-0:1"]])

    run_virtual(main())
