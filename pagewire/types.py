"""Arguments and results of the client: plain frozen values, no protobuf."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict


class Constraint(TypedDict, total=False):
    """The form that an answer must take: exactly one of these."""

    json_schema: Mapping[str, Any] | str  # a JSON text that follows this schema
    json_object: bool  # True: any JSON object
    regex: str  # a text that this expression matches as a whole
    choice: Sequence[str]  # one of these texts, up to 1,000
    grammar: str  # a text of this grammar, in EBNF or Lark
    tool_calls: Mapping[str, Any] | str  # function calls and nothing else; see `forced_calls`


class SamplingOptions(TypedDict, total=False):
    """How tokens are drawn; the keyword arguments of `generate`, `stream`, `chat`, `stream_chat`.

    An absent option, or None, takes the model's default, otherwise the one stated last below.
    """

    temperature: float | None  # 0 is greedy, else 0.001 .. 1000; 1
    top_p: float | None  # above 0, up to 1, which is off; 1
    top_k: int | None  # 0 .. 2**32 - 1; 0 is off
    min_p: float | None  # 0 .. 1; 0 is off
    repetition_penalty: float | None  # 0.001 .. 1000; 1 is off
    presence_penalty: float | None  # -2 .. 2; 0 is off
    frequency_penalty: float | None  # -2 .. 2; 0 is off
    seed: int | None  # 0 .. 2**64 - 1; drawn by the router
    max_tokens: int | None  # per choice, 1 .. 2**32 - 1, cut to the room in the context; all of it
    min_tokens: int | None  # up to max_tokens; nothing ends a choice before; 0
    stop: str | Sequence[str] | None  # generation ends before the first of these, up to 16; none
    stop_token_ids: Sequence[int] | None  # generation ends at any of these, up to 256; none
    ignore_eos: bool | None  # continue past the model's end tokens; False
    n: int | None  # independent choices, 1 .. 64; 1
    logprobs: int | None  # 0: of the drawn token, k <= 20: also of the k most probable; none
    skip_special_tokens: bool | None  # leave special tokens out of the text; True
    constraint: Constraint | None  # the form of each choice; none


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A function that the assistant called."""

    name: str
    arguments: str = ""  # JSON, as the model wrote it
    id: str = ""  # names the call in the message with its result


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message of a chat; empty fields do not exist for the model's template."""

    role: str  # system, developer, user, assistant, tool, or one that the model's template names
    content: str
    reasoning_content: str = ""  # the assistant's reasoning before its content
    tool_calls: tuple[ToolCall, ...] = ()  # functions that the assistant called
    tool_call_id: str = ""  # of the call whose result this is
    name: str = ""  # of the speaker, or of the function whose result this is


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """Log probabilities (natural log) at one drawn token."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first


# Not frozen, because to make one would take three times as long; nobody changes it.
@dataclass(kw_only=True, slots=True, unsafe_hash=True)
class Delta:
    """The part of one choice that one message of a stream carries."""

    request_id: str
    choice: int  # 0 .. n-1
    text: str  # may be empty while a character or a possible stop string is incomplete
    token_ids: tuple[int, ...]
    first_index: int  # output index of the first token
    logprobs: tuple[TokenLogprob, ...]  # empty unless asked for
    finish_reason: str | None  # "stop" or "length" in the choice's last delta
    stopped_by: str | None  # the stop string or token that ended the choice
    usage: "Usage | None"  # in the last delta of the call


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One generated continuation."""

    text: str
    token_ids: tuple[int, ...]  # all drawn ones, including those of a stop, which text lacks
    logprobs: tuple[TokenLogprob, ...]  # empty unless asked for
    finish_reason: str | None  # "stop", "length"; None: the reader left the stream early
    stopped_by: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Cost of a call, by place; sums over all attempts, so work repeated after a fault shows.

    Work that a worker did not report before it died is missing.
    """

    prompt_tokens: int
    completion_tokens: int  # of all choices
    decode_cached_tokens: int  # prompt tokens found in the decode worker's cache
    prefill_cached_tokens: int  # prompt tokens found in the prefill worker's cache
    prefill_computed_tokens: int  # by prefill workers; emitted ones, too, after an interruption
    decode_computed_tokens: int  # the same, by the decode worker itself
    pages_moved: int  # from prefill to decode workers
    bytes_moved: int
    preemptions: int
    prefill_retries: int
    resumptions: int  # times the stream continued on another decode worker
    cached_tokens: int  # prompt tokens that no worker computed for this call; not a sum
    ttft_ms: float  # arrival at the router to the first token
    total_ms: float  # arrival to the end
    tpot_ms: float  # mean time per output token after the first
    decode_workers: tuple[str, ...]  # ids, in order of use


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A complete answer."""

    request_id: str
    choices: tuple[Choice, ...]  # n of them
    usage: Usage | None  # None: the reader left the stream early

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first choice's tokens."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """The first choice's finish reason."""
        return self.choices[0].finish_reason

    @property
    def stopped_by(self) -> str | None:
        """The stop string or token that ended the first choice."""
        return self.choices[0].stopped_by


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """A tokenized text or chat."""

    token_ids: tuple[int, ...]
    text: str  # the tokenized text: for a chat, the rendered template


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDefaults:
    """The values of the sampling parameters that a request does not set."""

    temperature: float
    top_p: float
    top_k: int  # 0: off
    min_p: float
    repetition_penalty: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A served model."""

    name: str
    max_context_tokens: int  # prompt plus output
    vocab_size: int
    page_size: int  # token slots in a page
    has_chat_template: bool
    max_choices: int  # largest n of a request
    tool_call_format: str | None  # "llama3_json", "hermes", "mistral"; None: unknown
    has_reasoning: bool  # the chat template knows <think>
    max_request_bytes: int  # the router reads no longer message
    max_request_fields: int  # nor one of more than 64 KiB with more fields
    sampling_defaults: SamplingDefaults | None = None  # None: from a server without them


@dataclass(frozen=True, kw_only=True, slots=True)
class PageCounts:
    """How a worker's pages are used; the six states sum to total."""

    total: int
    free: int
    live: int
    cached: int
    leased: int
    incoming: int
    quarantine: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus:
    """One worker as a router sees it. Counters are totals since the worker's start.

    The numbers are from its last heartbeat, even if it is dead, and 0 before the first.
    """

    worker_id: str
    incarnation: int  # another one after each restart
    address: str
    pool: str  # "prefill" or "decode"
    state: str  # "connecting", "ready", "draining" or "dead"
    misfit: str = ""  # why it can get no requests beside the others; empty: no such reason
    # Why the router hears nothing from it; empty: it does, or is connecting for the first time.
    silence: str = ""
    heartbeat_age_ms: int
    steps: int
    running: int  # sequences in the batch
    waiting: int  # requests
    queued_tokens: int  # prompt tokens not computed yet
    pages: PageCounts
    gpu_allocated_bytes: int  # GPU memory of tensors: weights, pages, buffers; 0 without a GPU
    gpu_reserved_bytes: int  # of these and of what its allocator keeps for later ones
    looked_up_tokens: int  # prompt tokens looked up in the cache
    cached_tokens: int  # of these, those found
    computed_tokens: int  # prompt tokens
    generated_tokens: int
    pages_moved: int
    bytes_moved: int
    transfer_failures: int
    preemptions: int
    needed_bytes: int  # of all pages of prompts that prefill workers were to compute
    steps_ahead: int  # of `steps`, those launched before the previous one's tokens were known
    steps_alone: int  # of `steps`, those with no other in flight, after a failed pass of a request
    attention_needed_bytes: int  # K and V that drawn tokens attended to, counted for each token
    attention_read_bytes: int  # of them, what was read: shared prefixes once for a whole step
    sharing_groups: int  # of sequences that shared what they read, summed over steps
    sharing_rows: int  # sequences in these groups, summed over steps
    transfer_s: float  # in which pages of prompts were received, summed over transfers
    exposed_transfer_s: float  # of it, after the prompt was computed
    over_quota_pages: int  # cached pages evicted because their tenant had more than it may keep
    prompt_step_s: float  # engine time of steps that computed prompt tokens alone
    decode_step_s: float  # of steps that decoded alone
    mixed_step_s: float  # of steps that did both

    @property
    def is_living(self) -> bool:
        """Whether it answers, so that its numbers are current."""
        return self.state in ("ready", "draining")

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in this worker's cache, 0..1."""
        return self.cached_tokens / max(self.looked_up_tokens, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class HotPrefix:
    """A prefix that prompts found in a cache, without its content."""

    prefix_id: str  # tells prefixes apart
    num_tokens: int
    num_hits: int  # prompts whose longest known prefix it was
    workers: tuple[str, ...]  # ids of workers that hold it now


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantStatus:
    """One tenant at one router. All but active_requests are sums since the router's start."""

    name: str  # "(cluster)": callers with the cluster's own token
    active_requests: int
    requests: int  # generations that began
    refused_requests: int  # because of a limit, or because the cluster was full
    prompt_tokens: int
    generated_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Encryption:
    """How one kind of a router's connections is protected."""

    encrypted: bool  # by TLS
    expires_at_s: int | None  # when the router's certificate expires, Unix time; None: it has none


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterStatus:
    """One router's view, or with `is_partial` the part that an ordinary tenant sees."""

    workers: tuple[WorkerStatus, ...]
    active_requests: int
    finished_requests: int
    resumed_requests: int
    index_pages: int  # page hashes in the router's prefix index
    is_stopping: bool = False  # it takes no more requests, and ends
    hot_prefixes: tuple[
        HotPrefix, ...
    ] = ()  # those that recent prompts most often had, most hits first
    front_tls: Encryption | None = None  # of its clients' connections; None: not reported
    cluster_tls: Encryption | None = None  # of its own to workers and controller; likewise
    tenants: tuple[TenantStatus, ...] = ()  # empty without a tenants file
    is_partial: bool = False  # of the caller's tenant alone, without workers
    controller_silence: str = ""  # why the router hears no controller; empty: it hears it
    # Workers that it has never heard of; only commands know of them, which ask the controller, too.
    starting: tuple[str, ...] = ()
