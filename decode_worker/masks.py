"""Computes, beside the steps, which tokens may come next in choices with a constraint.

A choice takes part in no step until the mask after its last token is known; other choices go on.
The position of a text in its grammar follows from its tokens alone, so a choice that resumes from
another worker, or after a preemption, gets the same masks.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from decode_worker.errors import InvalidRequest
from decode_worker.request import Choice, Request, TokenDelta
from grammars.bits import TokenBits
from grammars.errors import GrammarError
from grammars.store import Grammars
from observability.logs import fields
from worker.errors import InternalError, WorkerError
from worker.grammar_threads import GrammarThreads
from worker.sampling_check import constraint_refusal
from worker.wake import Wake

logger = logging.getLogger(__name__)


class TokenMasks:
    """Owns the masks of all choices.

    Args:
        grammars: The grammars of the model.
        threads: Where they are worked on.
        wake: Set when a choice can go on.
        on_failure: Ends a request whose text cannot be followed further.
    """

    def __init__(
        self,
        grammars: Grammars,
        *,
        threads: GrammarThreads,
        wake: Wake,
        on_failure: Callable[[Request, WorkerError], None],
    ) -> None:
        self._grammars = grammars
        self._threads = threads
        self._wake = wake
        self._on_failure = on_failure
        self._busy: set[Choice] = set()

    def progressed(self, progress: Sequence[TokenDelta]) -> None:
        """Begin to compute the masks after new tokens, before a request that ended is forgotten."""
        self.follow(
            [
                choice
                for delta in progress
                if delta.request.params.constraint is not None and delta.finish_reason is None
                for choice in delta.request.choices
                if choice.index == delta.choice
            ]
        )

    def follow(self, choices: Sequence[Choice]) -> None:
        """Begin to compute the masks of choices that are new or have new tokens."""
        for choice in choices:
            if choice not in self._busy:
                self._busy.add(choice)
                self._follow(choice)

    def _follow(self, choice: Choice) -> None:
        text = _Text(choice)
        self._threads.add(text.salt, partial(self._match, text), partial(self._followed, text))

    def _match(self, text: "_Text") -> None:
        if text.choice.is_ended:
            return
        try:
            matcher = text.matcher or self._grammars.begin(text.constraint, text.salt)
            matcher.accept(text.output[matcher.num_tokens :])
            text.matcher, text.allowed = matcher, matcher.allowed()
        except GrammarError as error:
            text.error = error

    def _followed(self, text: "_Text", bug: Exception | None) -> None:
        """Take over the result; follow again if the choice got a token meanwhile.

        So do choices whose first token came from a prefill worker.
        """
        choice, request = text.choice, text.choice.request
        choice.matcher = text.matcher
        if bug is not None:  # the text's masks are unknown from now on
            if not choice.is_ended:
                told = fields(request_id=request.request_id)
                logger.error("masks_crashed", exc_info=bug, extra=told)
                self._on_failure(request, InternalError())
        elif not choice.is_ended and text.error is not None:
            refusal = constraint_refusal(text.constraint, text.error)
            self._on_failure(request, InvalidRequest(refusal))
        elif not choice.is_ended and len(text.output) < len(choice.output):
            self._follow(choice)
            return
        choice.allowed = text.allowed
        self._busy.discard(choice)
        self._wake.set()


class _Text:
    """A snapshot of a choice, for a thread."""

    def __init__(self, choice: Choice) -> None:
        constraint = choice.request.params.constraint
        assert constraint is not None, "only choices with a constraint are followed"
        self.choice = choice
        self.constraint = constraint
        self.salt = choice.request.salt
        self.output = tuple(choice.output)
        self.matcher = choice.matcher
        self.allowed: TokenBits | None = None
        self.error: GrammarError | None = None
