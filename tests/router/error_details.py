"""The details of a call's rich error."""

from typing import Any

import grpc
from grpc_status import rpc_status


def details(error: grpc.aio.AioRpcError | None, kind: Any) -> Any:
    """Return the detail of a kind that a rich status must hold."""
    assert error is not None
    status = rpc_status.from_call(_Sync(error))
    assert status is not None, error
    for each in status.details:
        if each.Is(kind.DESCRIPTOR):
            detail = kind()
            each.Unpack(detail)
            return detail
    raise AssertionError(f"no {kind.__name__} in {status}")


class _Sync:
    """An AioRpcError as rpc_status.from_call wants to see it."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self._error = error

    def code(self) -> grpc.StatusCode:
        return self._error.code()

    def details(self) -> str | None:
        return self._error.details()

    def trailing_metadata(self) -> list[tuple[str, Any]]:
        return [(key, value) for key, value in self._error.trailing_metadata()]
