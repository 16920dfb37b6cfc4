from pagewire.protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchMembersRequest(_message.Message):
    __slots__ = ("router_id", "applied_version", "contract_version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    APPLIED_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    applied_version: int
    contract_version: int
    def __init__(self, router_id: _Optional[str] = ..., applied_version: _Optional[int] = ..., contract_version: _Optional[int] = ...) -> None: ...

class WatchMembersResponse(_message.Message):
    __slots__ = ("version", "members")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, version: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("worker", "pool", "draining")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    worker: _common_pb2.WorkerRef
    pool: _common_pb2.Pool
    draining: bool
    def __init__(self, worker: _Optional[_Union[_common_pb2.WorkerRef, _Mapping]] = ..., pool: _Optional[_Union[_common_pb2.Pool, str]] = ..., draining: _Optional[bool] = ...) -> None: ...
