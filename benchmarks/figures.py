"""Draws the decode and cascade cases of benchmarks.kernels beside FlashInfer's as two SVG files.

python -m benchmarks.figures --results benchmarks/results/kernels-h200.json --out docs/figures/ \
    --border benchmarks/results/cascade-border-h200.json

With --border, the results of benchmarks.cascade_border become a third one.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from math import ceil, floor, log10
from pathlib import Path

from benchmarks import border_chart
from benchmarks.bar_chart import Chart, Group, draw, format_value
from benchmarks.cascade_border import Row

# FlashInfer 0.6.12, median us, measured earlier on the same type of GPU by the method of
# benchmarks.kernels, with pages of 16 tokens in a pool of one layer. Decode with tensor cores.
FLASHINFER_DECODE = {
    "1x1024": 12.6,
    "1x4096": 18.6,
    "1x16384": 34.9,
    "8x1024": 24.7,
    "8x4096": 52.2,
    "32x1024": 49.2,
    "64x1024": 82.7,
    "128x1024": 148.0,
    "256x1024": 274.0,
    "64x4096": 254.0,
    "128x8192": 977.0,
    "lognormal1": 389.0,
    "lognormal2": 395.0,
    "lognormal3": 502.0,
    "skew": 906.0,
    "skew4": 510.0,
}
WITHOUT_WRITE = ("64x4096", "128x8192")  # FlashInfer's runs followed each other
FLASHINFER_CASCADE = {  # batch, shared, unique |-> (cascade, flat)
    "8,4096,1024": (106.3, 37.8),
    "16,8192,256": (151.4, 73.8),
    "32,2048,512": (127.2, 57.9),
    "64,8192,256": (223.7, 251.2),
    "256,8192,128": (420.2, 929.8),
    "64,32768,256": (544.0, 915.9),
    "256,32768,256": (838.4, 3598.0),
}
METHOD = (
    "One NVIDIA H200, Llama-3-8B's shape, bfloat16, one layer, in a CUDA graph, 256 MB written "
    "between runs, median.",
    "FlashInfer 0.6.12: earlier, same method and GPU type, pages of 16 tokens, pool of one layer.",
)

# Okabe and Ito's colours, which the colour-blind tell apart.
BLUE, LIGHT_BLUE, RED, ORANGE = "#0072B2", "#56B4E9", "#D55E00", "#E69F00"


def read_times(path: Path) -> dict[str, float]:
    """Return the us of each case in a file that benchmarks.kernels has written."""
    return {row["case"]: row["us"] for row in json.loads(path.read_text()) if "case" in row}


def decode_chart(us: Mapping[str, float]) -> Chart:
    """Show flat decode as shares of the speed of the read alone: case |-> us, of all cases."""
    names = [f"{kind}/{case}" for case in FLASHINFER_DECODE for kind in ("decode", "read")]
    _check_present(names, us)
    groups = []
    for case, flashinfer in FLASHINFER_DECODE.items():
        ours, read = us[f"decode/{case}"], us[f"read/{case}"]
        groups.append(
            Group(
                case=f"{case} *" if case in WITHOUT_WRITE else case,
                values=(ours, flashinfer),
                lengths=(read / ours, read / flashinfer),
                remark=format_value(read),
            )
        )
    return Chart(
        title="Decode attention on an H200: share of the read's speed (longer is better)",
        notes=(
            *METHOD,
            "100 %: a kernel that only reads the keys and values, whose time stands at the right.",
            "* FlashInfer without the write between runs, which costs up to 10 us.",
            "lognormal: 128 requests, 64 to 24,225 tokens; skew: 1 x 65,536 and 63 x 512 tokens; "
            "skew4: 4 x 32,768 and 60 x 1,024.",
        ),
        series=(("Pagewire", BLUE), ("FlashInfer", ORANGE)),
        case_heading="batch x tokens",
        ticks=tuple((percent / 100, f"{percent} %") for percent in (0, 25, 50, 75, 100)),
        remark_heading="read, us",
        groups=tuple(groups),
    )


def cascade_chart(us: Mapping[str, float]) -> Chart:
    """Show cascade and flat attention on a logarithmic axis: case |-> us, of all cases."""
    names = [f"cascade/{case}{end}" for case in FLASHINFER_CASCADE for end in ("", "@flat")]
    _check_present(names, us)
    times = {
        case: (us[f"cascade/{case}"], us[f"cascade/{case}@flat"], *flashinfer)
        for case, flashinfer in FLASHINFER_CASCADE.items()
    }
    low = floor(log10(min(min(row) for row in times.values())))
    high = ceil(log10(max(max(row) for row in times.values())))
    ticks = [
        ((log10(digit * 10**power) - low) / (high - low), f"{digit * 10**power:,}")
        for power in range(low, high + 1)
        for digit in ((1, 2, 5) if power < high else (1,))
    ]
    groups = [
        Group(case=case, values=row, lengths=tuple((log10(t) - low) / (high - low) for t in row))
        for case, row in times.items()
    ]
    return Chart(
        title="Attention over a shared prefix on an H200: us, logarithmic (shorter is better)",
        notes=METHOD,
        series=(
            ("Pagewire cascade", BLUE),
            ("Pagewire flat", LIGHT_BLUE),
            ("FlashInfer cascade", RED),
            ("FlashInfer flat", ORANGE),
        ),
        case_heading="batch,shared,unique",
        ticks=tuple(ticks),
        groups=tuple(groups),
    )


def main() -> None:
    """Write all figures, or say what is wrong with a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--results", type=Path, required=True, help="result file of benchmarks.kernels"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--border", type=Path, help="result file of benchmarks.cascade_border")
    arguments = parser.parse_args()

    path = arguments.results
    try:
        us = read_times(path)
        figures = {"decode": draw(decode_chart(us)), "cascade": draw(cascade_chart(us))}
        if arguments.border is not None:
            path = arguments.border
            rows = [Row(**row) for row in json.loads(path.read_text())]
            figures["cascade-border"] = border_chart.draw(rows)
    except (OSError, ValueError, TypeError) as error:
        parser.error(f"{path}: {error}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, content in figures.items():
        (arguments.out / f"{name}-h200.svg").write_text(content)


def _check_present(names: Sequence[str], us: Mapping[str, float]) -> None:
    missing = [name for name in names if name not in us]
    if missing:
        raise ValueError(f"cases missing in the results: {' '.join(missing)}")


if __name__ == "__main__":
    main()
