from pagewire.protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolCallFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_CALL_FORMAT_UNSPECIFIED: _ClassVar[ToolCallFormat]
    TOOL_CALL_FORMAT_LLAMA3_JSON: _ClassVar[ToolCallFormat]
    TOOL_CALL_FORMAT_HERMES: _ClassVar[ToolCallFormat]
    TOOL_CALL_FORMAT_MISTRAL: _ClassVar[ToolCallFormat]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_CONNECTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_DEAD: _ClassVar[WorkerState]
TOOL_CALL_FORMAT_UNSPECIFIED: ToolCallFormat
TOOL_CALL_FORMAT_LLAMA3_JSON: ToolCallFormat
TOOL_CALL_FORMAT_HERMES: ToolCallFormat
TOOL_CALL_FORMAT_MISTRAL: ToolCallFormat
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_CONNECTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_DEAD: WorkerState

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    reasoning_content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., reasoning_content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages", "tools_json")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools_json: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools_json: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "token_ids", "chat", "sampling", "resume", "traceparent", "tracestate")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    token_ids: bytes
    chat: ChatPrompt
    sampling: _common_pb2.SamplingParams
    resume: Resumption
    traceparent: str
    tracestate: str
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., resume: _Optional[_Union[Resumption, _Mapping]] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class Resumption(_message.Message):
    __slots__ = ("token", "choices")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    choices: _containers.RepeatedCompositeFieldContainer[ReceivedChoice]
    def __init__(self, token: _Optional[bytes] = ..., choices: _Optional[_Iterable[_Union[ReceivedChoice, _Mapping]]] = ...) -> None: ...

class ReceivedChoice(_message.Message):
    __slots__ = ("choice", "token_ids", "text_chars", "finished")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_CHARS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_ids: bytes
    text_chars: int
    finished: bool
    def __init__(self, choice: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., text_chars: _Optional[int] = ..., finished: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "choice", "text", "token_ids", "first_index", "logprobs", "finish_reason", "stopped_by", "usage", "begins_in_reasoning", "resume_token")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOPPED_BY_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    BEGINS_IN_REASONING_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    text: str
    token_ids: bytes
    first_index: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    finish_reason: _common_pb2.FinishReason
    stopped_by: str
    usage: Usage
    begins_in_reasoning: bool
    resume_token: bytes
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., first_index: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stopped_by: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., begins_in_reasoning: _Optional[bool] = ..., resume_token: _Optional[bytes] = ...) -> None: ...

class GenerateManyRequest(_message.Message):
    __slots__ = ("call_id", "start", "timeout_ms", "interval_ms", "more")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    start: GenerateRequest
    timeout_ms: int
    interval_ms: int
    more: _containers.RepeatedCompositeFieldContainer[GenerateManyRequest]
    def __init__(self, call_id: _Optional[int] = ..., start: _Optional[_Union[GenerateRequest, _Mapping]] = ..., timeout_ms: _Optional[int] = ..., interval_ms: _Optional[int] = ..., more: _Optional[_Iterable[_Union[GenerateManyRequest, _Mapping]]] = ...) -> None: ...

class GenerateManyResponse(_message.Message):
    __slots__ = ("results", "tokens")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[CallResult]
    tokens: CallTokens
    def __init__(self, results: _Optional[_Iterable[_Union[CallResult, _Mapping]]] = ..., tokens: _Optional[_Union[CallTokens, _Mapping]] = ...) -> None: ...

class CallTokens(_message.Message):
    __slots__ = ("call_ids", "token_ids", "indices", "texts")
    CALL_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    call_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, call_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., indices: _Optional[_Iterable[int]] = ..., texts: _Optional[_Iterable[str]] = ...) -> None: ...

class CallResult(_message.Message):
    __slots__ = ("call_id", "response", "error_status")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_STATUS_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    response: GenerateResponse
    error_status: bytes
    def __init__(self, call_id: _Optional[int] = ..., response: _Optional[_Union[GenerateResponse, _Mapping]] = ..., error_status: _Optional[bytes] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "stats", "ttft_ms", "total_ms", "tpot_ms", "decode_workers")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    stats: _common_pb2.RequestStats
    ttft_ms: float
    total_ms: float
    tpot_ms: float
    decode_workers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., stats: _Optional[_Union[_common_pb2.RequestStats, _Mapping]] = ..., ttft_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., decode_workers: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "add_special_tokens", "add_generation_prompt", "continue_final_message")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: ChatPrompt
    add_special_tokens: bool
    add_generation_prompt: bool
    continue_final_message: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ..., add_generation_prompt: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "text")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    text: str
    def __init__(self, token_ids: _Optional[bytes] = ..., text: _Optional[str] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "skip_special_tokens", "with_pieces")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WITH_PIECES_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: bytes
    skip_special_tokens: bool
    with_pieces: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., skip_special_tokens: _Optional[bool] = ..., with_pieces: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text", "pieces")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    text: str
    pieces: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, text: _Optional[str] = ..., pieces: _Optional[_Iterable[str]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "tenant")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    tenant: str
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., tenant: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "max_context_tokens", "vocab_size", "page_size", "has_chat_template", "max_choices", "tool_call_format", "has_reasoning", "max_request_bytes", "max_request_fields", "sampling_defaults")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    MAX_CHOICES_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    HAS_REASONING_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_FIELDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_context_tokens: int
    vocab_size: int
    page_size: int
    has_chat_template: bool
    max_choices: int
    tool_call_format: ToolCallFormat
    has_reasoning: bool
    max_request_bytes: int
    max_request_fields: int
    sampling_defaults: SamplingDefaults
    def __init__(self, name: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., page_size: _Optional[int] = ..., has_chat_template: _Optional[bool] = ..., max_choices: _Optional[int] = ..., tool_call_format: _Optional[_Union[ToolCallFormat, str]] = ..., has_reasoning: _Optional[bool] = ..., max_request_bytes: _Optional[int] = ..., max_request_fields: _Optional[int] = ..., sampling_defaults: _Optional[_Union[SamplingDefaults, _Mapping]] = ...) -> None: ...

class SamplingDefaults(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ...) -> None: ...

class GetClusterStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetClusterStatusResponse(_message.Message):
    __slots__ = ("workers", "active_requests", "finished_requests", "resumed_requests", "index_pages", "is_stopping", "hot_prefixes", "front_tls", "cluster_tls", "tenants", "is_partial", "controller_silence")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    INDEX_PAGES_FIELD_NUMBER: _ClassVar[int]
    IS_STOPPING_FIELD_NUMBER: _ClassVar[int]
    HOT_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    FRONT_TLS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_TLS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    IS_PARTIAL_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_SILENCE_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    active_requests: int
    finished_requests: int
    resumed_requests: int
    index_pages: int
    is_stopping: bool
    hot_prefixes: _containers.RepeatedCompositeFieldContainer[HotPrefix]
    front_tls: Encryption
    cluster_tls: Encryption
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStatus]
    is_partial: bool
    controller_silence: str
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., active_requests: _Optional[int] = ..., finished_requests: _Optional[int] = ..., resumed_requests: _Optional[int] = ..., index_pages: _Optional[int] = ..., is_stopping: _Optional[bool] = ..., hot_prefixes: _Optional[_Iterable[_Union[HotPrefix, _Mapping]]] = ..., front_tls: _Optional[_Union[Encryption, _Mapping]] = ..., cluster_tls: _Optional[_Union[Encryption, _Mapping]] = ..., tenants: _Optional[_Iterable[_Union[TenantStatus, _Mapping]]] = ..., is_partial: _Optional[bool] = ..., controller_silence: _Optional[str] = ...) -> None: ...

class Encryption(_message.Message):
    __slots__ = ("encrypted", "expires_at_s")
    ENCRYPTED_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_S_FIELD_NUMBER: _ClassVar[int]
    encrypted: bool
    expires_at_s: int
    def __init__(self, encrypted: _Optional[bool] = ..., expires_at_s: _Optional[int] = ...) -> None: ...

class TenantStatus(_message.Message):
    __slots__ = ("name", "active_requests", "requests", "refused_requests", "prompt_tokens", "generated_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    active_requests: int
    requests: int
    refused_requests: int
    prompt_tokens: int
    generated_tokens: int
    def __init__(self, name: _Optional[str] = ..., active_requests: _Optional[int] = ..., requests: _Optional[int] = ..., refused_requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ...) -> None: ...

class HotPrefix(_message.Message):
    __slots__ = ("id", "tokens", "hits", "workers")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    tokens: int
    hits: int
    workers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[bytes] = ..., tokens: _Optional[int] = ..., hits: _Optional[int] = ..., workers: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker", "pool", "state", "heartbeat", "heartbeat_age_ms", "misfit", "silence")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    MISFIT_FIELD_NUMBER: _ClassVar[int]
    SILENCE_FIELD_NUMBER: _ClassVar[int]
    worker: _common_pb2.WorkerRef
    pool: _common_pb2.Pool
    state: WorkerState
    heartbeat: Heartbeat
    heartbeat_age_ms: int
    misfit: str
    silence: str
    def __init__(self, worker: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., pool: _Optional[_Union[_common_pb2.Pool, str]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., heartbeat_age_ms: _Optional[int] = ..., misfit: _Optional[str] = ..., silence: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("worker", "pool", "steps", "running", "waiting", "queued_tokens", "pages", "totals", "draining", "stepping", "gpu_allocated_bytes", "gpu_reserved_bytes")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STEPPING_FIELD_NUMBER: _ClassVar[int]
    GPU_ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker: _common_pb2.WorkerRef
    pool: _common_pb2.Pool
    steps: int
    running: int
    waiting: int
    queued_tokens: int
    pages: PageCounts
    totals: WorkerTotals
    draining: bool
    stepping: bool
    gpu_allocated_bytes: int
    gpu_reserved_bytes: int
    def __init__(self, worker: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., pool: _Optional[_Union[_common_pb2.Pool, str]] = ..., steps: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., pages: _Optional[_Union[PageCounts, _Mapping]] = ..., totals: _Optional[_Union[WorkerTotals, _Mapping]] = ..., draining: _Optional[bool] = ..., stepping: _Optional[bool] = ..., gpu_allocated_bytes: _Optional[int] = ..., gpu_reserved_bytes: _Optional[int] = ...) -> None: ...

class PageCounts(_message.Message):
    __slots__ = ("total", "free", "live", "cached", "leased", "incoming", "quarantine")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    INCOMING_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    live: int
    cached: int
    leased: int
    incoming: int
    quarantine: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., live: _Optional[int] = ..., cached: _Optional[int] = ..., leased: _Optional[int] = ..., incoming: _Optional[int] = ..., quarantine: _Optional[int] = ...) -> None: ...

class WorkerTotals(_message.Message):
    __slots__ = ("cached_tokens", "computed_tokens", "generated_tokens", "pages_moved", "bytes_moved", "transfer_failures", "preemptions", "looked_up_tokens", "needed_bytes", "steps_ahead", "attention_needed_bytes", "attention_read_bytes", "sharing_groups", "sharing_rows", "transfer_s", "exposed_transfer_s", "over_quota_pages", "prompt_step_s", "decode_step_s", "mixed_step_s", "steps_alone")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_MOVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FAILURES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    LOOKED_UP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEEDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEPS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_NEEDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARING_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SHARING_ROWS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    OVER_QUOTA_PAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_STEP_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    MIXED_STEP_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_ALONE_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    pages_moved: int
    bytes_moved: int
    transfer_failures: int
    preemptions: int
    looked_up_tokens: int
    needed_bytes: int
    steps_ahead: int
    attention_needed_bytes: int
    attention_read_bytes: int
    sharing_groups: int
    sharing_rows: int
    transfer_s: float
    exposed_transfer_s: float
    over_quota_pages: int
    prompt_step_s: float
    decode_step_s: float
    mixed_step_s: float
    steps_alone: int
    def __init__(self, cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., pages_moved: _Optional[int] = ..., bytes_moved: _Optional[int] = ..., transfer_failures: _Optional[int] = ..., preemptions: _Optional[int] = ..., looked_up_tokens: _Optional[int] = ..., needed_bytes: _Optional[int] = ..., steps_ahead: _Optional[int] = ..., attention_needed_bytes: _Optional[int] = ..., attention_read_bytes: _Optional[int] = ..., sharing_groups: _Optional[int] = ..., sharing_rows: _Optional[int] = ..., transfer_s: _Optional[float] = ..., exposed_transfer_s: _Optional[float] = ..., over_quota_pages: _Optional[int] = ..., prompt_step_s: _Optional[float] = ..., decode_step_s: _Optional[float] = ..., mixed_step_s: _Optional[float] = ..., steps_alone: _Optional[int] = ...) -> None: ...
