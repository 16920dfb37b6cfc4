"""Tries constraints before a worker gets them, in child processes that they may crash.

If a child compiles a constraint within its limits, so does a worker: the counts are the same there,
and the limits higher. See docs/decisions/0032-answers-held-to-a-form.md.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from grammars.constraint import Constraint
from grammars.errors import InvalidConstraint, NoVocabulary
from pagewire.protos.call_tasks import mark_seen
from router.child_pool import Answer, ChildLimits, ChildPool
from router.errors import ChildCrash, ChildLimit
from router.request import ServedModel
from router.tenants.tenant import TenantRules

MAX_ANSWER_BYTES = 1 << 16
CPU_S = 0.7  # of one: a client whose constraint is too large knows within a second
MAX_KNOWN = 1000  # constraints that were tried
MAX_KNOWN_BYTES = 4 << 20  # of them all


class ConstraintChecker(Protocol):
    """Decides whether constraints can be served."""

    async def check(self, constraint: Constraint, model: ServedModel, tenant: TenantRules) -> None:
        """Return if a worker can compile a constraint of a tenant, else raise.

        Raises:
            InvalidConstraint: It is wrong, or exceeds a limit.
            NoVocabulary: The model's tokenizer cannot be used.
            Overloaded: Too many constraints wait to be tried, or too many of this tenant.
        """
        ...

    async def close(self) -> None:
        """End; no check may be under way."""
        ...


@dataclass(eq=False, slots=True)
class _Trial:
    """A constraint that was tried, or is about to be."""

    task: asyncio.Task[None]
    num_callers: int = 0  # that wait for it


class ChildChecker:
    """Implements ConstraintChecker; its children start with the first constraint.

    Args:
        folder: With the model's tokenizer.json.
    """

    def __init__(
        self, folder: Path, *, num_children: int = 2, limits: ChildLimits | None = None
    ) -> None:
        self._folder = folder
        self._num_children = num_children
        self._limits = limits or ChildLimits(cpu_s=CPU_S)
        self._starting: asyncio.Task[ChildPool] | None = None
        # By tenant: nobody waits in another one's line, or learns what others have asked for.
        self._known: OrderedDict[tuple[str, Constraint], _Trial] = OrderedDict()
        self._num_bytes = 0

    async def check(self, constraint: Constraint, model: ServedModel, tenant: TenantRules) -> None:
        key = tenant.name, constraint
        trial = self._known.get(key)
        if trial is None:
            trying = self._try(constraint, model, tenant)
            trial = _Trial(asyncio.create_task(trying, name="constraint-check"))
            trial.task.add_done_callback(mark_seen)  # of a constraint whose callers left
            self._keep(key, trial)
        else:
            self._known.move_to_end(key)
        trial.num_callers += 1
        try:
            await asyncio.shield(trial.task)
        finally:
            trial.num_callers -= 1
            if not (trial.num_callers or trial.task.done()):
                trial.task.cancel()  # nobody waits for it, so it waits no longer
                self._drop(key, trial)
            elif trial.task.done() and (trial.task.cancelled() or trial.task.exception()):
                self._drop(key, trial)

    async def close(self) -> None:
        for each in self._known.values():
            each.task.cancel()
        if self._starting:
            self._starting.cancel()
            await asyncio.wait({self._starting})
            if not self._starting.cancelled() and not self._starting.exception():
                await self._starting.result().close()

    async def _try(self, constraint: Constraint, model: ServedModel, tenant: TenantRules) -> None:
        pool = await self._pool(model)
        question = {
            "kind": constraint.kind.value,
            "text": constraint.text,
            "choices": constraint.choices,
        }
        try:
            answer = await pool.ask(question, tenant)
        except ChildCrash:
            raise InvalidConstraint("one that is too large to check", "a simpler one") from None
        except ChildLimit as limit:
            raise InvalidConstraint(f"one that, compiled, {limit}", "a simpler one") from None
        if "found" in answer:
            raise InvalidConstraint(answer["found"], answer["allowed"])

    async def _pool(self, model: ServedModel) -> ChildPool:
        """Return the children, started."""
        if self._starting is None or (self._starting.done() and self._starting.exception()):
            self._starting = asyncio.create_task(self._start(model), name="grammar-children")
            self._starting.add_done_callback(mark_seen)
        return await asyncio.shield(self._starting)

    async def _start(self, model: ServedModel) -> ChildPool:
        settings = {
            "folder": str(self._folder),
            "vocab_size": model.vocab_size,
            "end_token_ids": model.eos_token_ids,
        }
        pool = ChildPool(
            "router.grammar_child",
            lambda: settings,
            check_ready=_check_ready,
            num_children=self._num_children,
            limits=self._limits,
            max_answer_bytes=MAX_ANSWER_BYTES,
            busy="constraints wait to be compiled",
        )
        try:
            await pool.start()
        except ChildLimit as limit:
            raise NoVocabulary(f"the process that reads it {limit}") from None
        return pool

    def _keep(self, key: tuple[str, Constraint], trial: _Trial) -> None:
        self._known[key] = trial
        self._num_bytes += key[1].num_bytes
        while len(self._known) > MAX_KNOWN or self._num_bytes > MAX_KNOWN_BYTES:
            (_, oldest), _ = self._known.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def _drop(self, key: tuple[str, Constraint], trial: _Trial) -> None:
        if self._known.get(key) is trial:
            del self._known[key]
            self._num_bytes -= key[1].num_bytes


def _check_ready(answer: Answer) -> None:
    if "error" in answer:
        raise NoVocabulary(answer["error"])
