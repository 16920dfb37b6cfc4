"""The status of a cluster with one worker, as a router reports it."""

from pagewire import ClusterStatus, PageCounts, WorkerStatus

PAGES = PageCounts(total=21, free=1, live=2, cached=3, leased=4, incoming=5, quarantine=6)
ONE_OF_EACH = ClusterStatus(
    workers=(
        WorkerStatus(
            worker_id="decode-0",
            incarnation=7,
            address="127.0.0.1:1",
            pool="decode",
            state="ready",
            heartbeat_age_ms=1,
            steps=2,
            running=3,
            waiting=4,
            queued_tokens=5,
            pages=PAGES,
            gpu_allocated_bytes=20,
            gpu_reserved_bytes=21,
            looked_up_tokens=6,
            cached_tokens=7,
            computed_tokens=8,
            generated_tokens=9,
            pages_moved=10,
            bytes_moved=11,
            transfer_failures=12,
            preemptions=13,
            needed_bytes=14,
            steps_ahead=1,
            steps_alone=1,
            attention_needed_bytes=15,
            attention_read_bytes=16,
            sharing_groups=17,
            sharing_rows=18,
            transfer_s=1.5,
            exposed_transfer_s=0.5,
            over_quota_pages=19,
            prompt_step_s=2.5,
            decode_step_s=3.5,
            mixed_step_s=4.5,
        ),
    ),
    active_requests=1,
    finished_requests=2,
    resumed_requests=3,
    index_pages=4,
)
