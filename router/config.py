"""Configuration of a router; the composition root fills it from the cluster's configuration."""

import math
from dataclasses import dataclass, fields

MAX_PROMPT_CHARS = 1_000_000
CHARS_PER_TOKEN = 32  # of a text that could still fit into the context
BYTES_PER_CHAR = 4  # the most in UTF-8
BESIDE_PROMPT_BYTES = 8 * 2**20  # token ids of a context of 2**20, messages, stop strings

# What __post_init__ asks of options; of the others that they are not negative
AT_LEAST_ONE = {"max_active_requests", "max_prefill_candidates", "max_index_pages"}
POSITIVE = {"prefill_tokens_per_s", "dead_after_s", "request_timeout_s"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """Limits, deadlines and policy weights. Times are seconds, lengths are as named."""

    router_id: str = "router-0"  # in logs and session greetings

    # Admission
    max_active_requests: int = 1024  # more are refused with RESOURCE_EXHAUSTED before any work
    retry_delay_s: float = 0.5  # suggested to clients that were refused
    max_prompt_chars: int = 0  # of text or rendered chat; 0: 32 for each token of the context, at
    # most 1,000,000, which take about half a second to tokenize
    request_timeout_s: float = 3600.0  # for calls without a deadline of their own
    slow_client_timeout_s: float = 30.0  # a client that takes nothing for so long is cancelled
    cache_salt: bytes = b""  # of the prefix cache; part of every page hash
    page_hash_key: bytes = b""  # the cluster's secret for page hashes; the same as the workers'

    # Workers
    dead_after_s: float = 2.0  # silence of a worker; heartbeats come every half second by default
    stuck_after_s: float = 30.0  # heartbeats go on, sequences run, but no engine step was made
    connect_timeout_s: float = 5.0  # of the first call to a worker
    reconnect_delay_s: float = 0.2  # between attempts to reach a worker that cannot be reached
    forget_dead_after_s: float = 60.0  # so long a dead worker stays in the cluster status
    worker_wait_s: float = 30.0  # a request without a token yet waits so long for a decode worker;
    # one that died takes seconds to come back, more with a large model
    resume_wait_s: float = 30.0  # one whose client has tokens already waits so long
    max_resumptions: int = 3  # attempts after the first

    # Policy (see router/policy.py)
    max_prefill_candidates: int = 3  # named to the decode worker, best first
    prefill_tokens_per_s: float = 8000.0  # of one worker; turns tokens into seconds of work
    new_work_weight: float = 2.0  # of tokens to compute again, against tokens to wait for
    decode_load_s: float = 0.05  # cost of one request that a decode worker already has
    page_pressure_s: float = 0.5  # cost of a decode worker whose pages are all referenced
    speculative_ttl_s: float = 5.0  # own decisions count as cached so long
    max_index_pages: int = 2_000_000  # about 250 MB

    @property
    def most_prompt_chars(self) -> int:
        """Characters that no prompt may exceed, whatever the context."""
        return self.max_prompt_chars or MAX_PROMPT_CHARS

    def prompt_chars_limit(self, context_tokens: int) -> int:
        """Return how many characters a prompt may have when the context holds so many tokens."""
        return self.max_prompt_chars or min(MAX_PROMPT_CHARS, CHARS_PER_TOKEN * context_tokens)

    @property
    def max_request_bytes(self) -> int:
        """What a valid request can take on the wire."""
        return BYTES_PER_CHAR * self.most_prompt_chars + BESIDE_PROMPT_BYTES

    def __post_init__(self) -> None:
        """Raise ValueError with one line for each wrong option, beginning with its name."""
        wrong = []
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float):
                continue
            if field.name in AT_LEAST_ONE and value < 1:
                wrong.append(f"{field.name} is {value}; it must be 1 or more")
            elif field.name in POSITIVE and not 0 < value < math.inf:
                wrong.append(f"{field.name} is {value}; it must be positive and finite")
            elif not 0 <= value < math.inf:
                wrong.append(f"{field.name} is {value}; it must be 0 or more, and finite")
        if wrong:
            raise ValueError("\n".join(wrong))
