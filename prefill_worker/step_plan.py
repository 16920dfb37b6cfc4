"""What one engine step computes: decided by the scheduler, executed by the step loop."""

from dataclasses import dataclass

from llm_engine.drawing import next_draw
from llm_engine.sampling import SequenceSlice
from prefill_worker.request import Prompt, ReadyPages


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptChunk:
    """The next tokens of a prompt."""

    prompt: Prompt
    num_tokens: int

    @property
    def is_last(self) -> bool:
        return self.prompt.num_computed + self.num_tokens == len(self.prompt.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step. `ready` needs no engine: pages that were in the cache already."""

    chunks: tuple[PromptChunk, ...]
    ready: tuple[ReadyPages, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the pass computes."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    def slices(self, eos_token_ids: tuple[int, ...]) -> list[SequenceSlice]:
        """Return the pass, one slice per chunk."""
        return [_slice(chunk, eos_token_ids) for chunk in self.chunks]


def _slice(chunk: PromptChunk, eos_token_ids: tuple[int, ...]) -> SequenceSlice:
    prompt = chunk.prompt
    assert prompt.pages is not None
    prompt_token_ids = prompt.tokens[: prompt.prompt_len]
    output_token_ids = prompt.tokens[prompt.prompt_len :]
    draws = tuple(
        next_draw(
            prompt.params,
            choice=choice,
            prompt_token_ids=prompt_token_ids,
            output_token_ids=output_token_ids,
            eos_token_ids=eos_token_ids,
        )
        for choice in (prompt.choices if chunk.is_last else ())
    )
    return SequenceSlice(
        token_ids=prompt.tokens[prompt.num_computed : prompt.num_computed + chunk.num_tokens],
        start=prompt.num_computed,
        page_ids=prompt.pages.page_ids,
        num_prompt_tokens=prompt.prompt_len,
        draws=draws,
    )
