"""The parties of a cluster: one start of one router, worker or controller each."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["router", "prefill", "decode", "controller"]

CONTROLLER_PARTY_NAME = "controller"  # in proofs; its name in Ray is another one


@dataclass(frozen=True, kw_only=True, slots=True)
class Party:
    """One start of one process of the cluster."""

    role: Role
    name: str  # stable, "prefill-0"; survives restarts
    incarnation: int  # random 64-bit number of this start

    def __str__(self) -> str:
        return f"{self.name} (incarnation {self.incarnation})"
