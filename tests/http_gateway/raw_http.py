"""HTTP by hand: requests as bytes, answers as they come, and when."""

import json
import socket
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RawAnswer:
    """What a server sent back."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    @property
    def error(self) -> Any:
        return json.loads(self.body)["error"]


def request(
    path: str, body: bytes | str | None = None, *, method: str = "POST", **headers: str
) -> bytes:
    """Return a whole request; header names have underscores for dashes, None leaves one out."""
    body = body.encode() if isinstance(body, str) else body
    lines = {"host": "localhost"}
    if body is not None:
        lines |= {"content-type": "application/json", "content-length": str(len(body))}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(
        f"{name}: {value}\r\n" for name, value in lines.items() if value is not None
    )
    return head.encode() + b"\r\n" + (body or b"")


def exchange(address: tuple[str, int], data: bytes, *, timeout_s: float = 5.0) -> RawAnswer:
    """Send bytes on a new connection and read one answer; the sending side stays open."""
    with socket.create_connection(address, timeout=timeout_s) as connection:
        started = time.monotonic()
        connection.sendall(data)
        return read_answer(connection, started)


def read_answer(connection: socket.socket, started: float) -> RawAnswer:
    """Read one whole answer; a stream of events until its end."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        assert more, f"the connection ended after {data!r}"
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    if "content-length" in headers:
        while len(body) < int(headers["content-length"]):
            body += connection.recv(65536)
    elif headers.get("transfer-encoding") == "chunked":
        while not body.endswith(b"0\r\n\r\n"):
            more = connection.recv(65536)
            assert more, "the stream broke off"
            body += more
    return RawAnswer(int(status_line.split()[1]), headers, body, time.monotonic() - started)


def is_closed(connection: socket.socket, within_s: float = 3.0) -> bool:
    """Whether the other side closes the connection in time."""
    connection.settimeout(within_s)
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True
