"""What Pagewire set out to reach, beside what the result files say.

Targets were set before the work, for Llama-3-8B's shape on H200s. Times of the serving matrix are
at the client.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from benchmarks.stream_statistics import Row

RESULTS = Path(__file__).parent / "results"
SERVING_FILE = "serving-matrix-h200.json"
AGGREGATED_FILE = "serving-matrix-aggregated-h200.json"  # with all cases of one GPU
STARTS_FILE = "serving-starts-h200.json"
KILLS_FILE = "kills-nccl-h100-x2.json"
IPC_KILLS_FILES = (  # pages on the way that GPUs of one host choose; most kills first
    "kills-ipc-h200-x2.json",
    "kills-ipc-survivor-h200-x2.json",
    "kills-ipc-joined-h200-x2.json",
    "kills-ipc-before-h200-x2.json",
)
MEMORY_FILES = {  # of kills around which no worker's memory changed
    "kills-ipc-steady-h200-x2.json": "CUDA IPC",
    "kills-nccl-steady-h200-x2.json": "NCCL",
}
POOLS_FILE = "disaggregation-h200.json"
UNLIMITED_FILE = "itl-unlimited-h200-x2.json"  # chats without pools, steps without a limit
LIMITED_FILE = POOLS_FILE  # with the limit that ships
LINEAR_FILE = "linear-h200.json"
LINEAR_ROWS = (1, 8, 16, 17, 32, 64, 128, 256, 512, 543, 1024, 2048, 8192)
HIDDEN_TOKENS = (8192, 16_384, 32_768)  # from four passes of a prefill worker on

Figure = tuple[str, float, float, str, bool]  # fields of Outcome but for the file

# Cases of benchmarks.serving_matrix with one prefill and one decode worker, ms
SERVING_MS = {
    "decode/1@1024": 4.5,
    "decode/8@1024": 4.8,
    "decode/32@1024": 5.6,
    "decode/64@1024": 6.8,
    "decode/128@1024": 9.6,
    "decode/256@1024": 15.9,
    "decode/64@8192": 20.3,
    "decode/16@32768": 19.9,
    "shared/64,8192,256": 7.5,
    "shared/256,8192,128": 14.2,
    "shared/64,32768,256": 10.0,
    "ttft/1x512": 14.0,
    "ttft/1x4096": 95.0,
    "ttft/1x32768": 1160.0,
    "ttft/16x4096": 1500.0,
    "ttft/cached": 8.0,
    "ttft/32-cached-at-once": 16.0,
    "ttft/256-cached-at-once": 40.0,
    "mixed/512": 13_000.0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One target, and what was measured."""

    what: str
    target: float
    found: float
    unit: str
    file: str  # of the result
    is_least: bool = False  # whether more is better

    @property
    def share(self) -> float | None:
        """The figure as a share of its target, or the reverse if more is better.

        None: the target is 0.
        """
        if self.target == 0:
            return None
        return self.target / self.found if self.is_least else self.found / self.target

    @property
    def is_reached(self) -> bool:
        """Whether the figure is within the target."""
        return self.found >= self.target if self.is_least else self.found <= self.target


def serving_outcomes() -> Iterator[Outcome]:
    """Yield the targets of the serving matrix."""
    for case, target in SERVING_MS.items():
        found = _rows(SERVING_FILE)[case]["ms"]
        yield Outcome(what=case, target=target, found=found, unit="ms", file=SERVING_FILE)


def other_outcomes() -> Iterator[Outcome]:
    """Yield all other targets that a result file says something about."""
    seconds = _rows(AGGREGATED_FILE)["aggregated/mixed/512"]["seconds"]
    yield Outcome(
        what="`mixed/512` on one GPU", target=20, found=seconds, unit="s", file=AGGREGATED_FILE
    )
    for case, target in (("ready/cold", 25), ("ready/warm", 12)):
        seconds = _rows(STARTS_FILE)[case]["seconds"]
        yield Outcome(what=f"`{case}`", target=target, found=seconds, unit="s", file=STARTS_FILE)
    yield _linear(LINEAR_FILE)
    yield from _transfers()
    yield _hidden()
    yield from _chats()
    yield from _kills(IPC_KILLS_FILES, "CUDA IPC")
    yield from _kills([KILLS_FILE], "NCCL")
    yield from map(_kept_memory, MEMORY_FILES, MEMORY_FILES.values())
    yield from _relay("relay-32-cores.json")


def _linear(file: str) -> Outcome:
    us: dict[tuple[int, str], dict[bool, float]] = defaultdict(dict)
    for row in json.loads((RESULTS / file).read_text(encoding="utf-8"))["cases"]:
        if row["is_shipped"] or row["tile"] == "torch":
            us[row["num_rows"], row["weight"]][row["is_shipped"]] = row["us"]
    medians = {
        num_rows: median(
            each[True] / each[False] for (rows, _), each in us.items() if rows == num_rows
        )
        for num_rows in LINEAR_ROWS
    }
    worst = max(LINEAR_ROWS, key=medians.__getitem__)
    return Outcome(
        what=f"linear layers of {worst} rows over torch's, slowest of 13, median of five weights",
        target=1.03,
        found=medians[worst],
        unit="times",
        file=file,
    )


def _transfers() -> Iterator[Outcome]:
    rows = _rows(POOLS_FILE)
    longest = rows["transfer/ttft_share@32768"]
    dedup = rows["transfer/dedup"]
    figures: tuple[Figure, ...] = (
        (
            "pages of 32,768 tokens, end to end",
            300,
            rows["transfer/scattered@32768"]["gb_per_s"],
            "GB/s",
            True,
        ),
        ("a transfer's share of their first token", 5, 100 * longest["share"], "%", False),
        (
            "one new prefix of 64 requests, computed and moved",
            1.05,
            max(dedup[f"times_{each}"] for each in ("computed", "moved")),
            "times",
            False,
        ),
    )
    return _outcomes(POOLS_FILE, figures)


def _hidden() -> Outcome:
    rows = _rows(POOLS_FILE)
    shares = [rows[f"transfer/ttft_share@{each}"]["hidden_share_counted"] for each in HIDDEN_TOKENS]
    return Outcome(
        what="what is hidden of a transfer by count, least of 8,192 to 32,768 tokens",
        target=80,
        found=100 * min(shares),
        unit="%",
        file=POOLS_FILE,
        is_least=True,
    )


def _chats() -> Iterator[Outcome]:
    pools = _rows(POOLS_FILE)["itl/disaggregated"]
    for file, limit in (
        (LIMITED_FILE, "if a step is limited to 30 ms"),
        (UNLIMITED_FILE, "if none is limited"),
    ):
        mixed = _rows(file)["itl/aggregated"]
        yield from _outcomes(
            file,
            (
                (
                    "chats beside long prompts: p99 of two GPUs without pools over that with them, "
                    f"{limit}",
                    10,
                    mixed["itl_ms_p99"] / pools["itl_ms_p99"],
                    "times",
                    True,
                ),
                (
                    f"their total throughput, as a share of that without pools, {limit}",
                    90,
                    100 * pools["all_tokens_per_s"] / mixed["all_tokens_per_s"],
                    "%",
                    True,
                ),
            ),
        )
    yield Outcome(
        what="steps of the chats while pages arrive, longer by",
        target=5,
        found=100 * (pools["step_ms"] / pools["calm_step_ms"] - 1),
        unit="%",
        file=POOLS_FILE,
    )


def _outcomes(file: str, figures: Iterable[Figure]) -> Iterator[Outcome]:
    for what, target, found, unit, is_least in figures:
        yield Outcome(
            what=what, target=target, found=found, unit=unit, file=file, is_least=is_least
        )


def _kills(files: Sequence[str], transport: str) -> Iterator[Outcome]:
    rows = [row for _, row in _rows_of_kills(files)]
    rounds = [each for row in rows for each in row["rounds"]]
    quiet = [each["quiet_ms"] / 1000 for each in rounds if each["quiet_ms"] is not None]
    usable = [(each["usable_ms"] - each["restarted_ms"]) / 1000 for each in rounds]
    lost = sum(row["lost_requests"] + row["wrong_tokens"] for row in rows)
    for what, target, found, unit in (
        ("transfers given up, longest", 2, max(quiet), "s"),
        ("pages move again after the new worker is ready, longest", 3, max(usable), "s"),
        ("lost requests and wrong tokens", 0, lost, ""),
    ):
        what = f"{len(rounds)} kills over {transport}: {what}"
        yield Outcome(what=what, target=target, found=found, unit=unit, file=files[0])


def _kept_memory(file: str, transport: str) -> Outcome:
    grew = survivor_growth_mib(file)
    return Outcome(
        what=f"{len(grew)} later kills over {transport}: the survivor's memory grows by, at most",
        target=0,
        found=max(grew),
        unit="MiB",
        file=file,
    )


def _rows_of_kills(files: Sequence[str]) -> Iterator[tuple[str, Row]]:
    for file in files:
        yield from (each for each in _rows(file).items() if each[0].startswith("kill/"))


def survivor_growth_mib(file: str) -> list[int]:
    """Return by how much the GPU memory of the worker that was not hit grew at each kill."""
    grew = []
    for case, row in _rows_of_kills([file]):
        _, victim, _ = case.split("/")
        place = 1 if victim == "prefill" else 0  # of [prefill, decode]
        grew += [each["memory_grew_mib"][place] for each in row["rounds"]]
    return grew


def _relay(file: str) -> Iterator[Outcome]:
    for what, offered, key in (
        ("that arrive through one router, 50,000 offered", 50_000, "delivered_tokens_per_s"),
        (
            "through one core of the router, by its CPU time",
            40_000,
            "tokens_per_s_of_one_router_core",
        ),
    ):
        yield Outcome(
            what=f"tokens of 256 streams {what}",
            target=40_000,
            found=_relay_row(file, offered, 20.0)[key],
            unit="per s",
            file=file,
            is_least=True,
        )
    for what, coalesce_ms, target in (("gathered", 20.0, 25), ("not gathered", 0.0, 3)):
        yield Outcome(
            what=f"how late they come at half that load, {what}, p99",
            target=target,
            found=_relay_row(file, 20_000, coalesce_ms)["late_ms"]["p99"],
            unit="ms",
            file=file,
        )


def _relay_row(file: str, offered: int, coalesce_ms: float) -> Row:
    content = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    row: Row = next(
        each
        for each in content["cases"]
        if each["streams"] == 256
        and each["offered_tokens_per_s"] == offered
        and each["coalesce_ms"] == coalesce_ms
    )
    return row


@cache
def _rows(file: str) -> dict[str, Row]:
    content = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    return {row["case"]: row for row in content["cases"] if "error" not in row}
