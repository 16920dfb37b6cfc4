"""One gRPC call over HTTP/2 by hand, for what no gRPC client sends."""

import asyncio
from collections.abc import Mapping

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4  # types of frames
_END_STREAM, _END_HEADERS = 1, 4  # flags


async def raw_call(
    address: str, method: bytes, metadata: Mapping[bytes, bytes] | None = None
) -> bytes:
    """Call a method with an empty message; return what the server sends until the call's end.

    Args:
        address: HOST:PORT of a server in clear.
        method: The name of the method, of any bytes.
        metadata: Further headers, of any bytes.
    """
    headers = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": method,
        b":authority": b"x",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
        **(metadata or {}),
    }
    block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers.items())
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
        writer.write(_frame(_HEADERS, _END_HEADERS, 1, block))
        writer.write(_frame(_DATA, _END_STREAM, 1, bytes(5)))
        answer = b""
        async with asyncio.timeout(5):
            while True:
                head = await reader.readexactly(9)
                answer += await reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] == _HEADERS and head[4] & _END_STREAM:
                    return answer
    finally:
        writer.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


def _text(value: bytes) -> bytes:
    """Write a text of HPACK without compression."""
    assert len(value) < 127, "its length takes one byte"
    return bytes([len(value)]) + value
