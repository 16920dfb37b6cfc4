"""Tries constraints at once, without a child process: for virtual time."""

from pathlib import Path

from grammars.constraint import Constraint
from grammars.matcher import Grammar, Vocabulary
from grammars.vocabulary import read_vocabulary
from router.request import ServedModel
from router.tenants.tenant import TenantRules


class InlineChecker:
    """Implements router.constraint_check.ConstraintChecker."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def check(self, constraint: Constraint, model: ServedModel, tenant: TenantRules) -> None:
        tokens = read_vocabulary(self._folder, model.vocab_size)
        Grammar(constraint, Vocabulary(tokens, model.eos_token_ids))

    async def close(self) -> None:
        pass
