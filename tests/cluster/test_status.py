import json

from rich.console import Console

from cluster.status import status_json, status_table
from pagewire import ClusterStatus, PageCounts, WorkerStatus

PAGES = PageCounts(total=10, free=4, live=3, cached=1, leased=1, incoming=1, quarantine=0)


def worker(**changes):
    values = dict.fromkeys(WorkerStatus.__dataclass_fields__, 0)
    values |= {"worker_id": "decode-0", "address": "h:1", "pool": "decode", "state": "ready"}
    return WorkerStatus(**(values | {"pages": PAGES, "incarnation": 255} | changes))


def status(*workers):
    return ClusterStatus(
        workers=workers, active_requests=2, finished_requests=9, resumed_requests=1, index_pages=77
    )


def test_table_shows_pages_rates_and_sums():
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    busy = worker(cached_tokens=30, computed_tokens=10, pages_moved=5, bytes_moved=1536)
    dead = worker(worker_id="prefill-0", pool="prefill", state="dead")

    console.print(status_table(status(dead, busy)))
    text = console.export_text()

    row = next(line for line in text.splitlines() if "decode-0" in line)
    for cell in ("ready", "00000000000000ff", "6/10", "75%", "1.5 KiB"):
        assert cell in row
    assert text.index("decode-0") < text.index("prefill-0")
    assert "active requests 2" in text
    assert "index 77" in text


def test_json_carries_everything_and_the_hit_rate():
    content = json.loads(status_json(status(worker(cached_tokens=3, computed_tokens=1))))

    assert content["workers"][0]["hit_rate"] == 0.75
    assert content["workers"][0]["pages"]["incoming"] == 1
    assert content["finished_requests"] == 9
