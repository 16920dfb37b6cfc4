"""A load on a cluster of hosts: its requests come at fixed times, whatever becomes of earlier ones.

Some come over HTTP. Most answers are short; a few take longer than a worker that leaves is given.
"""

import http.client
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from benchmarks.client_processes import ClientProcesses
from benchmarks.hosted_cluster import HostedCluster
from benchmarks.prompts import Seeds, Segment, StreamSpec, token_ids, wave
from benchmarks.stream_statistics import StreamRecord
from cluster.demo_model import demo_model_dir

RATE, HTTP_RATE = 18, 2  # requests a second over gRPC and over HTTP
MAX_S = 600  # no load lasts longer
TIMEOUT_S = 120.0  # of a request
SHORT, LONG = 4, 300  # tokens of an answer
LONG_EVERY = 17  # one of so many is long; odd, so that both of two clients have some
# Prompts, few enough that all answers can be computed again. With this seed every token of them is
# likelier than the next one by far more than rounding (0.005 in the logits).
NUM_SHORT, NUM_LONG, SEED = 40, 4, 5396
HTTP_PORT = 8000  # of all gateways


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpAnswer:
    """What became of a short request over HTTP."""

    prompt: tuple[Segment, ...]
    started: float  # on the monotonic clock
    text: str = ""
    error: str = ""  # empty: it ended as it should


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What was sent, in this order."""

    begin_at: float  # on the monotonic clock
    specs: list[StreamSpec]  # over gRPC
    records: list[StreamRecord]  # of these
    over_http: list[HttpAnswer]

    @property
    def num_sent(self) -> int:
        return len(self.records) + len(self.over_http)

    @property
    def seconds(self) -> float:
        """From the first request to the last one."""
        return max(self.records[-1].started, self.over_http[-1].started) - self.begin_at

    @property
    def latest_s(self) -> float:
        """The most that any request was sent after its time."""
        grpc = (
            (each.offset_s, record.started)
            for each, record in zip(self.specs, self.records, strict=True)
        )
        http = ((index / HTTP_RATE, each.started) for index, each in enumerate(self.over_http))
        return max(started - self.begin_at - offset_s for offset_s, started in (*grpc, *http))


def under_load(
    cluster: HostedCluster, clients: ClientProcesses, work: Callable[[], Any]
) -> tuple[Load, Any]:
    """Let requests come until some work is done, and wait for all answers; returns its result."""
    specs = requests()
    begin_at = clients.begin(cluster.addresses, cluster.vocab_size, specs, TIMEOUT_S, spreads=True)
    with ThreadPoolExecutor(1) as thread:
        stopped = threading.Event()
        answers = thread.submit(send_over_http, cluster, begin_at, stopped)
        try:
            result = work()
        finally:
            stopped.set()
            records = clients.stop()
    sent = [(spec, record) for spec, record in zip(specs, records, strict=True) if record]
    assert [spec for spec, _ in sent] == specs[: len(sent)], "some were left out"
    load = Load(
        begin_at=begin_at,
        specs=[spec for spec, _ in sent],
        records=[record for _, record in sent],
        over_http=answers.result(),
    )
    return load, result


def requests() -> list[StreamSpec]:
    """Return the requests over gRPC, more than are sent."""
    seeds = Seeds(SEED)
    short = cycle(wave(seeds, NUM_SHORT, unique=16, shared=16, max_tokens=SHORT))
    long = cycle(wave(seeds, NUM_LONG, unique=16, shared=16, max_tokens=LONG))
    return [
        replace(
            next(short if index % LONG_EVERY else long), offset_s=index / RATE, keeps_tokens=True
        )
        for index in range(RATE * MAX_S)
    ]


def send_over_http(
    cluster: HostedCluster, begin_at: float, stopped: threading.Event
) -> list[HttpAnswer]:
    """Send prompts of short answers to the gateway on the edge, until it is stopped."""
    prompts = [each.prompt for each in requests() if each.max_tokens == SHORT]
    # As many threads as requests can be under way.
    with ThreadPoolExecutor(int(HTTP_RATE * TIMEOUT_S)) as threads:
        asked = []
        for index, prompt in enumerate(prompts):
            if stopped.wait(max(begin_at + index / HTTP_RATE - time.monotonic(), 0)):
                break
            asked.append(threads.submit(ask_over_http, cluster, prompt))
        return [each.result() for each in asked]


def ask_over_http(cluster: HostedCluster, prompt: tuple[Segment, ...]) -> HttpAnswer:
    started = time.monotonic()
    try:
        told = complete(cluster, cluster.edge.address, token_ids(prompt, cluster.vocab_size), SHORT)
    except (OSError, http.client.HTTPException, ValueError) as failure:
        return HttpAnswer(prompt=prompt, started=started, error=repr(failure))
    return HttpAnswer(prompt=prompt, started=started, text=told["choices"][0]["text"])


def complete(
    cluster: HostedCluster, address: str, prompt: list[int], num_tokens: int
) -> dict[str, Any]:
    """Return what the gateway at an address answers to a host without Ray.

    Raises:
        OSError, http.client.HTTPException, ValueError: It answers nothing, or an error.
    """
    body = json.dumps(
        {
            "model": demo_model_dir().name,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
    )
    with cluster.edge.network():
        connection = http.client.HTTPConnection(address, HTTP_PORT, timeout=TIMEOUT_S)
        connection.connect()
    with closing(connection):
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        told = json.load(response)
    if response.status != http.HTTPStatus.OK:
        raise http.client.HTTPException(f"{response.status}: {told}")
    return told
