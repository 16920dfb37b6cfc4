"""A prompt on its prefill worker.

Life of a prompt:
1. WAITING    for a place, for pages, or for other prompts that compute pages of its prefix
2. COMPUTING  all its pages are reserved; each step computes some of its tokens
3. DONE       the first tokens are drawn; a lease holds its pages until no transfer reads them

Its finished pages go to the transfer chunk by chunk, during and at the end of COMPUTING.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from grammars.bits import TokenBits
from kv_cache.prefix_cache import Lease, SequencePages
from llm_engine.sampling import SampledToken, SamplingParams
from pagewire.protos.trace_context import NO_TRACE, TraceContext


class PromptState(enum.Enum):
    """The state of a prompt."""

    WAITING = "waiting"
    COMPUTING = "computing"
    DONE = "done"


@dataclass(eq=False, kw_only=True, slots=True)
class Prompt:
    """One attempt's work. Owned by the scheduler from submission to its end."""

    request_id: str  # for logs
    tokens: Sequence[int]  # the prompt and, after a resumption, emitted tokens
    prompt_len: int  # how many of them are the prompt; the rest is output
    params: SamplingParams
    choices: tuple[int, ...]  # whose next token to draw
    first_page: int  # pages before it are not needed
    salt: bytes = b""
    cache_share: float = 1.0  # of this worker's pages, which those of this salt may keep
    allowed: TokenBits | None = None  # tokens that a constraint allows; None: all
    is_suspect: bool = False  # a pass of its request failed: it runs alone
    trace: TraceContext = NO_TRACE  # of the receiver's span; empty: not traced

    arrival: int = -1  # 0, 1, 2 ...
    arrived_s: float = 0.0  # engine time before it arrived
    state: PromptState = PromptState.WAITING
    pages: SequencePages | None = None  # while COMPUTING
    num_cached: int = 0  # tokens found in the cache; while WAITING those expected there
    num_computed: int = 0  # tokens whose K and V are in the pages, or cached ones while WAITING
    num_launched: int = 0  # tokens after them that steps in flight compute
    num_in_flight: int = 0  # steps in flight that touch its pages
    passes_s: float = 0.0  # engine time of the passes that computed some of its tokens
    num_handed_pages: int = 0  # pages before this one went to the transfer, or were not needed
    lease: Lease | None = None  # of the handed pages, when DONE
    is_read: bool = True  # a transfer may read the handed pages
    is_ended: bool = False  # cancelled or failed; freed when no step in flight touches its pages

    awaits_masks: ClassVar[bool] = False  # its mask comes with it

    @property
    def num_left(self) -> int:
        """Tokens that no step has been launched for."""
        return len(self.tokens) - self.num_computed - self.num_launched


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyPages:
    """Finished pages for the transfer; they stay until `Scheduler.transfer_ended`."""

    prompt: Prompt
    first_page: int  # counted in pages of the prompt
    page_ids: tuple[int, ...]
    is_last: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedPrompt:
    """All tokens are computed and the first tokens drawn, one per choice."""

    prompt: Prompt
    tokens: tuple[SampledToken, ...]


Progress = ReadyPages | FinishedPrompt
