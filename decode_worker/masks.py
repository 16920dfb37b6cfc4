"""Computes, beside the steps, which tokens may come next in choices with a constraint.

A choice takes part in no step until the mask after its last token is known; other choices go on.
The position of a text in its grammar follows from its tokens alone, so a choice that resumes from
another worker, or after a preemption, gets the same masks.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from decode_worker.errors import InvalidRequest
from decode_worker.request import Choice, Request
from grammars.bits import TokenBits
from grammars.errors import GrammarError
from grammars.store import Grammars
from kv_transfer.driver import RunBlocking
from observability.logs import fields
from worker.background import BackgroundTasks
from worker.errors import InternalError, WorkerError
from worker.sampling_check import constraint_refusal
from worker.wake import Wake

logger = logging.getLogger(__name__)


class TokenMasks:
    """Owns the masks of all choices and the tasks that compute them.

    Args:
        grammars: The grammars of the model.
        run_blocking: Runs work of about 0.1 ms, at worst a tenth of a second, off the loop.
        tasks: Own the work.
        wake: Set when a choice can go on.
        on_failure: Ends a request whose text cannot be followed further.
    """

    def __init__(
        self,
        grammars: Grammars,
        *,
        run_blocking: RunBlocking,
        tasks: BackgroundTasks,
        wake: Wake,
        on_failure: Callable[[Request, WorkerError], None],
    ) -> None:
        self._grammars = grammars
        self._run_blocking = run_blocking
        self._tasks = tasks
        self._wake = wake
        self._on_failure = on_failure
        self._busy: set[Choice] = set()

    def follow(self, choices: Sequence[Choice]) -> None:
        """Begin to compute the masks of choices that are new or have new tokens."""
        due = [choice for choice in choices if choice not in self._busy]
        if due:
            self._busy.update(due)
            self._tasks.start(self._follow(due), name="masks")

    async def _follow(self, choices: Sequence[Choice]) -> None:
        try:
            while choices:  # again for choices that got a token meanwhile, as from a prefill worker
                texts = [_Text(choice) for choice in choices]
                await self._run_blocking(partial(self._match_all, texts))
                choices = [text.choice for text in texts if not self._settle(text)]
        except Exception:
            # A bug: the masks of these texts are unknown from now on, so their requests end.
            requests = dict.fromkeys(choice.request for choice in choices)
            ids = ",".join(request.request_id for request in requests)
            logger.exception("masks_crashed", extra=fields(request_ids=ids))
            for request in requests:
                self._on_failure(request, InternalError())
        finally:
            self._busy.difference_update(choices)
            self._wake.set()

    def _match_all(self, texts: "Sequence[_Text]") -> None:
        for text in texts:
            try:
                matcher = text.matcher or self._grammars.begin(text.constraint, text.salt)
                matcher.accept(text.output[matcher.num_tokens :])
                text.matcher, text.allowed = matcher, matcher.allowed()
            except GrammarError as error:
                text.error = error

    def _settle(self, text: "_Text") -> bool:
        """Take over the results; return whether no work is left."""
        choice = text.choice
        choice.matcher = text.matcher
        if not choice.is_ended and text.error is not None:
            refusal = constraint_refusal(text.constraint, text.error)
            self._on_failure(choice.request, InvalidRequest(refusal))
        elif not choice.is_ended and len(text.output) < len(choice.output):
            return False
        self._busy.discard(choice)
        choice.allowed = text.allowed
        return True


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
