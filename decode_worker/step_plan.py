"""What one engine step computes: decided by the scheduler, executed by the step loop."""

from dataclasses import dataclass

from decode_worker.request import Choice, PrefillGroup, Request
from llm_engine.drawing import next_draw
from llm_engine.sampling import SequenceSlice


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptChunk:
    """The next tokens of a group that is prefilled here."""

    group: PrefillGroup
    num_tokens: int

    @property
    def is_last(self) -> bool:
        return self.group.num_computed + self.num_tokens == len(self.group.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageCopy:
    """A page that a forked choice needs a copy of before its first step."""

    choice: Choice
    source: int
    target: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step, in the order of execution: copies, then all slices in one pass."""

    copies: tuple[PageCopy, ...]
    decodes: tuple[Choice, ...]  # one token each
    chunks: tuple[PromptChunk, ...]
    receives: tuple[PrefillGroup, ...]  # to ask a prefill worker for; needs no engine

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for the engine to do."""
        return not (self.copies or self.decodes or self.chunks)

    @property
    def num_tokens(self) -> int:
        """Tokens that the pass computes."""
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def computed_for(self) -> list[Request]:
        """The request of each slice."""
        return [
            *(choice.request for choice in self.decodes),
            *(chunk.group.request for chunk in self.chunks),
        ]

    def slices(self, eos_token_ids: tuple[int, ...]) -> list[SequenceSlice]:
        """Return the pass: first the decodes, then the chunks.

        The slices refer to lists of the scheduler, which stay as they are until the step completes.
        """
        decodes = [_decode_slice(choice, eos_token_ids) for choice in self.decodes]
        return decodes + [_chunk_slice(chunk, eos_token_ids) for chunk in self.chunks]


def _decode_slice(choice: Choice, eos_token_ids: tuple[int, ...]) -> SequenceSlice:
    assert choice.pages is not None
    request = choice.request
    draw = next_draw(
        request.params,
        choice=choice.index,
        prompt_token_ids=request.prompt,
        output_token_ids=choice.output,
        eos_token_ids=eos_token_ids,
    )
    return SequenceSlice(
        token_ids=choice.output[-1:],
        start=choice.num_tokens - 1,
        page_ids=choice.pages.page_ids,
        num_prompt_tokens=len(request.prompt),
        draws=(draw,),
    )


def _chunk_slice(chunk: PromptChunk, eos_token_ids: tuple[int, ...]) -> SequenceSlice:
    group = chunk.group
    assert group.pages is not None
    request = group.request
    draws = tuple(
        next_draw(
            request.params,
            choice=choice.index,
            prompt_token_ids=request.prompt,
            output_token_ids=choice.output,
            eos_token_ids=eos_token_ids,
        )
        for choice in group.choices
    )
    return SequenceSlice(
        token_ids=group.tokens[group.num_computed : group.num_computed + chunk.num_tokens],
        start=group.num_computed,
        page_ids=group.pages.page_ids,
        num_prompt_tokens=len(request.prompt),
        draws=draws if chunk.is_last else (),
    )
