"""Messages of an installation name no file that only the repository has."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.distributions import ROOT, SOURCES

PATH = re.compile(r"\b(?:docs|deploy|tests|examples|benchmarks/results)/\w|\w\.md\b|\bMakefile\b")
WRITERS = {  # of the repository's own documentation
    "benchmarks/fault_table.py",
    "benchmarks/tables.py",
    "cli/reference.py",
    "protos/reference.py",
}
SHOWN_DOCSTRINGS = ("pagewire/", "cli/")  # of the client's help(), and of --help


def installed_files() -> Iterator[Path]:
    """Yield the modules and page files of both wheels."""
    yield from SOURCES
    yield from (ROOT / "http_gateway/page").iterdir()


def shown_texts(path: Path, text: str) -> Iterator[str]:
    """Yield what users may see of a file: its strings, and docstrings where those are shown."""
    if path.suffix != ".py":
        yield text
        return
    tree = ast.parse(text)
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    shows_docstrings = str(path.relative_to(ROOT)).startswith(SHOWN_DOCSTRINGS)
    for node in ast.walk(tree):
        is_shown = shows_docstrings or id(node) not in docstrings
        if is_shown and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_message_of_an_installation_names_a_file_that_it_lacks() -> None:
    found = []
    for path in installed_files():
        text = path.read_text(encoding="utf-8")
        if PATH.search(text) and str(path.relative_to(ROOT)) not in WRITERS:
            found += [(path.name, each) for each in shown_texts(path, text) if PATH.search(each)]

    assert found == []


def test_a_message_that_names_one_is_found() -> None:
    text = '"""A docstring: docs/http.md."""\nraise ValueError(f"{1}: see docs/tenants.md")\n'

    assert any(map(PATH.search, shown_texts(ROOT / "router/x.py", text)))
    assert not any(map(PATH.search, shown_texts(ROOT / "router/x.py", text[:32])))
    assert any(map(PATH.search, shown_texts(ROOT / "cli/x.py", text[:32])))
