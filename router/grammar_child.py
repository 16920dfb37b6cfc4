"""The process in which constraints are tried; router/constraint_check.py starts it.

It gets the model's tokenizer, and answers each constraint with {} if it can be compiled, otherwise
with the fault: {"found": ..., "allowed": ...}.
"""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grammars.constraint import Constraint, ConstraintKind
from grammars.errors import InvalidConstraint, NoVocabulary
from grammars.matcher import Grammar, Vocabulary
from grammars.vocabulary import read_vocabulary
from router.child_side import Answer, Work, serve

# Less than a worker's thread has: a constraint too deep for a worker ends this process first.
STACK_BYTES = 2 << 20


def main() -> None:
    """Serve the router."""
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    serve(_make_work)


def _make_work(settings: Any) -> tuple[Callable[[], Answer], Work]:
    try:
        tokens = read_vocabulary(Path(settings["folder"]), settings["vocab_size"])
    except NoVocabulary as error:
        answer = {"error": error.reason}
        return lambda: answer, lambda _: answer
    vocabulary = Vocabulary(tokens, settings["end_token_ids"])

    def check(question: Any) -> Answer:
        constraint = Constraint(
            kind=ConstraintKind(question["kind"]),
            text=question["text"],
            choices=tuple(question["choices"]),
        )
        try:
            Grammar(constraint, vocabulary)
        except InvalidConstraint as error:
            return {"found": error.found, "allowed": error.allowed}
        return {}

    return dict, check
