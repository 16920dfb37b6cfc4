"""Draws the figures beside the tables of benchmarks.tables from benchmarks/results/ (make docs).

    python -m benchmarks.page_figures

Those of attention are drawn by benchmarks.figures, and those of tables without a result file by
benchmarks.table_plots.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import dot_chart, table_plots
from benchmarks.bar_chart import draw
from benchmarks.fault_cases import FAULTS
from benchmarks.fault_table import FAULTS_RESULT, KILLS_RESULTS, KillRow, kill_rows
from benchmarks.figures import BLUE, LIGHT_BLUE, ORANGE, RED
from benchmarks.measured_host import in_short
from benchmarks.serving_figures import bars, disaggregation_charts, hardware_of, serving_charts
from benchmarks.stream_statistics import Row
from benchmarks.tables import (
    ABLATION_ON_ONE_GPU,
    ABLATION_RESULTS,
    BESIDE_RESULT,
    CACHED_PARTS_RESULT,
    ENGINE_RESULT,
    JOINED_STEPS_RESULT,
    MIX_RESULTS,
    MOVES_RESULT,
    PARTS_RESULT,
    PROFILE_RESULT,
    REPLAY_RESULTS,
    RESULTS,
    ROOT,
    SERVED_STEPS_RESULT,
    STEP_FIGURES,
    engine_step_rows,
    gateway_rows,
    headline_rows,
    joined_step_rows,
    mix_rows,
    part_rows,
    profile_parts,
    replays_in_time,
    served_step_rows,
    start_parts,
    start_rows,
)
from benchmarks.targets import (
    AGGREGATED_FILE,
    LIMITED_FILE,
    POOLS_FILE,
    SERVING_FILE,
    STARTS_FILE,
    other_outcomes,
    serving_outcomes,
)

FIGURES = ROOT / "docs" / "figures"
STEPS_DRAWN = ("ms", "busy_ms")  # of STEP_FIGURES
SERVING_FILES = (AGGREGATED_FILE, SERVING_FILE)
COLORS = (BLUE, ORANGE, LIGHT_BLUE, RED)
NUM_LAYERS, LAYER_WEIGHTS = 32, ("qkv", "output", "gate_up", "down")


def serving(kind: str) -> str:
    """One kind of cases of the serving matrix, of both files."""
    charts = dict(serving_charts(*_rows_and_hardware(SERVING_FILES)))
    return draw(charts[f"serving-{kind}"])


def headline() -> str:
    """Tokens per second, beside vLLM's."""
    return dot_chart.draw(
        dot_chart.DotChart(
            title="Tokens per second on one H200, as a share of vLLM's (longer is better)",
            unit="% of vLLM 0.24.0",
            series=("Pagewire",),
            cases=tuple(
                dot_chart.Case(name=title, values=((100 * ours / theirs,),))
                for title, ours, theirs in headline_rows()
            ),
            line_at=100.0,
            is_from_zero=True,
        )
    )


def targets() -> str:
    """Each figure as a share of its target."""
    outcomes = [*serving_outcomes(), *other_outcomes()]
    cases = tuple(
        dot_chart.Case(name=each.what.replace("`", ""), values=((100 * each.share,),))
        for each in outcomes
        if each.share is not None
    )
    return dot_chart.draw(
        dot_chart.DotChart(
            title="Figures as shares of their targets, which they reach up to the line",
            unit="%; where more is better, the target as a share of the figure",
            series=("share",),
            cases=cases,
            line_at=100.0,
        )
    )


def engine_step() -> str:
    """Steps of the engine alone."""
    content, beside = _content(ENGINE_RESULT), _content(BESIDE_RESULT)
    values = [
        (_short(row["case"]), (row["ms"], row["one_by_one_ms"])) for row in engine_step_rows()
    ]
    return draw(
        bars(
            "A step of the engine alone (shorter is better)",
            (
                f"{content['hardware']}, Llama-3-8B's shape, commit {content['commit']}; "
                f"with prompts {beside['commit']}.",
                "16 + 64: 16 requests decode, and 64 tokens of a prompt are computed beside them.",
            ),
            values,
            series=(("ahead", BLUE), ("one by one", ORANGE)),
        )
    )


def step_profile() -> str:
    """What kinds of kernels take of a step."""
    content = _content(PROFILE_RESULT)
    values = [
        (row["case"], tuple(profile_parts(row).values()))
        for row in content["cases"]
        if not row["case"].startswith("prefill/")
    ]
    return draw(
        bars(
            "Kernels of a step that decodes, their times summed by kind (shorter is better)",
            (
                f"{in_short(content['hardware'])}, Llama-3-8B's shape, commit {content['commit']}.",
                "Idle: no kernel and no copy runs between the step's first and its last.",
            ),
            values,
            series=tuple(zip(profile_parts(content["cases"][0]), COLORS, strict=True)),
            unit="ms",
        )
    )


def served_steps() -> str:
    """Steps of a worker that serves, beside those of its engine alone."""
    return _steps_by_engine(SERVED_STEPS_RESULT, ("0 + 1", "1 + 1"), served_step_rows())


def joined_steps() -> str:
    """The same where small chunks move together."""
    cases = ((case, alone, [row]) for case, alone, row in joined_step_rows())
    return _steps_by_engine(JOINED_STEPS_RESULT, ("1 + 1",), cases)


def _steps_by_engine(
    file: str, workers: Sequence[str], cases: Iterable[tuple[str, float, Sequence[Row]]]
) -> str:
    """Draw cases by the ms of the engine alone, and their rows: one for each kind of workers."""
    content = _content(file)
    where = f"{in_short(content['hardware'])}, Llama-3-8B's shape, commit {content['commit'][:8]}"
    figures = [(name, place, what) for place, name in enumerate(workers) for what in STEPS_DRAWN]
    return dot_chart.draw(
        dot_chart.DotChart(
            title="A step of decode of a worker that serves, by that of its engine alone",
            unit=f"% of a step of the engine alone; {where}",
            series=tuple(f"{name}, {STEP_FIGURES[what]}" for name, _, what in figures),
            cases=tuple(
                dot_chart.Case(
                    name=case,
                    values=tuple((100 * rows[place][what] / alone,) for _, place, what in figures),
                )
                for case, alone, rows in cases
            ),
            line_at=100.0,
        )
    )


def starts() -> str:
    """Where the time of a start goes."""
    _, hardware = _rows_and_hardware([STARTS_FILE])
    rows = {name: start_parts(row) for name, row in start_rows().items()}
    parts = dict.fromkeys(part for row in rows.values() for part in row)
    return draw(
        bars(
            "Parts of a start of 1 + 1 workers, by the worker that is ready last",
            (hardware, "From the launch until the router is ready (shorter is better)."),
            [(part, [row[part] for row in rows.values()]) for part in parts],
            series=tuple(zip(rows, COLORS, strict=False)),
            unit="s",
        )
    )


def _short(case: str) -> str:
    kind, _, sizes = case.partition("/")
    return sizes.replace("@1024", "").replace(",", " + ") if kind == "beside" else case


def linear() -> str:
    """The four products of all layers, beside torch's."""
    us: dict[int, dict[bool, float]] = defaultdict(lambda: defaultdict(float))
    for row in _content("linear-h200.json")["cases"]:
        if row["weight"] in LAYER_WEIGHTS and (row["is_shipped"] or row["tile"] == "torch"):
            us[row["num_rows"]][row["is_shipped"]] += NUM_LAYERS * row["us"]
    values = [
        (f"{num_rows:,} rows", (each[True] / 1000, each[False] / 1000))
        for num_rows, each in sorted(us.items())
    ]
    return draw(
        bars(
            "Linear layers of Llama-3-8B, all four products of 32 layers, logarithmic",
            ("One NVIDIA H200, bfloat16, medians with a cold L2 cache (shorter is better).",),
            values,
            series=(("Pagewire", BLUE), ("torch 2.11", ORANGE)),
            is_logarithmic=True,
        )
    )


def relay() -> str:
    """How late tokens come through the router."""
    cases: dict[str, dict[float, Row]] = defaultdict(dict)
    for row in _content("relay-cpu.json")["cases"]:
        name = f"{row['streams']} at {row['offered_tokens_per_s']:,}/s"
        cases[name][row["coalesce_ms"]] = row["late_ms"]
    return draw(
        bars(
            "How late tokens come from a worker's outbox to the client, logarithmic",
            ("Two CPU cores. Streams at tokens/s offered (shorter is better).",),
            [
                (name, [late[ms][part] for ms in (20.0, 0.0) for part in ("p50", "p99")])
                for name, late in cases.items()
            ],
            series=(
                ("gathered, p50", BLUE),
                ("p99", LIGHT_BLUE),
                ("at once, p50", ORANGE),
                ("p99 ", RED),
            ),
            is_logarithmic=True,
        )
    )


def gateway() -> str:
    """What a token costs over gRPC and over HTTP."""
    values = [
        (
            f"{row['way']}, {row['streams']}",
            (row["us_per_token"]["router"], row["us_per_token"].get("gateway")),
        )
        for row in gateway_rows()
    ]
    return draw(
        bars(
            "CPU time of a token, by way and streams (shorter is better)",
            ("Two CPU cores; with 2,000 streams other work took two thirds of them.",),
            values,
            series=(("router", BLUE), ("gateway", ORANGE)),
            unit="us",
        )
    )


def calls() -> str:
    """What a call costs each process, by calls at once."""
    parts = ("router", "worker", "client")
    return draw(
        bars(
            "CPU time of a call of one token, by calls at once (shorter is better)",
            ("Two CPU cores.",),
            [
                (f"{row['at_once']} at once", [row["us_per_call"][part] for part in parts])
                for row in _content("calls-cpu.json")["cases"]
            ],
            series=tuple(zip(parts, COLORS, strict=False)),
            unit="us",
        )
    )


def corruption() -> str:
    """How many of the damaged pages are found, by the way they take."""
    contents = [_content(path.name) for path in sorted(RESULTS.glob("corruption-*.json"))]
    return dot_chart.draw(
        dot_chart.DotChart(
            title="Damaged pages: all are found, whatever way they take",
            unit="pages, of eight kinds of damage",
            series=("sent wrong", "found"),
            cases=tuple(
                dot_chart.Case(
                    name=f"{over['transport']}, {' to '.join(over['devices'])}",
                    values=((found["pages"],), (found["found"],)),
                )
                for content in contents
                for over, found in [(content["configuration"], content["cases"][-1])]
            ),
            is_from_zero=True,
        )
    )


def disaggregation(kind: str, files: Sequence[str]) -> str:
    """One kind of cases of benchmarks.disaggregation, of one or more files."""
    charts = dict(disaggregation_charts(*_rows_and_hardware(files)))
    return draw(charts[kind])


def faults() -> str:
    """How long streams pause after a fault of a cluster on CPUs."""
    content = _content(FAULTS_RESULT)
    order = list(FAULTS)
    rows = sorted(content["cases"], key=lambda row: order.index(row["case"]))  # as in the table
    return draw(
        bars(
            "The longest pause of any stream of a run, logarithmic (shorter is better)",
            (
                f"{content['hardware']['cores']} CPU cores, {rows[0]['times']} runs of each fault.",
                "Four hosts, in namespaces; hangs, cuts and losses of power last 10 s or longer.",
            ),
            [(row["case"], [row["pause_ms_p50"], row["pause_ms_p99"]]) for row in rows],
            series=(("p50", BLUE), ("p99", LIGHT_BLUE)),
            is_logarithmic=True,
        )
    )


def kills() -> str:
    """What kills and hangs of workers on two GPUs cost, row by row of the table."""
    rows = kill_rows({name: _content(name) for name in KILLS_RESULTS})
    where = dict.fromkeys(hardware_of(each.result, with_commit=False) for each in rows)
    fields = ("pause_ms_p50", "noticed_ms", "quiet_ms", "usable_ms")

    def name(row: KillRow) -> str:
        carrier = row.carrier.removeprefix("CUDA ")
        # Hangs are measured over NCCL alone.
        return f"{'hang' if row.fault == 'hang' else carrier}, {row.side}/{row.moment}"

    return draw(
        bars(
            "After SIGKILL of a worker, or ten seconds of SIGSTOP, logarithmic (shorter is better)",
            (
                "; ".join(where),
                "Medians. IPC, NCCL: kills. Hang: over NCCL. No bar: no transfer was under way.",
            ),
            [(name(each), [each.row.get(field) for field in fields]) for each in rows],
            series=tuple(
                zip(("pause", "noticed", "pages free", "moves again"), COLORS, strict=True)
            ),
            is_logarithmic=True,
        )
    )


def replay() -> str:
    """How many requests of a trace get their tokens in time."""
    values = [
        (f"{pools['cluster']}, {pools['offered_requests_per_s']:.2f} offered", in_time)
        for pools, in_time in replays_in_time()
    ]
    files = [name for names in REPLAY_RESULTS.values() for name in names]
    _, hardware = _rows_and_hardware(files)
    limits = (f"limit {limit_ms} ms" if limit_ms else "no limit" for limit_ms in REPLAY_RESULTS)
    return draw(
        bars(
            "Replay of a conversation trace: requests answered in time (longer is better)",
            (
                hardware,
                "First token within 2 s, 99 % of the others within 50 ms.",
                "With separate pools, and without, by the limit of a step.",
            ),
            values,
            series=tuple(zip(("pools", *limits), COLORS, strict=True)),
            unit="per s",
        )
    )


def first_token_parts() -> str:
    """What the time to the last first token of a wave consists of."""
    _, hardware = _rows_and_hardware([PARTS_RESULT, CACHED_PARTS_RESULT])
    waits = ("decode_wait", "prefill_wait")

    def sums(parts: Row) -> tuple[float, float, float]:
        waiting = sum(parts.get(name, 0.0) for name in waits)
        return parts["passes"], waiting, sum(parts.values()) - parts["passes"] - waiting

    def name_of(case: str) -> str:
        name = case.removeprefix("aggregated/").removeprefix("ttft/")
        name = name.replace("-cached-at-once", " cached").replace("moved/", "all move, ")
        return f"{name}, 0 + 1" if case.startswith("aggregated/") else name

    values = [
        (name_of(case), sums(row["last"]["parts_ms"]))
        for case, row in part_rows().items()
        if "last" in row
    ]
    return draw(
        bars(
            "Parts of the time to the last first token of a wave, logarithmic",
            (hardware, "1 + 1 workers, unless it says otherwise. A wave of 1 has one first token."),
            values,
            series=(
                ("passes", BLUE),
                ("waits at workers", ORANGE),
                ("ways, router", LIGHT_BLUE),
            ),
            is_logarithmic=True,
        )
    )


def engine_time() -> str:
    """What each engine does in the mix."""
    _, hardware = _rows_and_hardware(MIX_RESULTS)
    kinds = ("prompt_ms", "decode_ms", "mixed_ms", "no_step_ms")
    values = [
        (f"{name} of {row['cluster'].replace('+', ' + ')}", [each[kind] / 1e3 for kind in kinds])
        for row, name, each in mix_rows()
    ]
    names = ("prompts", "decodes", "both", "no step")
    return draw(
        bars(
            "What each engine does in the mix of 512 requests",
            (hardware, "From the first call to the last token."),
            values,
            series=tuple(zip(names, COLORS, strict=True)),
            unit="s",
        )
    )


def served_moves() -> str:
    """Where the time goes in which pages arrive."""
    rows, hardware = _rows_and_hardware([MOVES_RESULT])
    parts = ("device_ms", "wake_ms", "between_ms")
    return draw(
        bars(
            "Pages of a cached prompt that arrive over NVLink: parts of the time",
            (hardware, "1 + 1 workers, pages of 64 tokens."),
            [
                (f"{int(case):,} tokens", [row[part] for part in parts])
                for case, row in rows.items()
            ],
            series=(("copies", BLUE), ("end seen", LIGHT_BLUE), ("between", ORANGE)),
        )
    )


DRAWINGS: Mapping[str, Callable[[], str]] = {
    "headline": headline,
    "serving-decode": partial(serving, "decode"),
    "serving-shared": partial(serving, "shared"),
    "serving-ttft": partial(serving, "ttft"),
    "serving-mixed": partial(serving, "mixed"),
    "targets": targets,
    "itl": partial(disaggregation, "itl", [POOLS_FILE, LIMITED_FILE]),
    "transfer-share": partial(disaggregation, "transfer-share", [POOLS_FILE]),
    "ablation": partial(disaggregation, "ablation", ABLATION_RESULTS),
    "ablation-one": partial(disaggregation, "ablation", [ABLATION_ON_ONE_GPU]),
    "replay": replay,
    "engine-step": engine_step,
    "step-profile": step_profile,
    "served-steps": served_steps,
    "joined-steps": joined_steps,
    "starts": starts,
    "served-moves": served_moves,
    "first-token-parts": first_token_parts,
    "engine-time": engine_time,
    "linear-h200": linear,
    "relay": relay,
    "gateway": gateway,
    "calls": calls,
    "corruption": corruption,
    "kills": kills,
    "faults": faults,
    **{f"tables/{name}": partial(table_plots.plot, name) for name in table_plots.PLOTS},
}


def main() -> None:
    """Write all figures."""
    for name, drawing in DRAWINGS.items():
        (FIGURES / f"{name}.svg").write_text(drawing(), encoding="utf-8")


def _rows_and_hardware(files: Sequence[str]) -> tuple[dict[str, Row], str]:
    """Return all rows of files by case, and where they were measured; one file: at which commit."""
    contents = [_content(name) for name in files]
    rows = {row["case"]: row for content in contents for row in content["cases"]}
    where = [hardware_of(each, with_commit=len(files) == 1) for each in contents]
    return rows, "; ".join(dict.fromkeys(where))


def _content(name: str) -> Any:
    path: Path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
