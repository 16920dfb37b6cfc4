"""The Markdown files of the repository."""

import hashlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {"build", "dist", "node_modules"}  # and folders whose name begins with a dot


def markdown_files() -> list[Path]:
    return sorted(_below(ROOT))


def page_digest() -> str:
    """Return a digest of the HTTP gateway's page, by which its picture is known to be present."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "http_gateway/page").iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _below(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir() and path.name not in LEFT_OUT and not path.name.startswith("."):
            yield from _below(path)
        elif path.suffix == ".md":
            yield path


def typed_commands(page: str) -> Iterator[list[str]]:
    """Yield the words of what a page's shell blocks have the reader type, without substitutions."""
    for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL):
        yield from _commands(block.replace("\\\n", " ").splitlines())
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        yield from _commands([line[2:] for line in block.splitlines() if line.startswith("$ ")])


def _commands(lines: list[str]) -> Iterator[list[str]]:
    command = ""
    for line in lines:
        command += re.sub(r"\$\([^)]*\)", "X", line)
        try:
            words = shlex.split(command, comments=True)
        except ValueError:  # a quotation goes on in the next line
            command += "\n"
            continue
        command = ""
        if words:
            yield words
    assert not command, f"a quotation has no end: {command}"
