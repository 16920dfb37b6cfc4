"""Configuration of a router; the composition root fills it from the cluster's configuration."""

from dataclasses import dataclass, field

from options.option import check_options, option

MAX_PROMPT_CHARS = 1_000_000
CHARS_PER_TOKEN = 32  # of a text that could still fit into the context
BYTES_PER_CHAR = 4  # the most in UTF-8
BESIDE_PROMPT_BYTES = 8 * 2**20  # token ids of a context of 2**20, messages, stop strings


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """Limits, deadlines and policy weights. Times are seconds, lengths are as named."""

    router_id: str = "router-0"  # in logs and session greetings
    page_hash_key: bytes = field(default=b"", repr=False)  # of the page hashes, as the workers'
    resume_key: bytes = field(default=b"", repr=False)  # of resume tokens, as all routers'
    local_prefill_max_tokens: int = 64  # as the decode workers are configured
    max_running_sequences: int = 256  # likewise

    # Admission
    max_active_requests: int = option(
        1024, "More are refused with RESOURCE_EXHAUSTED before any work.", at_least=1
    )
    max_connections: int = option(4096, "Of clients; more are closed at once.", at_least=1)
    max_expected_wait_s: float = option(
        30.0,
        "A request that would wait longer before it starts is refused at once with "
        "RESOURCE_EXHAUSTED; one that has begun never is.",
        above=0,
    )
    tenants_file: str = option(
        "",
        "File that says who may call, and how much each may take; see docs/tenants.md. Empty: "
        "everybody may.",
    )
    max_backlog_s: float = option(
        0.5,
        "With a tenants file: while a request would wait for longer than this at the workers, it "
        "waits in the router, where tenants take turns.",
        at_least=0,
    )
    retry_delay_s: float = option(
        0.5, "Suggested to clients that were refused; more after a long wait.", at_least=0
    )
    max_prompt_chars: int = option(
        0,
        "Characters of text or rendered chat; 0: 32 for each token of the context, at most "
        "1,000,000, which take about half a second to tokenize.",
        at_least=0,
    )
    request_timeout_s: float = option(
        3600.0,
        "For calls without a deadline of their own; for as long a call can be resumed elsewhere.",
        above=0,
    )
    coalesce_ms: float = option(
        20.0,
        "Under load, tokens that come within this time after a message of their stream travel "
        "together. The time is shorter with few streams: 0.02 ms for each call that shares a "
        "stream with others, and 0.08 ms for each other call. The first token of a request and "
        "the last ones never wait; 0: none does.",
        at_least=0,
    )
    metrics_port: int = option(
        0,
        "Port on which Prometheus finds the router's metrics, on the address of the router and "
        "without an HTTP gateway; 0: none.",
        at_least=0,
        at_most=65535,
    )
    slow_client_timeout_s: float = option(
        30.0, "A client that takes nothing for this long is cancelled.", at_least=0
    )

    # Workers
    dead_after_s: float = option(
        15.0,
        "How long a worker may be silent while its connection holds; heartbeats are as late as its "
        "event loop. A connection that breaks, or answers no ping within 3 s, counts at once.",
        above=0,
    )
    stuck_after_s: float = option(
        30.0, "Heartbeats go on and sequences run, but no engine step is made.", at_least=0
    )
    connect_timeout_s: float = option(5.0, "Of the first call to a worker.", at_least=0)
    reconnect_delay_s: float = option(
        0.2, "Between attempts to reach a worker that cannot be reached.", at_least=0
    )
    forget_dead_after_s: float = option(
        60.0, "How long a dead worker stays in the cluster status.", at_least=0
    )
    worker_wait_s: float = option(
        30.0,
        "How long a request without a token waits for a decode worker; one that died takes "
        "seconds to come back, more with a large model.",
        at_least=0,
    )
    resume_wait_s: float = option(
        30.0, "How long a resumed request waits for a decode worker.", at_least=0
    )
    max_resumptions: int = option(3, "Attempts after the first.", at_least=0)

    # Policy (see router/policy.py)
    max_prefill_candidates: int = option(3, "Named to the decode worker, best first.", at_least=1)
    prefill_tokens_per_s: float = option(
        8000.0, "Of one worker; turns tokens into seconds of work.", above=0
    )
    new_work_weight: float = option(
        2.0, "Of tokens to compute again, against tokens to wait for.", at_least=0
    )
    decode_load_s: float = option(
        0.05,
        "Cost of one request that a decode worker already has: twice 0.1 ms, by which it lengthens "
        "a step, times 250 tokens.",
        at_least=0,
    )
    page_pressure_s: float = option(
        0.5, "Cost of a decode worker whose pages are all referenced.", at_least=0
    )
    nccl_bytes_per_s: float = option(150e9, "At which pages move between GPUs of a host.", above=0)
    tcp_bytes_per_s: float = option(
        1e9, "At which pages move over a network of 10 Gbit/s.", above=0
    )
    speculative_ttl_s: float = option(
        5.0, "How long pages that a request is about to create count as cached.", at_least=0
    )
    max_index_pages: int = option(
        2_000_000, "Page hashes in the prefix index; all of them take about 250 MB.", at_least=1
    )

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
        check_options(self)
