"""Workers as the router tells of them, for commands to show."""

from pagewire import ClusterStatus, PageCounts, WorkerStatus

PAGES = PageCounts(total=10, free=4, live=3, cached=1, leased=1, incoming=1, quarantine=0)


def worker(**changes):
    values = dict.fromkeys(WorkerStatus.__dataclass_fields__, 0)
    values |= {"worker_id": "decode-0", "address": "h:1", "pool": "decode", "state": "ready"}
    values |= {"misfit": "", "silence": ""}
    return WorkerStatus(**(values | {"pages": PAGES, "incarnation": 255} | changes))


def status(*workers):
    return ClusterStatus(
        workers=workers, active_requests=2, finished_requests=9, resumed_requests=1, index_pages=77
    )


BUSY = worker(
    worker_id="prefill-10",
    pool="prefill",
    state="draining",
    address="10.120.130.140:50051",
    incarnation=2**64 - 1,
    running=256,
    waiting=1024,
    looked_up_tokens=1_123_456_788,
    cached_tokens=999_999_999,
    computed_tokens=123_456_789,
    generated_tokens=98_765_432,
    pages=PageCounts(
        total=131_072,
        free=1_000,
        live=17_727,
        cached=100_000,
        leased=0,
        incoming=12_345,
        quarantine=0,
    ),
    pages_moved=1_234_567,
    bytes_moved=2**30 - 1,
    attention_needed_bytes=2**50,
    attention_read_bytes=2**48,
)
