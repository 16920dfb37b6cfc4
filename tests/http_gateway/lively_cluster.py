"""A router that knows a busy cluster and repeats what it is asked, for the page's tests."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from pagewire.protos import common_pb2, inference_pb2
from tests.pagewire.scripted_service import response

READY = inference_pb2.WORKER_STATE_READY
DRAINING = inference_pb2.WORKER_STATE_DRAINING
DEAD = inference_pb2.WORKER_STATE_DEAD
PAGE_BYTES = 128 * 1024


@dataclass
class LivelyCluster:
    """Two prefill and four decode workers, whose sums grow as time goes by."""

    token_s: float = 0.002  # between two words of an answer
    wave: float = 0.0  # by which share the rates rise and fall
    answers: dict[str, str] = field(default_factory=dict)  # to questions that are not repeated
    started_at: float = field(default_factory=time.monotonic)
    hides: set[str] = field(default_factory=set)  # ids of workers that are not told of

    def status(self) -> inference_pb2.GetClusterStatusResponse:
        """What the router knows now."""
        workers = [
            self._prefill("prefill-0", pages_per_s=210),
            self._prefill("prefill-1", pages_per_s=95),
            self._decode("decode-0", tokens_per_s=640, pages_per_s=150, running=14, waiting=2),
            self._decode("decode-1", tokens_per_s=512, pages_per_s=105, running=11, waiting=0),
            self._decode("decode-2", tokens_per_s=280, pages_per_s=50, running=5, waiting=0),
            self._decode("decode-3", state=DEAD, age_ms=12_400),
        ]
        return inference_pb2.GetClusterStatusResponse(
            workers=[each for each in workers if each.worker.worker_id not in self.hides],
            active_requests=32,
            finished_requests=self._sum(9, 1804),
            resumed_requests=1,
            index_pages=2310,
            hot_prefixes=[
                inference_pb2.HotPrefix(
                    id=bytes.fromhex(name), tokens=tokens, hits=hits, workers=workers
                )
                for name, tokens, hits, workers in (
                    ("9f24c1d0", 2048, 812, ["decode-0", "decode-1", "decode-2", "prefill-0"]),
                    ("03be77a9", 512, 240, ["decode-0", "prefill-1"]),
                    ("c4118e5f", 96, 31, []),
                )
            ],
        )

    async def answer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Answer the last message, word by word; without an answer repeat it."""
        question = request.chat.messages[-1].content
        words = self.answers.get(question, question).split(" ")
        for index, word in enumerate(words):
            await asyncio.sleep(self.token_s)
            is_last = index == len(words) - 1
            yield response(
                word + " " * (not is_last),
                (7,),
                first_index=index,
                finish_reason=common_pb2.FINISH_REASON_STOP if is_last else 0,
            )
        num_messages = len(request.chat.messages)
        stats = common_pb2.RequestStats(cached_tokens=64 * (num_messages // 2))
        yield inference_pb2.GenerateResponse(
            request_id="r1",
            usage=inference_pb2.Usage(
                prompt_tokens=64 * (num_messages // 2) + 23,
                completion_tokens=len(words) + 1,
                stats=stats,
            ),
        )

    def _sum(self, per_s: float, before: int = 0) -> int:
        elapsed_s = time.monotonic() - self.started_at
        surplus_s = self.wave * 5 * (1 - math.cos(elapsed_s / 5))
        return before + int(per_s * (elapsed_s + surplus_s))

    def _prefill(self, worker_id: str, *, pages_per_s: int) -> inference_pb2.WorkerStatus:
        pages = inference_pb2.PageCounts(total=1024, free=310, live=70, cached=600, leased=44)
        totals = inference_pb2.WorkerTotals(
            looked_up_tokens=self._sum(pages_per_s * 30, 10**6),
            cached_tokens=self._sum(pages_per_s * 12, 4 * 10**5),
            computed_tokens=self._sum(pages_per_s * 18, 6 * 10**5),
            pages_moved=self._sum(pages_per_s, 40_000),
            bytes_moved=self._sum(pages_per_s * PAGE_BYTES, 40_000 * PAGE_BYTES),
        )
        beat = inference_pb2.Heartbeat(
            steps=self._sum(20),
            running=3,
            waiting=1,
            queued_tokens=1800,
            pages=pages,
            totals=totals,
        )
        return _status(worker_id, common_pb2.POOL_PREFILL, READY, beat, 120)

    def _decode(
        self,
        worker_id: str,
        *,
        tokens_per_s: int = 0,
        pages_per_s: int = 0,
        running: int = 0,
        waiting: int = 0,
        state: int = READY,
        age_ms: int = 80,
    ) -> inference_pb2.WorkerStatus:
        live = 52 * running
        counts = {"live": live, "cached": 560, "incoming": 3 * running, "quarantine": waiting}
        pages = inference_pb2.PageCounts(total=1536, free=1536 - sum(counts.values()), **counts)
        totals = inference_pb2.WorkerTotals(
            looked_up_tokens=self._sum(tokens_per_s * 9, 3 * 10**6),
            cached_tokens=self._sum(tokens_per_s * 7, 2 * 10**6),
            computed_tokens=self._sum(tokens_per_s * 0.1, 10**4),
            generated_tokens=self._sum(tokens_per_s, 7 * 10**5),
            pages_moved=self._sum(pages_per_s, 27_000),
            bytes_moved=self._sum(pages_per_s * PAGE_BYTES, 27_000 * PAGE_BYTES),
            transfer_failures=waiting,
            attention_needed_bytes=self._sum(tokens_per_s * 2**25),
            attention_read_bytes=self._sum(tokens_per_s * 2**23),
        )
        beat = inference_pb2.Heartbeat(
            steps=self._sum(40), running=running, waiting=waiting, pages=pages, totals=totals
        )
        return _status(worker_id, common_pb2.POOL_DECODE, state, beat, age_ms)


def _status(
    worker_id: str, pool: int, state: int, beat: inference_pb2.Heartbeat, age_ms: int
) -> inference_pb2.WorkerStatus:
    return inference_pb2.WorkerStatus(
        worker=common_pb2.WorkerRef(worker_id=worker_id, incarnation=7, address="secret-host:1"),
        pool=pool,
        state=state,
        heartbeat=beat,
        heartbeat_age_ms=age_ms,
        silence="UNAVAILABLE: ipv4:secret-host:1",
    )
