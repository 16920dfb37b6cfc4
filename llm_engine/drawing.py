"""When a token may be drawn and when a choice ends: rules that prefill and decode share.

Everything here depends on the prompt and the tokens emitted so far, never on the state of a
worker. That is why a choice can continue elsewhere.
"""

import enum
from collections.abc import Sequence

from grammars.bits import TokenBits
from llm_engine.sampling import Draw, SamplingParams, choice_seed


class FinishReason(enum.Enum):
    """Why a choice ended."""

    STOP = "stop"  # an end token or a stop token
    LENGTH = "length"  # max_tokens or the end of the context


def end_token_ids(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens that end a choice."""
    return params.stop_token_ids + (() if params.ignore_eos else eos_token_ids)


def next_draw(
    params: SamplingParams,
    *,
    choice: int,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    eos_token_ids: tuple[int, ...],
    allowed: TokenBits | None = None,
) -> Draw:
    """Return the draw of the token that follows prompt and output.

    Under a constraint, `allowed` lists the tokens that it may be.

    The draw references `output_token_ids`; the caller must not change it until the token is drawn.
    """
    may_end = len(output_token_ids) >= params.min_tokens
    return Draw(
        params=params,
        seed=choice_seed(params.seed, choice),
        position=len(prompt_token_ids) + len(output_token_ids),
        prompt_token_ids=prompt_token_ids,
        output_token_ids=output_token_ids,
        banned_token_ids=() if may_end else end_token_ids(params, eos_token_ids),
        allowed=allowed,
    )


def finish_reason(
    params: SamplingParams,
    *,
    num_prompt_tokens: int,
    output_token_ids: Sequence[int],
    eos_token_ids: tuple[int, ...],
    max_context_tokens: int,
) -> FinishReason | None:
    """Return why the choice ends with the last of these tokens, or None if it continues."""
    if output_token_ids[-1] in end_token_ids(params, eos_token_ids):
        return FinishReason.STOP
    if len(output_token_ids) >= params.max_tokens:
        return FinishReason.LENGTH
    if num_prompt_tokens + len(output_token_ids) >= max_context_tokens:
        return FinishReason.LENGTH
    return None
