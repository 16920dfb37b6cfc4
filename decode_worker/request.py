"""A request on its decode worker: choices, and groups of choices that are prefilled together.

Life of a choice:
1. WAITING    in a PrefillGroup without pages; a new request is one group of all its choices
2. RECEIVING  the group has pages and a prefill worker fills them; its first tokens are reported
              when they are known, which is before the last page has arrived
   COMPUTING  ... or this worker fills them, chunk by chunk
3. JOINING    pages and first tokens have arrived; the next step forks the pages, one set per choice
4. RUNNING    it has a seat in the engine's batch: one token per step
5. ended      finished or cancelled; a request ends with its last choice

Preemption takes a choice from RUNNING back to WAITING, in a separate group.

A step is in flight from its launch until it is settled. Its choices keep pages and seats that long:
later steps skip a choice that ended meanwhile, and it gives them back when the step is settled.
"""

import enum
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from grammars.bits import TokenBits
from kv_cache.layout import num_pages_for
from kv_cache.prefix_cache import SequencePages
from llm_engine.drawing import FinishReason
from llm_engine.sampling import SampledToken, SamplingParams
from observability.tracing import NO_SPAN, NoSpan
from pagewire.protos.trace_context import NO_TRACE, TraceContext
from worker.identity import WorkerIdentity

if TYPE_CHECKING:  # loaded with the first constraint
    from grammars.matcher import Matcher


@dataclass(slots=True)
class RequestStats:
    """What the request cost, on this worker and on others; see common.proto."""

    decode_cached_tokens: int = 0
    prefill_cached_tokens: int = 0
    prefill_computed_tokens: int = 0
    decode_computed_tokens: int = 0
    pages_moved: int = 0
    bytes_moved: int = 0
    preemptions: int = 0
    prefill_retries: int = 0
    cached_tokens: int = 0  # prompt tokens that needed no computation
    queue_ms: int = 0  # until its prompt was begun, here or elsewhere


@dataclass(eq=False, kw_only=True, slots=True)
class Request:
    """One submitted request. Owned by the scheduler from submission to its end."""

    request_id: str
    attempt: int
    prompt: Sequence[int]  # an array, which costs little however long it is
    params: SamplingParams
    emitted: Mapping[int, Sequence[int]]  # choice index |-> tokens delivered before this attempt
    first_stream: int = 0  # the router's number of choice 0; the others' numbers follow
    salt: bytes = b""
    cache_share: float = 1.0  # part of each worker's pages that its salt may keep
    candidates: tuple[WorkerIdentity, ...] = ()  # prefill workers, best first
    timeout_s: float | None = None
    num_failed_passes: int = 0  # here and elsewhere, since the last that succeeded
    trace: TraceContext = NO_TRACE  # of the router's span; empty: not traced

    span: NoSpan = NO_SPAN
    arrival: int = -1  # 0, 1, 2 ...; the age by which pages and places are given
    arrived_s: float = 0.0  # engine time before it arrived
    choices: list["Choice"] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    passes_s: float = 0.0  # engine time of the passes here that computed some of its prompt
    is_account_due: bool = False  # the next delta carries its cost so far

    def __post_init__(self) -> None:
        self.stats.cached_tokens = len(self.prompt)

    def computed_from(self, position: int) -> None:
        """Note that tokens from this position on were, or may have been, computed."""
        self.stats.cached_tokens = min(self.stats.cached_tokens, position)

    @property
    def is_suspect(self) -> bool:
        """Whether it must run alone: a pass that it took part in failed."""
        return self.num_failed_passes > 0

    @property
    def is_ended(self) -> bool:
        """Whether no choice is left; the next step frees all that it still holds."""
        return all(choice.is_ended for choice in self.choices)


@dataclass(eq=False, slots=True)
class Choice:
    """One token stream of a request."""

    request: Request
    index: int  # 0..n-1; selects the seed
    output: list[int]  # tokens drawn so far, those of earlier attempts included
    pages: SequencePages | None = None  # while RUNNING
    matcher: "Matcher | None" = None  # its place in a grammar; see decode_worker.masks
    allowed: TokenBits | None = None  # which tokens its constraint allows next; None: not known yet
    is_ended: bool = False  # finished or cancelled: it takes part in no later step
    seat: int = -1  # while RUNNING
    num_seated_pages: int = 0  # how many of its pages the engine knows
    num_unread: int = 0  # tokens that steps in flight draw for it
    num_in_flight: int = 0  # steps in flight that touch its pages

    @property
    def age(self) -> tuple[int, int]:
        """Sorts older choices first."""
        return (self.request.arrival, self.index)

    @property
    def awaits_mask(self) -> bool:
        """Whether its next token cannot be drawn yet: the last token or the mask is unknown."""
        if self.request.params.constraint is None:
            return False
        return self.allowed is None or self.num_unread > 0

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.output)

    def num_pages_missing(self, page_size: int) -> int:
        """Return how many more pages its next step needs; 0 or 1."""
        if self.pages is None or self.is_ended:
            return 0
        num_needed = num_pages_for(self.num_tokens + self.num_unread, page_size)
        return max(num_needed - len(self.pages.page_ids), 0)

    def tokens(self) -> "array[int]":
        """Return prompt and output."""
        tokens = array("I", self.request.prompt)
        tokens.extend(self.output)
        return tokens


class GroupState(enum.Enum):
    """Where the pages of a group come from."""

    WAITING = "waiting"
    RECEIVING = "receiving"
    COMPUTING = "computing"
    JOINING = "joining"


@dataclass(eq=False, slots=True)
class PrefillGroup:
    """Choices of one request whose tokens are equal, so that one prefill serves all of them."""

    choices: list[Choice]
    tokens: Sequence[int]  # of each choice: prompt and output
    state: GroupState = GroupState.WAITING
    pages: SequencePages | None = None  # in all states but WAITING
    num_computed: int = 0  # COMPUTING: tokens whose K and V are in the pages
    num_launched: int = 0  # COMPUTING: tokens after them that steps in flight compute
    num_in_flight: int = 0  # COMPUTING: steps in flight that touch its pages
    candidate: WorkerIdentity | None = None  # RECEIVING: the prefill worker that was asked
    failed: tuple[WorkerIdentity, ...] = ()  # candidates that were asked in vain
    is_first_visit: bool = True  # no pages were ever reserved for it

    @property
    def request(self) -> Request:
        return self.choices[0].request

    @property
    def age(self) -> tuple[int, int]:
        return self.choices[0].age

    @property
    def arrived_s(self) -> float:
        return self.request.arrived_s

    @property
    def num_left(self) -> int:
        """Tokens that no step has been launched for."""
        return len(self.tokens) - self.num_computed - self.num_launched

    @property
    def is_ended(self) -> bool:
        """Whether none of its choices is wanted any more."""
        return all(choice.is_ended for choice in self.choices)

    @property
    def awaits_masks(self) -> bool:
        """Whether the first token of some choice cannot be drawn yet."""
        return any(choice.awaits_mask for choice in self.choices if not choice.is_ended)

    def drop_ended(self) -> None:
        """Forget choices that ended, but keep one; not while first tokens are being drawn."""
        self.choices = [each for each in self.choices if not each.is_ended] or self.choices[:1]


@dataclass(kw_only=True, slots=True)  # not frozen, which would make construction many times slower
class TokenDelta:
    """New tokens of one choice, for the router."""

    request: Request
    choice: int
    tokens: tuple[SampledToken, ...]
    first_index: int  # output index of the first of them
    finish_reason: FinishReason | None
    is_last_of_request: bool
    has_stats: bool = False  # also carries the request's cost so far


def group_by_tokens(choices: Sequence[Choice]) -> list[PrefillGroup]:
    """Return the fewest groups that cover the choices, in order of their first choices."""
    if len(choices) == 1:
        return [PrefillGroup(list(choices), choices[0].tokens())]
    by_output: dict[tuple[int, ...], list[Choice]] = {}
    for choice in choices:
        by_output.setdefault(tuple(choice.output), []).append(choice)
    return [PrefillGroup(group, group[0].tokens()) for group in by_output.values()]
