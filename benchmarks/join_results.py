"""Joins results of runs of one benchmark under the same conditions.

    python -m benchmarks.join_results --out whole.json part-1.json part-2.json

Runs that need not be alone on a host, such as those of kills, can share it, each with a file of
its own. Each has other cases, or other rounds of a case of kills or hangs.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kills import sum_up
from benchmarks.result_file import write_result
from benchmarks.stream_statistics import Row

SAME = ("date", "hardware", "versions", "commit", "configuration")


def joined(parts: Sequence[Row]) -> Row:
    """Return the content of one file with the cases of all parts, and all their commands.

    Raises:
        ValueError: Parts differ in what their rows depend on, or have the same case without rounds.
    """
    first = parts[0]
    for part in parts[1:]:
        if different := [key for key in SAME if part.get(key) != first.get(key)]:
            name = different[0]
            raise ValueError(f"{name}: found {part.get(name)}; allowed: {first.get(name)}")
    rows: dict[str, Row] = {}
    for row in (row for part in parts for row in part["cases"]):
        name = row["case"]
        before = rows.get(name)
        if before is None:
            rows[name] = row
        elif "rounds" in before and "rounds" in row:
            rows[name] = before | sum_up([*before["rounds"], *row["rounds"]])
        else:
            raise ValueError(f"cases: found {name} in two parts; allowed: each in one")
    commands = [part["command"] for part in parts]
    return {
        "command": f"{commands[0]} and {len(parts) - 1} more",
        "commands": commands,
        **{key: first[key] for key in SAME},
        "not_run": [name for part in parts for name in part["not_run"] if name not in rows],
        "cases": list(rows.values()),
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("parts", type=Path, nargs="+", help="results to join")
    options = parser.parse_args()
    try:
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in options.parts]
        write_result(options.out, joined(parts))
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
