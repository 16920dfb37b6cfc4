"""One step of an engine: changes of its batch, the work, and the drawn tokens.

A running sequence holds a seat. It takes one when its first token is drawn, and names its pages;
from then on a step names only the seat. The engine remembers the rest, including the last drawn
token. So a step can be launched while the previous one, whose tokens are not yet known, still runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grammars.bits import TokenBits
from llm_engine.kv_reads import NO_READS, KVReads
from llm_engine.sampling import Drawn, SampledToken, SamplingParams, SequenceSlice


@dataclass(kw_only=True, slots=True)  # not frozen: to make one would take many times as long
class SeatStart:
    """A sequence takes a seat that no launched step uses any more."""

    seat: int  # 0 to num_seats - 1
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # drawn so far, at least one; the last one's K, V are missing
    page_ids: Sequence[int]  # room for all of these tokens
    params: SamplingParams
    choice: int  # selects the seed
    eos_token_ids: tuple[int, ...]  # of the model; not drawn before params.min_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeatPages:
    """Additional pages for a sequence, after those that it has."""

    seat: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStep:
    """What one step does, in this order.

    Every seat in `decodes` has room for the token that the step computes. No two sequences of a
    step write the same page.
    """

    ended: tuple[int, ...] = ()  # seats whose sequences have ended
    copies: tuple[tuple[int, int], ...] = ()  # pages (source, target)
    started: tuple[SeatStart, ...] = ()
    extended: tuple[SeatPages, ...] = ()
    decodes: tuple[int, ...] = ()  # seats: compute the last token of each, draw the next one
    # seat |-> the only tokens that may be drawn for it; seats without an entry may draw any
    allowed: Mapping[int, TokenBits] = field(default_factory=dict)
    slices: tuple[SequenceSlice, ...] = ()  # tokens of sequences without a seat


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The tokens that a step drew. None: no token can be drawn; see Drawn."""

    decodes: Sequence[SampledToken | None]  # one for each seat that decoded
    slices: Sequence[Drawn]  # one for each slice
    reads: KVReads = NO_READS  # of attention
    seconds: float = 0.0  # duration of the step, noted by the engine's caller; 0: not measured
