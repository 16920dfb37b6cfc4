"""Writes the list of decision records into docs/decisions/README.md (make docs)."""

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "decisions"
PAGE = FOLDER / "README.md"
LIST = re.compile(r"(?s)(<!-- list of records -->\n).*?(<!-- end of list -->)")


def with_list(page: str) -> str:
    """Return the page with its list rewritten.

    Raises:
        ValueError: If a record does not begin with its number and title.
    """
    rows = []
    for path in sorted(FOLDER.glob("0*.md")):
        heading = re.match(r"# (\d+)\. (.+)\n", path.read_text(encoding="utf-8"))
        if heading is None or int(heading[1]) != int(path.name[:4]):
            raise ValueError(f"{path.name} does not begin with its number and title, `# N. Title`")
        rows.append(f"| {heading[1]} | [{heading[2]}]({path.name}) |\n")
    table = "".join(["| | decision |\n|--:|---|\n", *rows])
    return LIST.sub(lambda found: f"{found[1]}\n{table}\n{found[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_list(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
