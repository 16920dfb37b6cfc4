"""A part of a prompt that one step computes: chosen, launched and settled alike in both pools."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kv_cache.prefix_cache import PrefixCache, SequencePages
from llm_engine.sampling import Draw, SequenceSlice


class Computing(Protocol):
    """A prompt with all its pages, of which some tokens are not computed."""

    tokens: Sequence[int]
    pages: SequencePages | None
    num_computed: int  # tokens whose K and V are in the pages
    num_launched: int  # tokens after them that steps in flight compute
    num_in_flight: int  # steps in flight that touch its pages

    @property
    def is_ended(self) -> bool: ...

    @property
    def awaits_masks(self) -> bool:
        """Whether what follows the last token cannot be drawn yet."""


PromptT = TypeVar("PromptT", bound=Computing)


@dataclass(kw_only=True, slots=True)  # not frozen: to make one would take many times as long
class PromptChunk(Generic[PromptT]):
    """The next tokens of a prompt."""

    prompt: PromptT
    start: int  # index of the first of them in the prompt's tokens
    num_tokens: int

    @property
    def is_last(self) -> bool:
        return self.start + self.num_tokens == len(self.prompt.tokens)

    def count_in_flight(self, change: int) -> None:
        """Note that a step with it was launched, 1, or is settled, -1."""
        self.prompt.num_launched += change * self.num_tokens
        self.prompt.num_in_flight += change

    def commit(self, cache: PrefixCache) -> bool:
        """Note that it is computed, and commit pages that are now full.

        Returns:
            False where the step before failed, so that this one read meaningless values.
        """
        prompt = self.prompt
        assert prompt.pages is not None
        if prompt.num_computed != self.start:
            assert prompt.is_ended, "a chunk is missing"
            return False
        prompt.num_computed += self.num_tokens
        cache.commit(prompt.pages, prompt.num_computed // cache.page_size)
        return True

    def slice(self, *, num_prompt_tokens: int, draws: tuple[Draw, ...]) -> SequenceSlice:
        """Return what the engine computes; `draws` are those after the prompt's last token."""
        assert self.prompt.pages is not None
        return SequenceSlice(
            token_ids=self.prompt.tokens[self.start : self.start + self.num_tokens],
            start=self.start,
            page_ids=tuple(self.prompt.pages.page_ids),
            num_prompt_tokens=num_prompt_tokens,
            draws=draws,
        )


def next_chunk(prompt: PromptT, most: int) -> PromptChunk[PromptT] | None:
    """Return the next tokens of a prompt, at most so many; None if no step shall compute any."""
    start = prompt.num_computed + prompt.num_launched
    num_tokens = min(most, len(prompt.tokens) - start)
    if num_tokens == 0 or prompt.is_ended:
        return None  # steps in flight compute the last ones
    chunk = PromptChunk(prompt=prompt, start=start, num_tokens=num_tokens)
    return None if chunk.is_last and prompt.awaits_masks else chunk


def next_chunks(prompts: Iterable[PromptT], most: int) -> tuple[PromptChunk[PromptT], ...]:
    """Return the next tokens of prompts, the first ones first, at most so many in all."""
    chunks = []
    for prompt in prompts:
        chunk = next_chunk(prompt, most)
        if chunk is not None:
            chunks.append(chunk)
            most -= chunk.num_tokens
    return tuple(chunks)


def twin_copies(chunks: Iterable[PromptChunk[Any]]) -> tuple[tuple[int, int], ...]:
    """Return the pages (source, target) to copy before chunks: cached last pages of prompts."""
    pages = [chunk.prompt.pages for chunk in chunks]
    return tuple(copy for each in pages if each is not None for copy in each.twin_copies)
