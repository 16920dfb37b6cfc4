"""The plan of one engine step, made by the scheduler and executed by the step loop."""

from dataclasses import dataclass
from typing import TypeAlias

from llm_engine.drawing import next_draw
from llm_engine.engine_step import EngineStep
from llm_engine.sampling import SequenceSlice
from prefill_worker.request import Prompt, ReadyPages
from worker.prompt_chunk import PromptChunk, twin_copies

Chunk: TypeAlias = PromptChunk[Prompt]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step. `ready` needs no engine: its pages were already in the cache."""

    chunks: tuple[Chunk, ...]
    ready: tuple[ReadyPages, ...]
    is_partial: bool = False  # some admissible prompts were not examined

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for the engine to do."""
        return not self.chunks

    @property
    def num_tokens(self) -> int:
        """Tokens that the pass computes."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def request_ids(self) -> list[str]:
        """Of the prompts."""
        return list(dict.fromkeys(chunk.prompt.request_id for chunk in self.chunks))

    @property
    def is_alone(self) -> bool:
        """Whether no other step may be in flight with it."""
        return any(chunk.prompt.is_suspect for chunk in self.chunks)

    def halves(self) -> "tuple[StepPlan, ...]":
        """Return two plans, each for half of the prompts; none if there is only one."""
        if len(self.chunks) < 2:
            return ()
        middle = len(self.chunks) // 2
        parts = self.chunks[:middle], self.chunks[middle:]
        return tuple(StepPlan(chunks=chunks, ready=()) for chunks in parts)

    def engine_step(self, eos_token_ids: tuple[int, ...], *, is_again: bool) -> EngineStep:
        """Return the engine's work, one slice per chunk."""
        return EngineStep(
            copies=twin_copies(self.chunks),
            slices=tuple(_slice(chunk, eos_token_ids) for chunk in self.chunks),
        )


def _slice(chunk: Chunk, eos_token_ids: tuple[int, ...]) -> SequenceSlice:
    prompt = chunk.prompt
    prompt_token_ids = prompt.tokens[: prompt.prompt_len]
    output_token_ids = prompt.tokens[prompt.prompt_len :]
    draws = tuple(
        next_draw(
            prompt.params,
            choice=choice,
            prompt_token_ids=prompt_token_ids,
            output_token_ids=output_token_ids,
            eos_token_ids=eos_token_ids,
            allowed=prompt.allowed,
        )
        for choice in (prompt.choices if chunk.is_last else ())
    )
    return chunk.slice(num_prompt_tokens=prompt.prompt_len, draws=draws)
