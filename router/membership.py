"""The workers that a router may use: the argument of `Router.set_workers`."""

from dataclasses import dataclass, field
from typing import Literal

from protos.contract import CONTRACT_VERSION

WorkerRole = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerMember:
    """One start of one worker. A new incarnation under the same worker_id replaces the old one."""

    worker_id: str  # stable name, "prefill-0"
    incarnation: int  # random 64-bit number of this start
    address: str  # "host:port" for connect_channel
    pool: WorkerRole  # as the contract and metrics call it
    contract_version: int = CONTRACT_VERSION  # see protos/contract.py
    # It finishes its requests and then leaves. The start stays the same, so not compared.
    is_draining: bool = field(default=False, compare=False)
