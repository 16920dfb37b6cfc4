"""What one engine step computes: the scheduler decides it, the step loop executes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from decode_worker.request import Choice, PrefillGroup, Request
from llm_engine.drawing import next_draw
from llm_engine.engine_step import EngineStep, SeatPages, SeatStart
from llm_engine.sampling import SequenceSlice
from worker.prompt_chunk import PromptChunk, twin_copies

Chunk: TypeAlias = PromptChunk[PrefillGroup]  # of a group that is prefilled here


@dataclass(frozen=True, kw_only=True, slots=True)
class PageCopy:
    """A page that a forked choice needs a copy of before its first step."""

    choice: Choice
    holder: Choice  # of the source
    source: int
    target: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step, in the order of execution: changes of the batch, then decodes, then chunks."""

    copies: tuple[PageCopy, ...] = ()
    ended_seats: tuple[int, ...] = ()
    started: tuple[Choice, ...] = ()  # those of `decodes` that the engine does not know yet
    extended: tuple[SeatPages, ...] = ()
    decodes: tuple[Choice, ...] = ()  # one token each
    chunks: tuple[Chunk, ...] = ()
    receives: tuple[PrefillGroup, ...] = ()  # to ask a prefill worker for; needs no engine
    is_partial: bool = False  # some groups that may be admitted were not looked at

    @property
    def is_empty(self) -> bool:
        """Whether the engine has nothing to do; ended seats can wait."""
        return not (self.copies or self.decodes or self.chunks)

    @property
    def num_tokens(self) -> int:
        """Tokens that the pass computes."""
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def computed_for(self) -> list[Request]:
        """The request of each decode and chunk."""
        return [
            *(choice.request for choice in self.decodes),
            *(chunk.prompt.request for chunk in self.chunks),
        ]

    @property
    def owners(self) -> list[Request]:
        """The requests that the pass computes or copies for, each once."""
        return list(dict.fromkeys([*(c.choice.request for c in self.copies), *self.computed_for]))

    @property
    def request_ids(self) -> list[str]:
        """Of the owners."""
        return [request.request_id for request in self.owners]

    @property
    def is_alone(self) -> bool:
        """Whether no other step may be in flight with it."""
        return any(request.is_suspect for request in self.computed_for)

    def halves(self) -> "tuple[StepPlan, ...]":
        """Return two plans, one for each half of the requests; none for a single request."""
        owners = self.owners
        if len(owners) < 2:
            return ()
        middle = len(owners) // 2
        return self._part(owners[:middle]), self._part(owners[middle:])

    def _part(self, owners: Sequence[Request]) -> "StepPlan":
        """Return what has to be computed again for some requests."""
        kept = set(owners)
        return StepPlan(
            copies=tuple(each for each in self.copies if each.choice.request in kept),
            decodes=tuple(choice for choice in self.decodes if choice.request in kept),
            chunks=tuple(chunk for chunk in self.chunks if chunk.prompt.request in kept),
        )

    def engine_step(self, eos_token_ids: tuple[int, ...], *, is_again: bool) -> EngineStep:
        """Return what the engine does; it refers to no list that the scheduler changes later.

        Args:
            is_again: A step may have failed since, so every seat starts afresh.
        """
        forks = tuple((each.source, each.target) for each in self.copies)
        return EngineStep(
            ended=self.ended_seats,
            copies=forks + twin_copies(self.chunks),
            started=tuple(
                _seat_start(choice, eos_token_ids)
                for choice in (self.decodes if is_again else self.started)
            ),
            extended=() if is_again else self.extended,
            decodes=tuple(choice.seat for choice in self.decodes),
            allowed={
                choice.seat: choice.allowed for choice in self.decodes if choice.allowed is not None
            },
            slices=tuple(_chunk_slice(chunk, eos_token_ids) for chunk in self.chunks),
        )


def _seat_start(choice: Choice, eos_token_ids: tuple[int, ...]) -> SeatStart:
    assert choice.pages is not None
    request = choice.request
    return SeatStart(
        seat=choice.seat,
        prompt_token_ids=request.prompt,
        output_token_ids=tuple(choice.output),
        page_ids=tuple(choice.pages.page_ids[: choice.num_seated_pages]),
        params=request.params,
        choice=choice.index,
        eos_token_ids=eos_token_ids,
    )


def _chunk_slice(chunk: Chunk, eos_token_ids: tuple[int, ...]) -> SequenceSlice:
    group = chunk.prompt
    request = group.request
    draws = tuple(
        next_draw(
            request.params,
            choice=choice.index,
            prompt_token_ids=request.prompt,
            output_token_ids=tuple(choice.output),
            eos_token_ids=eos_token_ids,
            allowed=choice.allowed,
        )
        for choice in (group.choices if chunk.is_last else ())
    )
    return chunk.slice(num_prompt_tokens=len(request.prompt), draws=draws)
