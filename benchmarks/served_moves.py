"""Shows where the time goes in which a decode worker receives pages from a GPU of its host.

    python -m benchmarks.served_moves --model DIR --out benchmarks/results/served-moves-X.json

Case N: a prompt of N tokens that the prefill worker has cached and the decode worker must receive
in full; pages of both lie in random order, as in benchmarks.disaggregation. For a transfer, means
of all but the first: `receive_ms` in which a receive was posted, as the worker counts it;
`device_ms` in which its device copied pages; `launch_ms` in which the host launched the copies;
`wake_ms` by which the threads that copy took longer than that; `between_ms` in which none of them
copied, because first the event loop of one worker or of both had a turn. Where the copies of a
chunk are launched before those of the last one end, no such time lies between the two.
"""

import json
from dataclasses import replace
from functools import partial

from benchmarks.altered_workers import ALL_MOVE
from benchmarks.case_runs import CaseFailed, Run
from benchmarks.move_times import MoveTimes
from benchmarks.prompts import wave
from benchmarks.stream_statistics import Row
from benchmarks.timed_workers import TimedCluster, Written, run_timed

LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)  # tokens
REPEATS = 10


def parts_of(chunks: list[MoveTimes]) -> Row:
    """Return where the time of one transfer went, ms; chunks in order."""
    # Of those posted at once, one is received, and of those launched at once, one is copied.
    pairs = list(zip(chunks, [MoveTimes(), *chunks], strict=False))
    receive_s = sum(
        chunk.received_s - max(chunk.posted_s, before.received_s) for chunk, before in pairs
    )
    device_ms = sum(chunk.device_ms for chunk in chunks)
    copy_ms = 1e3 * sum(
        chunk.copied_s - max(chunk.begun_s, before.copied_s) for chunk, before in pairs
    )
    return {
        "receive_ms": 1e3 * receive_s,
        "device_ms": device_ms,
        "launch_ms": 1e3 * sum(chunk.launched_s - chunk.begun_s for chunk in chunks),
        "wake_ms": copy_ms - device_ms,
        "between_ms": 1e3 * receive_s - copy_ms,
    }


def moves(length: int, written: Written, run: Run) -> Row:
    """Move a prompt's pages again and again, and read what its worker wrote meanwhile."""
    specs = wave(run.seeds, 1, unique=run.sizes.tokens(length))
    run.wave(specs)
    written.text()
    transfers = []
    waves = []
    for _ in range(REPEATS + 1):
        waves.append(run.wave(specs))
        chunks = [MoveTimes(**json.loads(line)) for line in written.text().splitlines()]
        transfers.append((sum(chunk.num_bytes for chunk in chunks), len(chunks), parts_of(chunks)))
    work = run.check_waves(waves[1:])
    (num_bytes, num_chunks, _), *_ = transfers
    if any(each[:2] != (num_bytes, num_chunks) for each in transfers) or not num_chunks:
        raise CaseFailed("not all pages of the prompt came over CUDA IPC each time", work)
    parts = [each for _, _, each in transfers[1:]]
    means = {key: sum(each[key] for each in parts) / REPEATS for key in parts[0]}
    return {
        "ms": round(means["receive_ms"], 3),
        "gb_per_s": round(num_bytes / means["receive_ms"] / 1e6, 2),
        "device_gb_per_s": round(num_bytes / means["device_ms"] / 1e6, 2),
        **{key: round(value, 3) for key, value in means.items()},
        "chunks": num_chunks,
        "bytes": num_bytes,
        "repeats": REPEATS,
    }


def main() -> None:
    """Run from the command line."""
    cases = {str(length): partial(moves, length) for length in LENGTHS}
    run_timed(
        __doc__,
        "served_moves",
        [TimedCluster("1+1, timed", 1, cases)],
        lambda folder: replace(ALL_MOVE, times_moves_to=folder),
    )


if __name__ == "__main__":
    main()
