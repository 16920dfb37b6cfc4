"""Clients in separate processes, enough that they do not limit a cluster.

Each reads its share of a wave's streams in one event loop. Prompts and the connection are ready
before the wave begins, which is at the same moment for all. Each stream begins at its own time,
whether or not earlier ones have ended.
"""

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Self

from benchmarks.prompts import StreamSpec, token_ids
from benchmarks.stream_statistics import StreamRecord
from pagewire import AsyncClient, PagewireError
from pagewire.protos.trace_context import TraceContext
from pagewire.tracing import caller_span

ARM_TIMEOUT_S = 120.0  # making prompts takes a millisecond for each 100,000 tokens
LEAD_S = 0.05  # from the command to the beginning
MARGIN_S = 30.0  # for clients to send what they have, when their streams have timed out
STOP = "stop"


class ClientsFailed(Exception):
    """A client process died or did not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """One process's share of a wave."""

    addresses: Sequence[str]  # the first one is used
    vocab_size: int
    streams: tuple[StreamSpec, ...]
    timeout_s: float  # of each stream


class ClientProcesses:
    """Owns the processes; use it with `with`. One wave at a time."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._running: list[tuple[Connection, list[int]]] = []  # places in the wave
        self._deadline = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, even in the middle of a wave."""
        for process in self._processes:
            process.kill()
            process.join()

    @property
    def count(self) -> int:
        """Processes."""
        return len(self._processes)

    def run(
        self,
        address: str | Sequence[str],
        vocab_size: int,
        streams: Sequence[StreamSpec],
        timeout_s: float,
    ) -> list[StreamRecord]:
        """Read a wave to its end; returns a record for each stream, in order.

        Raises:
            ClientsFailed: See `finish`.
        """
        self.begin(address, vocab_size, streams, timeout_s)
        return self.finish()

    def begin(
        self,
        address: str | Sequence[str],
        vocab_size: int,
        streams: Sequence[StreamSpec],
        timeout_s: float,
        *,
        spreads: bool = False,
    ) -> float:
        """Begin a wave; returns its start on the monotonic clock.

        Of several addresses, each process uses the first one, or if it `spreads` its own one.
        """
        self._running = []
        addresses = [address] if isinstance(address, str) else list(address)
        for index, pipe in enumerate(self._pipes):
            places = list(range(index, len(streams), self.count))
            if places:
                share = tuple(streams[place] for place in places)
                first = index % len(addresses) if spreads else 0
                pipe.send(
                    _Share(
                        addresses=[*addresses[first:], *addresses[:first]],
                        vocab_size=vocab_size,
                        streams=share,
                        timeout_s=timeout_s,
                    )
                )
                self._running.append((pipe, places))
        armed_by = time.monotonic() + ARM_TIMEOUT_S
        for pipe, _ in self._running:
            self._hear(pipe, armed_by)
        begin_at = time.monotonic() + LEAD_S
        for pipe, _ in self._running:
            pipe.send(begin_at)
        last_offset_s = max(each.offset_s for each in streams)
        self._deadline = begin_at + last_offset_s + timeout_s + MARGIN_S
        return begin_at

    def finish(self) -> list[StreamRecord]:
        """Wait for the end of the wave that `begin` began; returns a record for each stream.

        Raises:
            ClientsFailed: A process died, or has not answered when all streams have timed out.
        """
        return [each for each in self._records() if each]

    def stop(self) -> list[StreamRecord | None]:
        """Begin no more streams of a wave that has some left; wait for the end of those that run.

        Returns:
            A record for each stream, in order; None: it has not begun.

        Raises:
            ClientsFailed: See `finish`.
        """
        for pipe, _ in self._running:
            pipe.send(STOP)
        return self._records()

    def _records(self) -> list[StreamRecord | None]:
        records: dict[int, StreamRecord | None] = {}
        for pipe, places in self._running:
            heard = self._hear(pipe, self._deadline)
            assert isinstance(heard, list), "records"
            records |= zip(places, heard, strict=True)
        self._running = []
        return [records[place] for place in sorted(records)]

    def _hear(self, pipe: Connection, deadline: float) -> object:
        try:
            if pipe.poll(max(deadline - time.monotonic(), 0)):
                heard: object = pipe.recv()
                if isinstance(heard, Exception):
                    raise ClientsFailed(f"a client failed: {heard!r}") from heard
                return heard
        except (EOFError, OSError) as error:
            raise ClientsFailed(f"a client process died: {error!r}") from error
        raise ClientsFailed("a client process does not answer")


def _serve(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher's to handle
    with asyncio.Runner() as runner:  # gRPC wants one event loop in a process
        while True:
            try:
                share = pipe.recv()
                try:
                    answer: object = runner.run(_read_share(share, pipe))
                except PagewireError as error:
                    answer = RuntimeError(f"{type(error).__name__}: {error}")
                pipe.send(answer)
            except (EOFError, OSError):  # the launcher is gone
                return


async def _read_share(share: _Share, pipe: Connection) -> list[StreamRecord | None]:
    prompts = [token_ids(each.prompt, share.vocab_size) for each in share.streams]
    async with AsyncClient(share.addresses, default_timeout_s=share.timeout_s) as client:
        await client.list_models(timeout_s=MARGIN_S)  # connects
        pipe.send("armed")
        begin_at = await asyncio.to_thread(pipe.recv)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_read(client, spec, prompt, begin_at))
                for spec, prompt in zip(share.streams, prompts, strict=True)
            ]
            loop = asyncio.get_running_loop()

            def stop() -> None:
                loop.remove_reader(pipe)
                with suppress(EOFError):  # the launcher is gone
                    pipe.recv()
                now = time.monotonic()
                for task, spec in zip(tasks, share.streams, strict=True):
                    if begin_at + spec.offset_s > now:
                        task.cancel()

            loop.add_reader(pipe, stop)
        loop.remove_reader(pipe)
    return [None if task.cancelled() else task.result() for task in tasks]


async def _read(
    client: AsyncClient, spec: StreamSpec, prompt: list[int], begin_at: float
) -> StreamRecord:
    await asyncio.sleep(max(begin_at + spec.offset_s - time.monotonic(), 0))
    times: list[float] = []
    counts: list[int] = []
    tokens: list[int] = []
    usage, error = None, ""
    caller_span.set(TraceContext(spec.traceparent))  # in the context of this stream's own task
    started = time.monotonic()
    try:
        async with client.stream(
            prompt,
            temperature=spec.temperature,
            seed=spec.seed,
            max_tokens=spec.max_tokens,
            ignore_eos=True,
        ) as stream:
            async for delta in stream:
                if delta.token_ids:
                    times.append(time.monotonic())
                    counts.append(len(delta.token_ids))
                    if spec.keeps_tokens:
                        tokens += delta.token_ids
                usage = delta.usage or usage
                if 0 < spec.leaves_after <= sum(counts):
                    break
    except PagewireError as failure:
        error = f"{type(failure).__name__}: {failure}"
    if not error and not spec.leaves_after and sum(counts) != spec.max_tokens:
        error = f"ended with {sum(counts)} of {spec.max_tokens} tokens"
    return StreamRecord(
        started=started,
        times=tuple(times),
        counts=tuple(counts),
        usage=usage,
        error=error,
        token_ids=tuple(tokens),
    )
