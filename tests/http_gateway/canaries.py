"""Streams that go on beside everything else: each must get its text, without a pause."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.http_gateway.serving import Gateway
from tests.support.wall_clock import assert_within

SONG = "the quick brown fox jumps over the lazy dog " * 4
LONGEST_PAUSE_S = 5.0  # of a host that computes other things, too


class Canary(threading.Thread):
    """Streams one answer after another, on one connection."""

    def __init__(self, served: Gateway) -> None:
        super().__init__()
        self.address = served.host_and_port
        self.num_songs = 0
        self.longest_pause_s = 0.0
        self.failure = ""
        self.is_over = threading.Event()

    def run(self) -> None:
        connection = http.client.HTTPConnection(*self.address, timeout=10)
        try:
            while not self.is_over.is_set():
                self.sing(connection)
        except Exception as error:
            self.failure = repr(error)
        finally:
            connection.close()

    def sing(self, connection: http.client.HTTPConnection) -> None:
        body = {"messages": [{"role": "user", "content": SONG}], "stream": True}
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        song, last = "", time.monotonic()
        while line := response.readline():
            now = time.monotonic()
            self.longest_pause_s = max(self.longest_pause_s, now - last)
            last = now
            if line.startswith(b"data: {"):
                [choice] = json.loads(line[6:])["choices"]
                song += choice["delta"].get("content", "")
        assert song == SONG, song
        self.num_songs += 1


@contextmanager
def singing(served: Gateway, count: int = 2) -> Iterator[list[Canary]]:
    """Let canaries sing; at the end all of them must have, and still do."""
    canaries = [Canary(served) for _ in range(count)]
    for each in canaries:
        each.start()
    try:
        yield canaries
    finally:
        for each in canaries:
            each.is_over.set()
        for each in canaries:
            each.join()
    assert not any(each.failure for each in canaries), [each.failure for each in canaries]
    assert all(each.num_songs for each in canaries)
    longest_pause_s = max(each.longest_pause_s for each in canaries)
    assert_within(longest_pause_s, LONGEST_PAUSE_S)
