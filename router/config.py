"""Configuration of a router; the composition root fills it from the cluster's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from options.kept_by_name import kept_by_name
from options.option import check_options, option
from pagewire.protos.grpc_options import MAX_CALL_S
from protos.contract import CONTRACT_VERSION
from protos.sampling_limits import DEFAULT_RANGES, is_default
from router.request import SamplingDefaults

MAX_PROMPT_CHARS = 1_000_000
CHARS_PER_TOKEN = 32  # of a text that could still fit into the context
BYTES_PER_CHAR = 4  # the most in UTF-8
BESIDE_PROMPT_BYTES = 8 * 2**20  # token ids of a context of 2**20, messages, stop strings


def _sampling_default(name: str) -> Any:
    return option(
        None,
        f"Value of {name} in requests that set none. Empty: what the model's files recommend, else "
        f"{getattr(SamplingDefaults(), name):g}.",
        accepts=partial(is_default, name),
        accepted=DEFAULT_RANGES[name].allowed,
    )


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """Limits, deadlines and policy weights. Times are seconds, lengths are as named."""

    router_id: str = "router-0"  # in logs and session greetings
    contract_version: int = CONTRACT_VERSION  # workers of other versions get no requests
    page_hash_key: bytes = field(default=b"", repr=False)  # of the page hashes, as the workers'
    resume_key: bytes = field(default=b"", repr=False)  # of resume tokens, as all routers'
    local_prefill_max_tokens: int = 64  # as the decode workers are configured
    max_running_sequences: int = 256  # likewise

    # Admission
    max_active_requests: int = option(
        1024,
        "Most requests at a time; more are refused with RESOURCE_EXHAUSTED before any work.",
        at_least=1,
        at_most=500_000_000,  # gRPC counts four for each
    )
    max_connections: int = option(
        4096,
        "Most connections of clients; more are closed at once.",
        at_least=1,
        at_most=2_000_000_000,  # gRPC aborts a process that has 2**31 - 1
    )
    max_expected_wait_s: float = option(
        30.0,
        "A request that would wait longer before it starts is refused at once with "
        "RESOURCE_EXHAUSTED; a request that has begun never is.",
        above=0,
    )
    tenants_file: str = option(
        "",
        "File with the allowed tenants and their limits; `pagewire tokens new` makes an entry. "
        "Empty: any client may call; where other hosts can connect, this needs "
        "front_tls.client_authority_file or insecure.",
    )
    max_backlog_s: float = option(
        0.5,
        "With a tenants file: a request that would wait longer than this at the workers waits in "
        "the router, where tenants take turns.",
        at_least=0,
    )
    retry_delay_s: float = option(
        0.5, "Delay suggested to refused clients; longer after a long wait.", at_least=0
    )
    max_prompt_chars: int = option(
        0,
        "Most characters of a text or rendered chat; 0: 32 for each token of the context, at most "
        "1,000,000, which take about half a second to tokenize.",
        at_least=0,
        at_most=100_000_000,  # gRPC can count their bytes
    )
    request_timeout_s: float = option(
        3600.0,
        "Time limit of calls without their own deadline; a call can be resumed elsewhere for this "
        "long.",
        above=0,
    )
    coalesce_ms: float = option(
        20.0,
        "Under load, tokens that arrive within this time after a message of their stream share the "
        "next message. The time is shorter with few streams: 0.02 ms for each call that shares a "
        "stream with others, and 0.08 ms for each other call. The first token of a request and "
        "the last ones never wait; 0: none waits.",
        at_least=0,
    )
    metrics_port: int = option(
        0,
        "Port of the router's metrics for Prometheus, on the router's address, independent of an "
        "HTTP gateway; 0: none.",
        at_least=0,
        at_most=65535,
    )
    slow_client_timeout_s: float = option(
        30.0, "A client that reads nothing for this long is cancelled.", at_least=0
    )

    # Sampling of requests that do not set it; see router/request.py
    default_temperature: float | None = _sampling_default("temperature")
    default_top_p: float | None = _sampling_default("top_p")
    default_top_k: int | None = _sampling_default("top_k")
    default_min_p: float | None = _sampling_default("min_p")
    default_repetition_penalty: float | None = _sampling_default("repetition_penalty")

    # Workers
    dead_after_s: float = option(
        15.0,
        "How long a worker may be silent while its connection holds; heartbeats are as late as its "
        "event loop. A connection that breaks, or answers no ping within 3 s, counts at once.",
        above=0,
    )
    stuck_after_s: float = option(
        30.0,
        "How long a worker may make no engine step while it sends heartbeats and has work for "
        "one. Then it gets no requests until the step has ended.",
        at_least=0,
    )
    connect_timeout_s: float = option(
        5.0,
        "Time limit of the first call to a worker, and for requests that wait until a prefill "
        "worker answers that call.",
        at_least=0,
        at_most=MAX_CALL_S,
    )
    reconnect_delay_s: float = option(0.2, "Pause between attempts to reach a worker.", at_least=0)
    forget_dead_after_s: float = option(
        60.0, "How long a dead worker stays in the cluster status.", at_least=0
    )
    worker_wait_s: float = option(
        30.0,
        "How long a request without a token waits for a decode worker; a dead one takes seconds to "
        "come back, longer with a large model.",
        at_least=0,
    )
    resume_wait_s: float = option(
        30.0, "How long a resumed request waits for a decode worker.", at_least=0
    )
    max_resumptions: int = option(
        3,
        "How often a request may lose its worker and continue. A worker that leaves as planned "
        "does not count.",
        at_least=0,
    )

    # Policy (see router/policy.py)
    max_prefill_candidates: int = option(
        3, "Prefill workers named to the decode worker, best first.", at_least=1
    )
    prefill_tokens_per_s: float = option(
        8000.0, "Speed of one worker; converts tokens into seconds of work.", above=0
    )
    new_work_weight: float = option(
        2.0, "Weight of tokens to compute again, relative to tokens to wait for.", at_least=0
    )
    decode_load_s: float = option(
        0.05,
        "Cost of each request that a decode worker already has: twice 0.1 ms, by which it "
        "lengthens a step, times 250 tokens.",
        at_least=0,
    )
    page_pressure_s: float = option(
        0.5, "Cost of a decode worker whose pages are all referenced.", at_least=0
    )
    gpu_bytes_per_s: float = option(
        150e9, "Rate of pages between GPUs, whether CUDA IPC or NCCL moves them.", above=0
    )
    tcp_bytes_per_s: float = option(1e9, "Rate of pages over a network of 10 Gbit/s.", above=0)
    speculative_ttl_s: float = option(
        5.0, "How long the future pages of a request count as cached.", at_least=0
    )
    max_index_pages: int = option(
        2_000_000, "Most page hashes in the prefix index; this many take about 250 MB.", at_least=1
    )

    @property
    def most_prompt_chars(self) -> int:
        """Characters that no prompt may exceed, whatever the context."""
        return self.max_prompt_chars or MAX_PROMPT_CHARS

    def prompt_chars_limit(self, context_tokens: int) -> int:
        """Return the most characters of a prompt for a context of this many tokens."""
        return self.max_prompt_chars or min(MAX_PROMPT_CHARS, CHARS_PER_TOKEN * context_tokens)

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """The sampling defaults that replace the model's: name of the parameter |-> value."""
        given = {name: getattr(self, f"default_{name}") for name in DEFAULT_RANGES}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def max_request_bytes(self) -> int:
        """Most bytes of a valid request on the wire."""
        return BYTES_PER_CHAR * self.most_prompt_chars + BESIDE_PROMPT_BYTES

    def __post_init__(self) -> None:
        check_options(self)
