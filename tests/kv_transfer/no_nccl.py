"""What stands in for NCCL where a test has one process and no peer."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from kv_transfer.cuda_runtime import OwnMemory, OwnStreams


class Communicator:
    """Moves nothing, at once."""

    def initialize(self, *arguments: object) -> None:
        pass

    def send(self, message: Tensor, peer: int, *, stream: int) -> None:
        pass

    def recv(self, message: Tensor, peer: int, *, stream: int) -> None:
        pass

    def get_async_error(self) -> str:
        return "success"

    def abort(self) -> None:
        pass


def device_of(words: Tensor, communicator: type[Communicator] = Communicator) -> Any:
    """Return what kv_transfer.nccl_link takes for the NcclDevice of a storage with such words."""
    return SimpleNamespace(
        core=SimpleNamespace(
            Communicator=communicator,
            NCCLConfig=lambda **options: options,
            UniqueId=SimpleNamespace(from_bytes=bytes),
        ),
        result=SimpleNamespace(InProgress="in progress", Success="success"),
        device=words.device,
        words=words,
        wire_streams=OwnStreams(words.device),
        copy_streams=OwnStreams(words.device),
        memory=OwnMemory(words.device),
    )
