"""Identity and model of a worker: values that both pools are constructed with."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from credentials.party import Party, Role
from protos.contract import CONTRACT_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerIdentity:
    """One start of one worker. A message for another incarnation is refused."""

    worker_id: str  # stable name, "prefill-0"; survives restarts
    incarnation: int  # random 64-bit number, new at each start of the process
    address: str  # gRPC address, "host:port"
    contract_version: int = CONTRACT_VERSION
    device: str = ""  # type of the device that computes; empty for other workers

    def as_party(self, role: Role) -> Party:
        """Return the party that it is as caller and as callee."""
        return Party(role=role, name=self.worker_id, incarnation=self.incarnation)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """The served model as schedulers and routers need to know it."""

    name: str
    fingerprint: str  # identity of weights and configuration
    vocab_size: int  # token ids are below it
    max_context_tokens: int  # longest prompt plus output; see `within`
    eos_token_ids: tuple[int, ...]
    text_folder: Path | None = None  # with its tokenizer.json; None: no constraints
    tokenizer_digest: str = ""  # of that file

    def within(self, num_slots: int) -> "ModelInfo":
        """Return the model with the context that a pool of `num_slots` token slots can serve.

        A single request must fit, or it could never end.
        """
        return replace(self, max_context_tokens=min(self.max_context_tokens, num_slots))

    def check_tokens(self, field: str, token_ids: Sequence[int]) -> None:
        """Raise ValueError, which names `field`, if a token id is outside the vocabulary."""
        if len(token_ids) == 0:
            return
        # To read the buffer is quicker than to convert, and reduce() than max().
        ids = np.frombuffer(token_ids, np.uintc) if isinstance(token_ids, array) else token_ids
        largest = int(np.maximum.reduce(ids))
        if largest >= self.vocab_size:
            raise ValueError(f"{field}: found {largest}; allowed: 0 to {self.vocab_size - 1}")
