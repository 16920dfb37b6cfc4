"""Draws what benchmarks.serving_matrix and benchmarks.disaggregation have measured as SVG files.

    python -m benchmarks.serving_figures --out docs/figures/ \\
        benchmarks/results/serving-matrix-h200.json benchmarks/results/disaggregation-h200.json

A figure is drawn where its cases are among the results, and takes the hardware from their file.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, floor, log10
from pathlib import Path

from benchmarks.bar_chart import Chart, Group, draw
from benchmarks.figures import BLUE, LIGHT_BLUE, ORANGE, RED
from benchmarks.stream_statistics import Row
from benchmarks.svg import tick_step
from benchmarks.transfer_shares import transfer_shares

# vLLM 0.24.0 on one H200: Llama-3-8B's shape, bfloat16, random weights, prefix caching on, else its
# defaults; ms, offline, so without a server or clients.
VLLM = {
    "decode/1@1024": 5.02,
    "decode/8@1024": 5.30,
    "decode/32@1024": 6.35,
    "decode/64@1024": 7.77,
    "decode/128@1024": 10.72,
    "decode/256@1024": 17.84,
    "decode/64@8192": 21.41,
    "decode/16@32768": 20.21,
    "shared/64,8192,256": 15.55,
    "shared/256,8192,128": 52.77,
    "shared/64,32768,256": 45.12,
    "ttft/1x512": 16.4,
    "ttft/1x4096": 100.2,
    "ttft/1x32768": 1194.0,
    "ttft/16x4096": 1604.0,
    "mixed/512": 25_300.0,
}
VLLM_NOTE = "vLLM 0.24.0: earlier, offline, one GPU of the same type, defaults with prefix caching."
ARMS = ("both", "cascade", "delta", "none")
Rows = Mapping[str, Row]
Values = Sequence[tuple[str, Sequence[float | None]]]  # case, a value of each series


def serving_charts(rows: Rows, hardware: str) -> Iterator[tuple[str, Chart]]:
    """Yield the figures of a serving matrix, with names."""
    titles = {
        "decode": "A step of decode at the client (shorter is better)",
        "shared": "A step of decode with a shared prefix at the client (shorter is better)",
        "ttft": "All first tokens at the client, logarithmic (shorter is better)",
        "mixed": "A mix of 512 requests (shorter is better)",
    }
    for kind, title in titles.items():
        values = [
            (case.partition("/")[2], (_ms(rows, case), _ms(rows, f"aggregated/{case}"), vllm))
            for case in rows
            if case.startswith(f"{kind}/")
            for vllm in [VLLM.get(case)]
        ]
        if values:
            yield (
                f"serving-{kind}",
                bars(
                    title,
                    (f"{hardware}; median of repeats.", VLLM_NOTE),
                    values,
                    series=(
                        ("Pagewire 1 + 1", BLUE),
                        ("Pagewire 0 + 1", LIGHT_BLUE),
                        ("vLLM", ORANGE),
                    ),
                    is_logarithmic=kind == "ttft",
                ),
            )


def disaggregation_charts(rows: Rows, hardware: str) -> Iterator[tuple[str, Chart]]:
    """Yield the figures of what separate pools cost and bring, with names."""
    shares: Values = [
        (case.partition("@")[2], (100 * row["share"], 100 * row["hidden_share"]))
        for case, row in rows.items()
        if case.startswith("transfer/ttft_share@")
    ]
    if shares:
        yield (
            "transfer-share",
            bars(
                "What of a transfer is seen, by tokens of the prompt",
                (hardware, "A share below 0 has no bar."),
                shares,
                series=(("of the first token", RED), ("of the transfer, hidden", BLUE)),
                unit="%",
            ),
        )
    for kind, title, fields in (
        ("itl", "Between tokens of 16 chats beside six long prompts", ("itl_ms",)),
        ("replay", "Replay of a conversation trace, logarithmic", ("ttft_ms", "itl_ms")),
    ):
        arms = [rows.get(f"{kind}/{arm}") for arm in ("disaggregated", "aggregated")]
        names = [f"{field}_{part}" for field in fields for part in ("p50", "p90", "p99", "max")]
        if any(arms):
            values: Values = [
                (name.replace("_ms_", " "), [arm[name] if arm else None for arm in arms])
                for name in names
            ]
            yield (
                kind,
                bars(
                    f"{title} (shorter is better)",
                    (hardware, "The same GPUs in separate pools, and each computing both."),
                    values,
                    series=(("disaggregated", BLUE), ("aggregated", ORANGE)),
                    is_logarithmic=kind == "replay",
                ),
            )
    shapes = dict.fromkeys(case.rpartition("/")[2] for case in rows if case.startswith("ablation/"))
    if shapes:
        yield (
            "ablation",
            bars(
                "Streams that share a prefix, all tokens (shorter is better)",
                (
                    hardware,
                    "Streams, shared tokens, own tokens. Delta: only missing pages move. Cascade: "
                    "a shared prefix is read once a step.",
                ),
                [
                    (shape, [_ms(rows, f"ablation/{arm}/{shape}") for arm in ARMS])
                    for shape in shapes
                ],
                series=tuple(zip(ARMS, (BLUE, LIGHT_BLUE, ORANGE, RED), strict=True)),
            ),
        )
    kills: Values = [
        (case.partition("/")[2], [row.get(f"{name}_ms") for name in ("failed", "quiet", "usable")])
        for case, row in rows.items()
        if case.startswith("kill/")
    ]
    if kills:
        yield (
            "kill",
            bars(
                "After SIGKILL of a worker, logarithmic (shorter is better)",
                (f"{hardware}; medians. No bar: no transfer was under way.",),
                kills,
                series=(
                    ("transfer given up", BLUE),
                    ("its pages are free", LIGHT_BLUE),
                    ("pages move again", ORANGE),
                ),
                is_logarithmic=True,
            ),
        )


def bars(
    title: str,
    notes: tuple[str, ...],
    values: Values,
    *,
    series: tuple[tuple[str, str], ...],
    unit: str = "ms",
    is_logarithmic: bool = False,
) -> Chart:
    """Return a chart whose axis begins at 0, or at a power of ten."""
    present = [each for _, row in values for each in row if each is not None and each > 0]
    most = max(present, default=1.0)
    if is_logarithmic:
        low, high = floor(log10(min(present, default=1.0))), ceil(log10(most))
        high = max(high, low + 1)
        ticks = [((power - low) / (high - low), 10.0**power) for power in range(low, high + 1)]
    else:
        step = tick_step(most)
        count = ceil(most / step)
        ticks = [(tick / count, step * tick) for tick in range(count + 1)]

    def length(value: float | None) -> float:
        if value is None or value <= 0:
            return 0.0
        if is_logarithmic:
            return (log10(value) - low) / (high - low)
        return value / ticks[-1][1]

    return Chart(
        title=title,
        notes=notes,
        series=series,
        case_heading="",
        unit=unit,
        ticks=tuple((part, f"{value:,.6g}") for part, value in ticks),
        groups=tuple(
            Group(case=case, values=tuple(row), lengths=tuple(map(length, row)))
            for case, row in values
        ),
    )


def main() -> None:
    """Write the figures of all files, or say what is wrong with one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="result files of the two benchmarks")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    options = parser.parse_args()
    figures: dict[str, str] = {}
    for path in options.results:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            rows = {row["case"]: row for row in content["cases"] if "error" not in row}
            rows |= {row["case"]: row for row in transfer_shares(rows)}
            where = hardware_of(content)
            charts = (*serving_charts(rows, where), *disaggregation_charts(rows, where))
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"{path}: {error!r}")
        figures |= {name: draw(chart) for name, chart in charts}
    options.out.mkdir(parents=True, exist_ok=True)
    for name, drawn in figures.items():
        (options.out / f"{name}.svg").write_text(drawn, encoding="utf-8")
    print(f"{options.out}: {' '.join(figures)}", file=sys.stderr)


def hardware_of(content: Row, *, with_commit: bool = True) -> str:
    """Return the hardware and shape of a result file, and its commit, in words."""
    found, configuration = content["hardware"], content["configuration"]
    gpus = found.get("gpus", [])
    what = f"{len(gpus)} x {gpus[0]}" if gpus else f"{found['cores']} cores, {found['machine']}"
    scale = "" if configuration["scale"] == "full" else f", scale {configuration['scale']}"
    commit = f", commit {content['commit'][:8]}" if with_commit else ""
    return f"{what}, shape {configuration['shape']}{scale}{commit}"


def _ms(rows: Rows, case: str) -> float | None:
    row = rows.get(case)
    return None if row is None else float(row["ms"])


if __name__ == "__main__":
    main()
