"""The JSON of a run: written once, or after each case and continued later."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.stream_statistics import Row

Derive = Callable[[Mapping[str, Row]], list[Row]]


class ResultFile:
    """The JSON of a run, rewritten after each case.

    Args:
        path: Where; None: nowhere.
        head: The conditions under which the rows hold.
        derive: Makes rows of those of several cases.
        resumes: Keep the rows that the file has, but for those that failed.

    Raises:
        ValueError: If the file to resume is of other hardware or configuration.
    """

    def __init__(
        self,
        path: Path | None,
        head: Row,
        *,
        derive: Derive = lambda _: [],
        resumes: bool = False,
    ) -> None:
        self._path = path
        self._head = head
        self._derive = derive
        self._rows: dict[str, Row] = {}
        self._not_run: list[str] = []
        if resumes and path is not None and path.exists():
            self._resume(json.loads(path.read_text(encoding="utf-8")))

    def _resume(self, old: Row) -> None:
        for key in ("hardware", "configuration"):
            if old.get(key) != self._head[key]:
                raise ValueError(f"{self._path}: {key} is {old.get(key)}, now {self._head[key]}")
        commits = [old.get("commit"), *old.get("earlier_commits", [])]
        if earlier := [each for each in commits if each != self._head["commit"]]:
            self._head["earlier_commits"] = earlier
        self._rows = {
            row["case"]: row for row in old["cases"] if "error" not in row and "from" not in row
        }

    @property
    def num_failed(self) -> int:
        """Cases that have failed."""
        return sum("error" in row for row in self._rows.values())

    def has(self, case: str) -> bool:
        """Tell whether a case has been measured."""
        return case in self._rows

    def listed(self, case: str, name: str) -> list[Any]:
        """Return a copy of a list in the row of a case, such as its rounds; [] if there is none."""
        return list(self._rows.get(case, {}).get(name, []))

    def add(self, row: Row) -> None:
        """Take a case in, and write the file."""
        self._rows[row["case"]] = row
        shown = [f"{key} {value}" for key, value in row.items() if not isinstance(value, list)]
        say(f"{row['case']}: {', '.join(shown[1:])}")
        self.write()

    def leave_out(self, cases: Sequence[str]) -> None:
        """List cases that were not run, and write the file."""
        self._not_run = list(cases)
        if cases:
            say(f"not run: {' '.join(cases)}")
        self.write()

    def write(self) -> None:
        """Write what there is, whole or not at all."""
        if self._path is None:
            return
        measured = {name: row for name, row in self._rows.items() if "error" not in row}
        rows = [*self._rows.values(), *self._derive(measured)]
        content = self._head | {"not_run": self._not_run, "cases": rows}
        aside = self._path.with_suffix(".part")
        aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        aside.replace(self._path)


def write_result(path: Path | None, result: Row) -> None:
    """Write a whole result to a path; None: write nothing."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def say(line: str) -> None:
    """Print how far the run is."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
