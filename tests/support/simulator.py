"""Runs scenarios and judges them; the whole point of the fake model and of virtual time."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.support.fake_cluster import MODEL, FakeCluster
from tests.support.history import RequestHistory, check_history
from tests.support.nemesis import Nemesis
from tests.support.oracle import expected_choices
from tests.support.scenario import MAX_CONTEXT_TOKENS, Scenario
from tests.support.virtual_time import run_virtual

ENDS_WITHIN_S = 60.0  # whatever happens, every request ends by then
QUIET_AFTER_S = 30.0  # after the last fault has healed, no page may be held for anybody


@dataclass(kw_only=True, slots=True)
class RunResult:
    """What a run left behind; `violations` is empty after a right one."""

    scenario: Scenario
    histories: list[RequestHistory] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)  # those that really happened
    lost_engines: list[str] = field(default_factory=list)  # workers that ended for their engine
    seconds: float = 0.0  # of virtual time

    def total(self, name: str) -> int:
        """Return the sum of one RequestStats field over all requests that told it."""
        usages = [each.usage for each in self.histories if each.usage is not None]
        return sum(getattr(usage.stats, name) for usage in usages)


def simulate(scenario: Scenario) -> RunResult:
    """Run a scenario to its end and check everything that must hold."""
    result = RunResult(scenario=scenario)
    try:
        # Errors after it are of frozen processes that are cleared away.
        run_virtual(_run_logged(scenario, result), limit_s=2000.0)
    except Exception as error:
        result.violations.append(f"the run broke: {type(error).__name__}: {error}")
    for history in result.histories:
        expected = expected_choices(
            history.spec, model=MODEL, max_context_tokens=MAX_CONTEXT_TOKENS
        )
        result.violations += check_history(
            history, expected, allowed_ends=scenario.allowed_ends_of(history.spec)
        )
        if history.ended_at > ENDS_WITHIN_S:
            result.violations.append(f"request {history.spec.name} starved")
    return result


def in_cluster(
    cluster: FakeCluster, body: Callable[[FakeCluster], Coroutine[Any, Any, None]]
) -> None:
    """Run a hand-written scenario on a started cluster; check pools, tasks and calls at its end."""

    async def run() -> None:
        await cluster.start()
        await body(cluster)
        await cluster.wait_quiescent(QUIET_AFTER_S)
        await cluster.check_at_rest()
        assert await cluster.stop() == []

    run_virtual(run(), limit_s=2000.0)


async def _run_logged(scenario: Scenario, result: RunResult) -> None:
    with ErrorLog() as errors:
        await _run(scenario, result)
    if scenario.toxin is None and not {"fail_pass", "break_engine"} & result.faults.keys():
        result.violations += [f"logged as an error: {each}" for each in errors.messages]


async def _run(scenario: Scenario, result: RunResult) -> None:
    cluster = FakeCluster(
        shape=scenario.shape,
        seed=scenario.seed,
        toxin=scenario.toxin,
        is_deadly=scenario.is_deadly,
    )
    nemesis = Nemesis(cluster)
    result.faults = nemesis.ledger
    await cluster.start()
    clients = [asyncio.create_task(cluster.generate(spec)) for spec in scenario.requests]
    await nemesis.run(scenario.faults)
    result.histories += await asyncio.gather(*clients)
    try:
        await cluster.wait_quiescent(QUIET_AFTER_S)
        await cluster.check_at_rest()
    except AssertionError as error:
        result.violations.append(str(error))
    result.violations += [f"left behind: {each}" for each in await cluster.stop()]
    result.lost_engines += cluster.lost_engines
    result.seconds = asyncio.get_running_loop().time()


def explain(results: Iterable[RunResult], rerun: Callable[[int], str]) -> str:
    """Return what to print for failing runs: violations, and how to run one again."""
    lines = []
    for result in results:
        seed = result.scenario.seed
        lines += [f"seed {seed}: {len(result.violations)} violations; again: {rerun(seed)}"]
        lines += [f"  {violation}" for violation in result.violations[:8]]
        lines += [f"  fault: {fault}" for fault in result.scenario.faults]
    return "\n".join(lines)


class ErrorLog(logging.Handler):
    """Collects what anybody logs as an error: in a run, nothing should need it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.messages.append(f"{record.name}: {record.getMessage()} {error!r}")

    def __enter__(self) -> "ErrorLog":
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        logging.getLogger().removeHandler(self)
