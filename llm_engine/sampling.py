"""What to draw and what was drawn: values that travel between scheduler, engine and wire.

A draw is stateless: it depends on the logits of its own sequence, on `seed`, `position` and the
parameters here, never on the batch or on earlier draws. That is what lets a stream continue on
another worker with the same tokens.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from grammars.bits import TokenBits
from grammars.constraint import Constraint
from kv_cache.layout import num_pages_for


@dataclass(kw_only=True, slots=True)  # not frozen: to make one would take many times as long
class SamplingParams:
    """Complete parameters of one request; the router has filled the defaults and checked ranges."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # of the request; see choice_seed
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: of the drawn token and the k most probable
    constraint: Constraint | None = None  # what the answer is held to; None: nothing

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def choice_seed(seed: int, choice: int) -> int:
    """Return the 64-bit seed of one of a request's n choices; choice 0 keeps the request's own."""
    if choice == 0:
        return seed & 0xFFFF_FFFF_FFFF_FFFF
    material = f"{seed}/{choice}".encode()
    return int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "little")


@dataclass(kw_only=True, slots=True)  # not frozen: to make one would take many times as long
class Draw:
    """One token to draw from the logits of a slice's last token."""

    params: SamplingParams
    seed: int  # of this choice
    position: int  # of the drawn token in its sequence = number of tokens before it
    prompt_token_ids: Sequence[int]  # for penalties
    output_token_ids: Sequence[int]  # emitted so far, for penalties and min_tokens
    banned_token_ids: tuple[int, ...] = ()  # not drawable here (end tokens before min_tokens)
    allowed: TokenBits | None = None  # the only ones drawable here; None: all


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledToken:
    """One drawn token."""

    token_id: int
    logprob: float | None = None  # natural log, unmodified distribution; None if not asked for
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


# What was drawn after a slice, one token per draw. None: no token can be drawn, since the largest
# logit that may be drawn is NaN or infinite.
Drawn: TypeAlias = tuple[SampledToken, ...] | None


@dataclass(kw_only=True, slots=True)  # not frozen: to make one would take many times as long
class SequenceSlice:
    """Tokens of one sequence to compute in one forward pass.

    The pages already hold K and V of positions [0, start); the pass writes those of
    [start, start + len(token_ids)) and draws tokens after the last of them.

    Positions below `num_prompt_tokens` are prompt, those from there on were drawn. The two are
    computed by different kernels with different bits; to compute a position again gives the same
    bits only if it is told apart in the same way. It is a fact about the sequence, not the slice.
    """

    token_ids: Sequence[int]  # new tokens, at least one
    start: int  # position of the first of them
    page_ids: Sequence[int]  # of the whole sequence, in order
    num_prompt_tokens: int  # of the sequence
    draws: tuple[Draw, ...] = ()  # empty for all but the last chunk of a prompt

    @property
    def prompt_len(self) -> int:
        """How many of the new tokens are prompt; they come first."""
        return min(max(self.num_prompt_tokens - self.start, 0), len(self.token_ids))

    def check(self, page_size: int) -> None:
        """Assert that the pages hold all positions that the pass reads or writes."""
        end = self.start + len(self.token_ids)
        assert self.token_ids, "a slice computes at least one token"
        assert len(self.page_ids) >= num_pages_for(end, page_size), "too few pages"
