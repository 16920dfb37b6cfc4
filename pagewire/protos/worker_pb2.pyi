from pagewire.protos import common_pb2 as _common_pb2
from pagewire.protos import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("worker", "pool", "model", "model_fingerprint", "eos_token_ids", "num_pages", "page_bytes", "transports", "device", "tokenizer_digest")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    worker: _common_pb2.WorkerRef
    pool: _common_pb2.Pool
    model: _inference_pb2.Model
    model_fingerprint: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_pages: int
    page_bytes: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    device: str
    tokenizer_digest: str
    def __init__(self, worker: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., pool: _Optional[_Union[_common_pb2.Pool, str]] = ..., model: _Optional[_Union[_inference_pb2.Model, _Mapping]] = ..., model_fingerprint: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., num_pages: _Optional[int] = ..., page_bytes: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., device: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("heartbeat",)
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    heartbeat: _inference_pb2.Heartbeat
    def __init__(self, heartbeat: _Optional[_Union[_inference_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class SubscribeCacheEventsRequest(_message.Message):
    __slots__ = ("incarnation", "after_sequence")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    after_sequence: int
    def __init__(self, incarnation: _Optional[int] = ..., after_sequence: _Optional[int] = ...) -> None: ...

class SubscribeCacheEventsResponse(_message.Message):
    __slots__ = ("incarnation", "sequence", "snapshot", "stored", "removed")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    sequence: int
    snapshot: bool
    stored: bytes
    removed: bytes
    def __init__(self, incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class MeetRequest(_message.Message):
    __slots__ = ("prefill_workers",)
    PREFILL_WORKERS_FIELD_NUMBER: _ClassVar[int]
    prefill_workers: _containers.RepeatedCompositeFieldContainer[_common_pb2.WorkerRef]
    def __init__(self, prefill_workers: _Optional[_Iterable[_Union[_common_pb2.WorkerRef, _Mapping]]] = ...) -> None: ...

class MeetResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "more")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    hello: SessionHello
    submit: SubmitRequest
    cancel: CancelRequest
    more: _containers.RepeatedCompositeFieldContainer[SessionRequest]
    def __init__(self, hello: _Optional[_Union[SessionHello, _Mapping]] = ..., submit: _Optional[_Union[SubmitRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ..., more: _Optional[_Iterable[_Union[SessionRequest, _Mapping]]] = ...) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("router_id", "incarnation", "contract_version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    incarnation: int
    contract_version: int
    def __init__(self, router_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., contract_version: _Optional[int] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_token_ids", "sampling", "choices", "prefill_candidates", "cache_salt", "timeout_ms", "failed_passes", "traceparent", "tracestate", "cache_share", "first_stream")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    FAILED_PASSES_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SHARE_FIELD_NUMBER: _ClassVar[int]
    FIRST_STREAM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_token_ids: bytes
    sampling: _common_pb2.SamplingParams
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceState]
    prefill_candidates: _containers.RepeatedCompositeFieldContainer[_common_pb2.WorkerRef]
    cache_salt: bytes
    timeout_ms: int
    failed_passes: int
    traceparent: str
    tracestate: str
    cache_share: float
    first_stream: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., choices: _Optional[_Iterable[_Union[ChoiceState, _Mapping]]] = ..., prefill_candidates: _Optional[_Iterable[_Union[_common_pb2.WorkerRef, _Mapping]]] = ..., cache_salt: _Optional[bytes] = ..., timeout_ms: _Optional[int] = ..., failed_passes: _Optional[int] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., cache_share: _Optional[float] = ..., first_stream: _Optional[int] = ...) -> None: ...

class ChoiceState(_message.Message):
    __slots__ = ("choice", "emitted_token_ids")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    emitted_token_ids: bytes
    def __init__(self, choice: _Optional[int] = ..., emitted_token_ids: _Optional[bytes] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id", "choices")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., choices: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("deltas", "failures", "tokens")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[TokenDelta]
    failures: _containers.RepeatedCompositeFieldContainer[RequestFailure]
    tokens: SessionTokens
    def __init__(self, deltas: _Optional[_Iterable[_Union[TokenDelta, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[RequestFailure, _Mapping]]] = ..., tokens: _Optional[_Union[SessionTokens, _Mapping]] = ...) -> None: ...

class SessionTokens(_message.Message):
    __slots__ = ("streams", "token_ids", "indices")
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    streams: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, streams: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., indices: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("request_id", "attempt", "choice", "token_ids", "first_index", "logprobs", "finish_reason", "stats")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choice: int
    token_ids: bytes
    first_index: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    finish_reason: _common_pb2.FinishReason
    stats: _common_pb2.RequestStats
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., first_index: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stats: _Optional[_Union[_common_pb2.RequestStats, _Mapping]] = ...) -> None: ...

class RequestFailure(_message.Message):
    __slots__ = ("request_id", "attempt", "code", "message", "failed_passes", "leaving")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FAILED_PASSES_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    code: int
    message: str
    failed_passes: int
    leaving: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., failed_passes: _Optional[int] = ..., leaving: _Optional[bool] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("receiver", "sender_incarnation", "connection_id", "transport", "offer", "layout")
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    SENDER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    receiver: _common_pb2.WorkerRef
    sender_incarnation: int
    connection_id: str
    transport: str
    offer: bytes
    layout: str
    def __init__(self, receiver: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., sender_incarnation: _Optional[int] = ..., connection_id: _Optional[str] = ..., transport: _Optional[str] = ..., offer: _Optional[bytes] = ..., layout: _Optional[str] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("attempt_id", "start", "transfer", "leave", "more")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    attempt_id: int
    start: PrefillStart
    transfer: TransferMessage
    leave: PrefillLeave
    more: _containers.RepeatedCompositeFieldContainer[PrefillRequest]
    def __init__(self, attempt_id: _Optional[int] = ..., start: _Optional[_Union[PrefillStart, _Mapping]] = ..., transfer: _Optional[_Union[TransferMessage, _Mapping]] = ..., leave: _Optional[_Union[PrefillLeave, _Mapping]] = ..., more: _Optional[_Iterable[_Union[PrefillRequest, _Mapping]]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("attempt_id", "transfer", "result", "failure", "end", "more")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    attempt_id: int
    transfer: TransferMessage
    result: PrefillResult
    failure: PrefillFailure
    end: PrefillEnd
    more: _containers.RepeatedCompositeFieldContainer[PrefillResponse]
    def __init__(self, attempt_id: _Optional[int] = ..., transfer: _Optional[_Union[TransferMessage, _Mapping]] = ..., result: _Optional[_Union[PrefillResult, _Mapping]] = ..., failure: _Optional[_Union[PrefillFailure, _Mapping]] = ..., end: _Optional[_Union[PrefillEnd, _Mapping]] = ..., more: _Optional[_Iterable[_Union[PrefillResponse, _Mapping]]] = ...) -> None: ...

class PrefillStart(_message.Message):
    __slots__ = ("request_id", "ticket", "connection_id", "token_ids", "prompt_len", "first_page", "sampling", "choices", "cache_salt", "failed_passes", "traceparent", "tracestate", "cache_share", "contract_version")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    FAILED_PASSES_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SHARE_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    ticket: TransferTicket
    connection_id: str
    token_ids: bytes
    prompt_len: int
    first_page: int
    sampling: _common_pb2.SamplingParams
    choices: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: bytes
    failed_passes: int
    traceparent: str
    tracestate: str
    cache_share: float
    contract_version: int
    def __init__(self, request_id: _Optional[str] = ..., ticket: _Optional[_Union[TransferTicket, _Mapping]] = ..., connection_id: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., prompt_len: _Optional[int] = ..., first_page: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., choices: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[bytes] = ..., failed_passes: _Optional[int] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., cache_share: _Optional[float] = ..., contract_version: _Optional[int] = ...) -> None: ...

class PrefillResult(_message.Message):
    __slots__ = ("token_ids", "logprobs", "cached_tokens", "computed_tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    cached_tokens: int
    computed_tokens: int
    def __init__(self, token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ...) -> None: ...

class PrefillFailure(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class PrefillLeave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillEnd(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class TransferTicket(_message.Message):
    __slots__ = ("transfer_id", "attempt", "sender_incarnation", "receiver_incarnation")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SENDER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    attempt: int
    sender_incarnation: int
    receiver_incarnation: int
    def __init__(self, transfer_id: _Optional[bytes] = ..., attempt: _Optional[int] = ..., sender_incarnation: _Optional[int] = ..., receiver_incarnation: _Optional[int] = ...) -> None: ...

class TransferMessage(_message.Message):
    __slots__ = ("ticket", "granted", "chunk_ready", "chunk_go", "chunk_posted", "chunk_ack", "abort")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_READY_FIELD_NUMBER: _ClassVar[int]
    CHUNK_GO_FIELD_NUMBER: _ClassVar[int]
    CHUNK_POSTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ACK_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ticket: TransferTicket
    granted: Granted
    chunk_ready: ChunkReady
    chunk_go: ChunkGo
    chunk_posted: ChunkPosted
    chunk_ack: ChunkAck
    abort: Abort
    def __init__(self, ticket: _Optional[_Union[TransferTicket, _Mapping]] = ..., granted: _Optional[_Union[Granted, _Mapping]] = ..., chunk_ready: _Optional[_Union[ChunkReady, _Mapping]] = ..., chunk_go: _Optional[_Union[ChunkGo, _Mapping]] = ..., chunk_posted: _Optional[_Union[ChunkPosted, _Mapping]] = ..., chunk_ack: _Optional[_Union[ChunkAck, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ChunkReady(_message.Message):
    __slots__ = ("chunk", "first_page", "num_pages", "is_last")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    first_page: int
    num_pages: int
    is_last: bool
    def __init__(self, chunk: _Optional[int] = ..., first_page: _Optional[int] = ..., num_pages: _Optional[int] = ..., is_last: _Optional[bool] = ...) -> None: ...

class ChunkGo(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    def __init__(self, chunk: _Optional[int] = ...) -> None: ...

class ChunkPosted(_message.Message):
    __slots__ = ("chunk", "order", "digests")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    order: int
    digests: bytes
    def __init__(self, chunk: _Optional[int] = ..., order: _Optional[int] = ..., digests: _Optional[bytes] = ...) -> None: ...

class ChunkAck(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    def __init__(self, chunk: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...
