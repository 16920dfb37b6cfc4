"""Streams that go on beside everything else: each must get what it is due, without a pause."""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tests.http_gateway.serving import Gateway
from tests.support.wall_clock import assert_within, on_this_host

SONG = "the quick brown fox jumps over the lazy dog " * 4
LONGEST_PAUSE_S = 5.0


class Canary(threading.Thread):
    """Streams one song after another until it is over, one at least, and judges each."""

    def __init__(self, served: Gateway, name: str) -> None:
        super().__init__(name=name)
        self.served = served
        self.num_songs = 0
        self.longest_pause_s = 0.0
        self.failure = ""
        self.is_over = threading.Event()

    def run(self) -> None:
        try:
            while not self.num_songs or not self.is_over.is_set():
                self.sing()
                self.num_songs += 1
        except Exception as error:
            self.failure = f"{self.name}, song {self.num_songs}: {error!r}"

    def sing(self) -> None:
        raise NotImplementedError

    def watched(self, parts: Iterator[Any]) -> Iterator[Any]:
        """Pass on what comes, and note the longest time between two of them."""
        last = time.monotonic()
        for part in parts:
            now = time.monotonic()
            self.longest_pause_s = max(self.longest_pause_s, now - last)
            last = now
            yield part


class ParrotCanary(Canary):
    """Has its prompt repeated, each time on the same connection."""

    def run(self) -> None:
        self.connection = http.client.HTTPConnection(*self.served.host_and_port, timeout=10)
        with contextlib.closing(self.connection):
            super().run()

    def sing(self) -> None:
        body = {"messages": [{"role": "user", "content": SONG}], "stream": True}
        song = ""
        for event in self.watched(events_of(self.connection, "/v1/chat/completions", body)):
            [choice] = event["choices"]
            song += choice["delta"].get("content", "")
        assert song == SONG, song


def events_of(
    connection: http.client.HTTPConnection, path: str, body: dict[str, Any]
) -> Iterator[Any]:
    """Post a request for a stream; yields its events as they come."""
    headers = {"content-type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    for line in iter(response.readline, b""):
        if line.startswith(b"data: {"):
            yield json.loads(line[len(b"data: ") :])


@contextmanager
def undisturbed(canaries: Sequence[Canary], longest_pause_s: float) -> Iterator[None]:
    """Let canaries sing; at the end all of them must have, and none was disturbed."""
    for each in canaries:
        each.start()
    try:
        yield
    finally:
        for each in canaries:
            each.is_over.set()
        for each in canaries:
            each.join()
    assert not any(each.failure for each in canaries), [each.failure for each in canaries]
    assert all(each.num_songs for each in canaries)
    longest = max(each.longest_pause_s for each in canaries)
    assert_within(longest, on_this_host(longest_pause_s))


def singing(served: Gateway) -> AbstractContextManager[None]:
    """Let two sing beside what a test does with a gateway whose model is a parrot."""
    canaries = [ParrotCanary(served, f"canary {number}") for number in range(2)]
    return undisturbed(canaries, LONGEST_PAUSE_S)
