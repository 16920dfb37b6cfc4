"""One step as an engine takes it: what changes in its batch, what to compute, and what was drawn.

A running sequence holds a seat: it takes one when its first token is drawn, says where its pages
are, and from then on a step only names the seat. The engine remembers the rest, the last drawn
token included. So a step can be launched while the one before it, whose tokens nobody knows yet,
still runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grammars.bits import TokenBits
from llm_engine.sampling import Drawn, SampledToken, SamplingParams, SequenceSlice


@dataclass(kw_only=True, slots=True)  # not frozen: to make one would take many times as long
class SeatStart:
    """A sequence takes a seat that no launched step names any more."""

    seat: int  # 0 to num_seats - 1
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # drawn so far, at least one; K and V of the last are missing
    page_ids: Sequence[int]  # room for all of these tokens
    params: SamplingParams
    choice: int  # selects the seed
    eos_token_ids: tuple[int, ...]  # of the model; not drawn before params.min_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeatPages:
    """More pages for a sequence, behind those that it has."""

    seat: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStep:
    """What one step does, in this order.

    Every seat in `decodes` has room for the token that the step computes. No two sequences of a
    step write the same page.
    """

    ended: tuple[int, ...] = ()  # seats whose sequences hold nothing any more
    copies: tuple[tuple[int, int], ...] = ()  # pages (source, target)
    started: tuple[SeatStart, ...] = ()
    extended: tuple[SeatPages, ...] = ()
    decodes: tuple[int, ...] = ()  # seats: the last token of each is computed, the next one drawn
    # seat |-> the only tokens that may be drawn for it; for those that are missing all may be
    allowed: Mapping[int, TokenBits] = field(default_factory=dict)
    slices: tuple[SequenceSlice, ...] = ()  # tokens of sequences without a seat


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step drew. None: no token can be drawn; see Drawn."""

    decodes: Sequence[SampledToken | None]  # one for each seat that decoded
    slices: Sequence[Drawn]  # one for each slice
    seconds: float = 0.0  # that the step took, noted by whoever runs the engine; 0: not measured
