"""Writes the tables of measured figures into the documentation (make docs).

A page marks where a table stands, and the table between its marks is rewritten from
benchmarks/results/:

    <!-- table: serving -->
    <!-- end of table -->
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from math import fsum
from pathlib import Path

from benchmarks.figures import FLASHINFER_CASCADE, FLASHINFER_DECODE, read_times
from benchmarks.first_token_path import PARTS
from benchmarks.measured_host import gpu_model, in_short
from benchmarks.serving_figures import ARMS, VLLM
from benchmarks.stream_statistics import Row
from benchmarks.targets import (
    AGGREGATED_FILE,
    LIMITED_FILE,
    POOLS_FILE,
    SERVING_FILE,
    SERVING_MS,
    STARTS_FILE,
    UNLIMITED_FILE,
    other_outcomes,
    serving_outcomes,
)
from benchmarks.transfer_shares import LENGTHS, transfer_case, transfer_shares

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/benchmarks.md", "docs/tuning.md")
PROFILE_RESULT = "step-profile-llama-3-8b-h200.json"
SERVED_STEPS_RESULT = "served-steps-h200.json"
ENGINE_RESULT = "engine-step-llama-3-8b-h200.json"
BESIDE_RESULT = "engine-step-beside-h200.json"  # of steps that decode and compute prompts
ENGINE_STEPS_RESULT = "engine-step-decode-h200.json"  # of the engine alone on that host
# The same beside a prefill worker on another host, since small chunks move together.
JOINED_STEPS_RESULT = "served-steps-joined-h200.json"
JOINED_ENGINE_RESULT = "engine-step-joined-h200.json"
# Of what lies between steps the mean would count the time between two requests of one stream.
STEP_FIGURES = {"ms": "client", "busy_ms": "device", "between_ms_p50": "between"}
ABLATION_RESULTS = tuple(
    f"ablation{run}.json"
    for run in ("-h100-x2", "-delta-h100-x2", "-none-h100-x2", "-none-h100-x4")
)
ABLATION_ON_ONE_GPU = "ablation-one-h200.json"
# |-> runs of the pools, and without prefill workers by their limits of a step; 0: none
REPLAY_RESULTS = {
    limit_ms: tuple(
        f"replay{run}{f'-{limit_ms}ms' if limit_ms else ''}-h100-x4.json"
        for run in ("-pair", "-pair-faster", "")
    )
    for limit_ms in (30, 45, 0)
}
REPLAY_ON_H200S = "replay-pair-faster-30ms-h200-x2.json"
PARTS_RESULT = "first-token-parts-h200-x2.json"
CACHED_PARTS_RESULT = "first-token-parts-bursts-h200-x2.json"  # without traces before those
MIX_RESULTS = (PARTS_RESULT, "first-token-parts-one-h200.json")
MOVES_RESULT = "served-moves-h200-x2.json"
POOL_ARMS = ("disaggregated", "aggregated")
# Columns of a table: heading |-> file and arm
ITL_RESULTS = {
    "1 + 1, H200": (POOLS_FILE, "disaggregated"),
    "0 + 2, 30 ms, H200": (LIMITED_FILE, "aggregated"),
    "0 + 2, H200": (UNLIMITED_FILE, "aggregated"),
    "1 + 1, H100": ("itl-h100-x4.json", "disaggregated"),
    "0 + 2, H100": ("itl-unlimited-h100-x2.json", "aggregated"),
    "0 + 2, 30 ms, H100": ("itl-30ms-h100-x4.json", "aggregated"),
    "0 + 2, 45 ms, H100": ("itl-45ms-h100-x4.json", "aggregated"),
}
REGION = re.compile(r"(?s)(<!-- table: ([a-z-]+) -->\n).*?(<!-- end of table -->)")


def serving_rows() -> dict[str, Row]:
    """Return the cases of a cluster without prefill workers: name |-> what was measured."""
    content = json.loads((RESULTS / AGGREGATED_FILE).read_text(encoding="utf-8"))
    prefix = "aggregated/"
    return {
        row["case"].removeprefix(prefix): row
        for row in content["cases"]
        if row["case"].startswith(prefix)
    }


def vllm_tokens_per_s(case: str, row: Row) -> float:
    """Return vLLM's tokens per second: of a step of all streams, or of the whole mix."""
    tokens = row["tokens"] if case.startswith("mixed/") else row["streams"]
    return float(tokens / VLLM[case] * 1000)


def headline_rows(cases: Collection[str] = ()) -> Iterator[tuple[str, float, float]]:
    """Yield cases that both have measured, or some of them, and Pagewire's and vLLM's tokens/s."""
    rows = serving_rows()
    titles = {
        "decode/1@1024": "1 stream, 1,024 tokens of context",
        "decode/64@1024": "64 streams, 1,024 tokens each",
        "decode/256@1024": "256 streams, 1,024 tokens each",
        "shared/64,8192,256": "64 streams that share 8,192 tokens",
        "shared/256,8192,128": "256 streams that share 8,192 tokens",
        "shared/64,32768,256": "64 streams that share 32,768 tokens",
        "mixed/512": "512 requests of mixed lengths, prompts included",
    }
    for case, title in titles.items():
        if not cases or case in cases:
            row = rows[case]
            yield title, row["tokens_per_s"], vllm_tokens_per_s(case, row)


def headline(cases: Collection[str] = ()) -> str:
    """Tokens per second of the cases that both have measured, or of some of them."""
    return table(
        ("Tokens per second", "Pagewire", "vLLM 0.24.0", "ratio"),
        (
            (title, f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.2f}")
            for title, ours, theirs in headline_rows(cases)
        ),
    )


def serving() -> str:
    """Every case of a cluster without prefill workers, and on two GPUs with one."""
    pools = _rows_of(SERVING_FILE)
    return table(
        ("case", "0 + 1, ms", "least", "most", "1 + 1, ms", "vLLM 0.24.0, ms", "0 + 1, tokens/s"),
        (
            (
                f"`{case}`",
                _ms(row["ms"]),
                _ms(row["min_ms"]) if "min_ms" in row else "",
                _ms(row["max_ms"]) if "max_ms" in row else "",
                _ms(pools[case]["ms"]),
                _ms(VLLM[case]) if case in VLLM else "",
                f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else "",
            )
            for case, row in serving_rows().items()
        ),
    )


def targets() -> str:
    """What was to be reached at the client, and whether it was."""
    return table(
        ("what", "on", "unit", "target", "measured", "reached"),
        (
            (
                f"`{each.what}`" if each.what in SERVING_MS else each.what,
                f"[{_hardware_in_short(each.file)}](../benchmarks/results/{each.file})",
                each.unit,
                f"{'>=' if each.is_least else '<='} {each.target:,g}",
                _ms(each.found),
                "yes" if each.is_reached else "no",
            )
            for each in (*serving_outcomes(), *other_outcomes())
        ),
        num_text=3,
    )


def engine_step() -> str:
    """Steps of the engine alone, one by one and ahead."""
    return table(
        ("case", "one by one, ms", "ahead, ms"),
        (
            (f"`{row['case']}`", _ms(row["one_by_one_ms"]), _ms(row["ms"]))
            for row in engine_step_rows()
        ),
    )


def engine_step_rows() -> list[Row]:
    """Return the steps of the engine alone; those that also compute prompts ran later."""
    later = _rows_of(BESIDE_RESULT).items()
    beside = {case: row for case, row in later if case.startswith("beside/")}
    return list((_rows_of(ENGINE_RESULT) | beside).values())


def profile_parts(row: Row) -> dict[str, float]:
    """Return the times of a profiled step by kind, ms; kernels may overlap."""
    parts = row["parts_ms"]
    attention = fsum(parts.get(name, 0.0) for name in ("decode", "cascade", "prefill"))
    rest = fsum(parts.values()) - attention - parts["linear"]
    return {
        "linear layers": parts["linear"],
        "attention": attention,
        "other kernels": rest,
        "idle": row["idle_ms"],
    }


def step_profile() -> str:
    """Where the device's time goes in a step."""
    rows = json.loads((RESULTS / PROFILE_RESULT).read_text(encoding="utf-8"))["cases"]
    heads = ("case", "step, ms", *(f"{part}, ms" for part in profile_parts(rows[0])), "idle, %")
    return table(
        heads,
        (
            (
                f"`{row['case']}`",
                *map(_ms, (row["ms"], *profile_parts(row).values())),
                f"{100 * row['idle_ms'] / row['ms']:.1f}",
            )
            for row in rows
        ),
    )


def pools() -> str:
    """Chats beside long prompts on two GPUs, as two pools and without a prefill worker."""
    rows = [_rows_of(file)[f"itl/{arm}"] for file, arm in ITL_RESULTS.values()]
    figures = (
        ("between tokens, p50", "itl_ms_p50", "ms"),
        ("p99", "itl_ms_p99", "ms"),
        ("most", "itl_ms_max", "ms"),
        ("first tokens of the long prompts, p50", "prompt_first_token_ms_p50", "ms"),
        ("tokens of prompts and answers", "all_tokens_per_s", "per s"),
    )
    return table(
        ("what", "unit", *ITL_RESULTS),
        ((what, unit, *(_ms(row[name]) for row in rows)) for what, name, unit in figures),
        num_text=2,
    )


def replay() -> str:
    """A trace, replayed at several paces, on pools and without prefill workers."""
    columns = [
        (_rows_of(name)[f"replay/{arm}"], _gpu(name))
        for name in (*REPLAY_RESULTS[30], REPLAY_ON_H200S)
        for arm in POOL_ARMS
    ]
    figures: tuple[tuple[str, str, Callable[[Row], float]], ...] = (
        ("requests offered", "per s", lambda row: row["offered_requests_per_s"]),
        ("answered", "per s", lambda row: row["requests_per_s"]),
        ("answered in time", "per s", lambda row: row["in_time_per_s"]),
        ("first tokens, p50", "ms", lambda row: row["ttft_ms_p50"]),
        ("p99", "ms", lambda row: row["ttft_ms_p99"]),
        ("between tokens, p50", "ms", lambda row: row["itl_ms_p50"]),
        ("p99", "ms", lambda row: row["itl_ms_p99"]),
        ("prompt tokens", "millions", lambda row: row["prompt_tokens"] / 1e6),
        ("of these found in caches", "%", lambda row: 100 * row["hit_share"]),
        ("moved", "GB", lambda row: row["bytes_moved"] / 1e9),
    )
    return table(
        ("what", "unit", *(f"{row['cluster'].replace('+', ' + ')}, {gpu}" for row, gpu in columns)),
        ((what, unit, *(_ms(figure(row)) for row, _ in columns)) for what, unit, figure in figures),
        num_text=2,
    )


def replays_in_time() -> Iterator[tuple[Row, list[float]]]:
    """Yield each pace of the trace: its run on pools, and the requests in time, 1/s, by cluster.

    These are the pools, and those without prefill workers in the order of REPLAY_RESULTS.
    """
    for names in zip(*REPLAY_RESULTS.values(), strict=True):
        runs = [_rows_of(name) for name in names]
        pools = runs[0]["replay/disaggregated"]
        rows = [pools, *(run["replay/aggregated"] for run in runs)]
        yield pools, [row["in_time_per_s"] for row in rows]


def served_step_rows() -> Iterator[tuple[str, float, tuple[Row, Row]]]:
    """Yield cases, the ms of a step alone, and their rows without and beside a prefill worker."""
    alone, served = _rows_of(ENGINE_STEPS_RESULT), _rows_of(SERVED_STEPS_RESULT)
    for case, row in served.items():
        if not case.startswith("pools/"):
            name = _engine_case(case)
            yield name, alone[name]["ms"], (row, served[f"pools/{case}"])


def _engine_case(served: str) -> str:
    """Return the name that an engine alone has for a case of a worker that serves."""
    return served if "/" in served else f"decode/{served}"


def served_steps() -> str:
    """Steps at the client, on the device of the worker, and of an engine alone on that host."""
    columns = [
        f"{workers}, {what}, ms" for workers in ("0 + 1", "1 + 1") for what in STEP_FIGURES.values()
    ]
    return table(
        ("case", "engine alone, ms", *columns),
        (
            (f"`{case}`", _ms(alone), *(_ms(row[name]) for row in rows for name in STEP_FIGURES))
            for case, alone, rows in served_step_rows()
        ),
    )


def joined_step_rows() -> Iterator[tuple[str, float, Row]]:
    """Yield cases, the ms of a step alone, and their rows beside a prefill worker, of that host."""
    alone = _rows_of(JOINED_ENGINE_RESULT)
    for case, row in _rows_of(JOINED_STEPS_RESULT).items():
        name = _engine_case(case.removeprefix("pools/"))
        yield name, alone[name]["ms"], row


def joined_steps() -> str:
    """Steps beside a prefill worker since small chunks move together, as in `served_steps`."""
    return table(
        ("case", "engine alone, ms", *(f"1 + 1, {what}, ms" for what in STEP_FIGURES.values())),
        (
            (f"`{case}`", _ms(alone), *(_ms(row[name]) for name in STEP_FIGURES))
            for case, alone, row in joined_step_rows()
        ),
    )


def start_rows() -> dict[str, Row]:
    """Return starts of a cluster: new, cold or warm |-> what was measured."""
    prefix = "ready/"
    return {
        case.removeprefix(prefix): row
        for case, row in _rows_of(STARTS_FILE).items()
        if case.startswith(prefix)
    }


def start_parts(row: Row) -> dict[str, float]:
    """Return the parts of a start, s, by their names in words."""
    return {name.replace("_", " "): seconds for name, seconds in row["parts_s"].items()}


def starts() -> str:
    """Where the time of a start goes, by the worker that is ready last."""
    rows = {f"`ready/{name}`": row for name, row in start_rows().items()}
    parts = {case: start_parts(row) for case, row in rows.items()}
    names = list(dict.fromkeys(name for each in parts.values() for name in each))
    return table(
        ("case", "last worker", *(f"{name}, s" for name in names), "sum, s"),
        (
            (
                case,
                row["last_worker"],
                *(_ms(parts[case][name]) for name in names),
                _ms(fsum(parts[case].values())),
            )
            for case, row in rows.items()
        ),
        num_text=2,
    )


def ablation(names: Sequence[str]) -> str:
    """What delta transfer and cascade attention are worth, alone and together."""
    rows = {case: row for name in names for case, row in _rows_of(name).items()}

    def cells(shape: str) -> Iterator[str]:
        streams, shared, own = map(int, shape.split(","))
        both, cascade, delta, none = (rows.get(f"ablation/{arm}/{shape}") for arm in ARMS)
        yield f"{streams} of {shared:,} + {own}"
        yield from (_cell(row, "ms", 1000) for row in (both, cascade, delta, none))
        yield from (_cell(row, "step_ms") for row in (both, delta))
        yield from (_cell(row, "prime_bytes_moved", 1e9) for row in (both, cascade))

    shapes = dict.fromkeys(case.rpartition("/")[2] for case in rows)
    heads = (
        *("streams of shared + own tokens", *(f"{arm}, s" for arm in ARMS)),
        *("step, both, ms", "step, delta, ms", "moved, both, GB", "moved, cascade, GB"),
    )
    return table(heads, (tuple(cells(shape)) for shape in shapes))


def _cell(row: Row | None, name: str, unit: float = 1.0) -> str:
    return "" if row is None or name not in row else _ms(row[name] / unit)


def transfers() -> str:
    """First tokens of new prompts with and without a transfer, and the transfers themselves."""
    rows = _rows_of(POOLS_FILE)
    rows |= {row["case"]: row for row in transfer_shares(rows)}
    hidden = {"hidden_share": "hidden", "hidden_share_counted": "hidden, counted"}
    hidden = {
        key: head for key, head in hidden.items() if any(key in each for each in rows.values())
    }

    def cells(length: int) -> Iterator[str]:
        yield f"{length:,}"
        new, alone, again = (
            rows[transfer_case(kind, length)] for kind in ("new", "aggregated", "again")
        )
        yield from (_ms(row["ms"]) for row in (new, alone))
        yield f"{100 * (1 - alone['ms'] / new['ms']):.1f} %"
        yield from (_ms(again[name]) for name in ("ms", "second_ms"))
        moved = rows.get(f"transfer/scattered@{length}")
        share = rows.get(f"transfer/ttft_share@{length}", {})
        yield _ms(moved["gb_per_s"]) if moved else ""
        yield _ms(again["receive_gb_per_s"])
        yield from (f"{100 * share[key]:.0f} %" if key in share else "" for key in hidden)

    return table(
        (
            "tokens of the prompt",
            "new, 1 + 1, ms",
            "new, 0 + 1, ms",
            "difference, share",
            "cached, ms",
            "second token, ms",
            "pages, GB/s",
            "arriving, GB/s",
            *hidden.values(),
        ),
        (tuple(cells(length)) for length in LENGTHS if length),
        num_text=0,
    )


def first_token_parts() -> str:
    """The parts of the time to a first token, of the first and the last request of each wave."""

    def rows() -> Iterator[tuple[str, ...]]:
        for case, row in part_rows().items():
            for request in ("first", "last"):
                if each := row.get(request):
                    is_last = request == "last"
                    yield (
                        row["cluster"].replace("+", " + "),
                        f"`{case.removeprefix('aggregated/')}`",
                        request if "first" in row else "",
                        *(_cell(each["parts_ms"], part) for part in PARTS),
                        _ms(each["rest_ms"]),
                        _ms(each["ms"]),
                        _ms(row["untraced_ms"]) if is_last else "",
                    )

    heads = ("workers", "case", "request", *PARTS.values(), "rest", "all, ms", "without traces, ms")
    return table(heads, rows(), num_text=3)


def part_rows() -> dict[str, Row]:
    """Return parts of first tokens by case, those of cached prompts from a newer run."""
    newer = _rows_of(CACHED_PARTS_RESULT).items()
    return _rows_of(PARTS_RESULT) | {case: row for case, row in newer if "cached" in case}


def engine_time() -> str:
    """What each engine does in the mix."""
    kinds = {"prompt": "prompts, s", "decode": "decodes, s", "mixed": "both, s"}
    return table(
        ("workers", "engine", *kinds.values(), "no step, s", "all, s", "all with traces, s"),
        (
            (
                row["cluster"].replace("+", " + "),
                name,
                *(_ms(each[f"{kind}_ms"] / 1e3) for kind in (*kinds, "no_step")),
                _ms(row["ms"] / 1e3),
                _ms(row["traced_ms"] / 1e3),
            )
            for row, name, each in mix_rows()
        ),
        num_text=2,
    )


def mix_rows() -> Iterator[tuple[Row, str, Row]]:
    """Yield measurements of the mix, and each of their engines with its name."""
    for file in MIX_RESULTS:
        for row in _rows_of(file).values():
            for name, each in row.get("engines", {}).items():
                yield row, name, each


def served_moves() -> str:
    """Where the time goes in which pages arrive."""
    parts = ("receive_ms", "device_ms", "wake_ms", "between_ms")
    return table(
        (
            *("tokens of the prompt", "chunks", "arriving, ms", "copies, ms", "their end, ms"),
            *("between copies, ms", "arriving, GB/s", "copies, GB/s"),
        ),
        (
            (
                f"{int(case):,}",
                str(row["chunks"]),
                *(_ms(row[part]) for part in parts),
                *(f"{row[name]:,.0f}" for name in ("gb_per_s", "device_gb_per_s")),
            )
            for case, row in _rows_of(MOVES_RESULT).items()
        ),
        num_text=0,
    )


def _rows_of(name: str) -> dict[str, Row]:
    content = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return {row["case"]: row for row in content["cases"]}


def decode_attention() -> str:
    """Flat decode attention of one layer."""
    us = read_times(RESULTS / "kernels-h200.json")
    return table(
        ("batch x tokens", "Pagewire, us", "read alone, us", "FlashInfer 0.6.12, us"),
        (
            (f"`{case}`", _us(us[f"decode/{case}"]), _us(us[f"read/{case}"]), _us(theirs))
            for case, theirs in FLASHINFER_DECODE.items()
        ),
    )


def cascade_attention() -> str:
    """Attention of one layer over a shared prefix."""
    us = read_times(RESULTS / "kernels-h200.json")
    return table(
        (
            "batch, shared, own",
            "Pagewire cascade, us",
            "flat, us",
            "FlashInfer cascade, us",
            "flat, us",
        ),
        (
            (
                f"`{case}`",
                _us(us[f"cascade/{case}"]),
                _us(us[f"cascade/{case}@flat"]),
                *map(_us, theirs),
            )
            for case, theirs in FLASHINFER_CASCADE.items()
        ),
    )


def relay() -> str:
    """What the router's event loop takes, with and without gathering."""
    rows = json.loads((RESULTS / "relay-cpu.json").read_text(encoding="utf-8"))["cases"]
    return table(
        (
            "streams",
            "tokens/s offered",
            "`coalesce_ms`",
            "tokens/s delivered",
            "router CPU, us per token",
            "late p50, ms",
            "late p99, ms",
        ),
        (
            (
                str(row["streams"]),
                f"{row['offered_tokens_per_s']:,}",
                f"{row['coalesce_ms']:g}",
                f"{row['delivered_tokens_per_s']:,}",
                f"{row['us_per_token']['router']:.0f}",
                f"{row['late_ms']['p50']:,.1f}",
                f"{row['late_ms']['p99']:,.1f}",
            )
            for row in rows
        ),
        num_text=0,
    )


def gateway_rows() -> list[Row]:
    """Return the cases of benchmarks.gateway, of two runs."""
    return [
        row
        for name in ("gateway-cpu.json", "gateway-2000-streams-cpu.json")
        for row in json.loads((RESULTS / name).read_text(encoding="utf-8"))["cases"]
    ]


def gateway() -> str:
    """What a token costs over gRPC and over HTTP."""
    return table(
        ("way", "streams", "router CPU, us per token", "gateway CPU, us per token"),
        (
            (
                row["way"],
                str(row["streams"]),
                f"{row['us_per_token']['router']:.0f}",
                f"{row['us_per_token']['gateway']:.0f}" if "gateway" in row["us_per_token"] else "",
            )
            for row in gateway_rows()
        ),
    )


def runs() -> str:
    """Which command made which file, on what."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            continue
        where = content["hardware"]
        if isinstance(where, dict):
            where = where.get("gpus") or f"{where['machine']}, {where['cores']} cores"
        if isinstance(where, list):
            where = f"{len(where)} x {where[0]}"
        link = f"[{path.name}](../{path.relative_to(ROOT)})"
        commit = content.get("commit", "")[:8]
        rows.append((link, where, f"`{commit}`" if commit else "", f"`{content['command']}`"))
    return table(("file", "hardware", "commit", "command"), rows, num_text=4)


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline,
    "summary": partial(headline, ("decode/64@1024", "shared/256,8192,128", "mixed/512")),
    "serving": serving,
    "targets": targets,
    "engine-step": engine_step,
    "step-profile": step_profile,
    "pools": pools,
    "replay": replay,
    "served-steps": served_steps,
    "joined-steps": joined_steps,
    "starts": starts,
    "ablation": partial(ablation, ABLATION_RESULTS),
    "ablation-one": partial(ablation, [ABLATION_ON_ONE_GPU]),
    "transfers": transfers,
    "served-moves": served_moves,
    "first-token-parts": first_token_parts,
    "engine-time": engine_time,
    "decode-attention": decode_attention,
    "cascade-attention": cascade_attention,
    "relay": relay,
    "gateway": gateway,
    "runs": runs,
}


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, num_text: int = 1) -> str:
    """Return a Markdown table; the columns after the first `num_text` hold numbers."""
    rules = ["---"] * num_text + ["--:"] * (len(heads) - num_text)
    return "".join(f"| {' | '.join(row)} |\n" for row in (heads, rules, *rows))


def with_tables(page: str) -> str:
    """Return a page with its tables rewritten.

    Raises:
        KeyError: If it names a table that does not exist.
    """
    return REGION.sub(lambda region: f"{region[1]}\n{TABLES[region[2]]()}\n{region[3]}", page)


def main() -> None:
    """Write the tables of all pages."""
    for name in PAGES:
        path = ROOT / name
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


@cache
def _hardware_in_short(file: str) -> str:
    content = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    found = content["hardware"]
    if content["command"].startswith("python -m benchmarks.relay "):  # which uses no GPU
        found = {"cores": found["cores"]}
    return in_short(found)


def _gpu(file: str) -> str:
    content = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    return gpu_model(content["hardware"])


def _ms(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def _us(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
