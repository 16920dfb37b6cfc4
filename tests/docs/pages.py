"""The Markdown files of the repository."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {"build", "dist", "node_modules"}  # and folders whose name begins with a dot


def markdown_files() -> list[Path]:
    return sorted(_below(ROOT))


def _below(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir() and path.name not in LEFT_OUT and not path.name.startswith("."):
            yield from _below(path)
        elif path.suffix == ".md":
            yield path


def shell_lines(page: str) -> Iterator[str]:
    """Yield what a page's shell blocks have the reader type, a continued line as one."""
    for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL):
        yield from filter(str.strip, block.replace("\\\n", " ").splitlines())
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        yield from (line[2:] for line in block.splitlines() if line.startswith("$ "))
