"""Who the router may use: what the controller (or a test) hands to `Router.set_workers`."""

from dataclasses import dataclass, field
from typing import Literal

PoolName = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerMember:
    """One start of one worker. A new incarnation under the same worker_id replaces the old one."""

    worker_id: str  # stable name, "prefill-0"
    incarnation: int  # random 64-bit number of this start
    address: str  # "host:port" for connect_channel
    pool: PoolName
    # It finishes what it has and then leaves. The same start before and after, so not compared.
    is_draining: bool = field(default=False, compare=False)
