"""What pages say of the repository is so: paths, commands, options, and what is generated."""

import json
import re
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from benchmarks import page_figures, table_plots, tables
from cluster.config_options import config_options
from docs.site import decision_index, draw
from tests.docs.pages import ROOT, markdown_files, page_digest, typed_commands
from tests.support.typed_commands import check_command

DOCS = ROOT / "docs"
# Records and the lab book also name what is gone.
PRESENT = [
    path
    for path in markdown_files()
    if path.name not in ("CHANGELOG.md", "experiments.md") and path.parent.name != "decisions"
]
TOPS = {path.name for path in ROOT.iterdir() if path.is_dir()}
present = pytest.mark.parametrize("path", PRESENT, ids=lambda path: str(path.relative_to(ROOT)))


@present
def test_named_paths_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"`([A-Za-z_]+/[\w./-]*)`", text)

    missing = {each for each in named if each.split("/")[0] in TOPS and not (ROOT / each).exists()}

    assert {each for each in missing if not each.startswith("build/")} == set()


@present
def test_named_tests_and_planted_bugs_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    if path.name == "steps-ahead.md":
        shown = [line.split("|")[3] for line in text.splitlines() if line.startswith("| ")]
        named |= {each for cell in shown for each in re.findall(r"`(\w+)`", cell)}
        assert len(named) > 40

    assert named - names_in_tests() == set()


@cache
def names_in_tests() -> frozenset[str]:
    """Return the names of all functions and classes at the top level of tests."""
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        found |= set(re.findall(r"(?m)^(?:async )?(?:def|class) (\w+)", path.read_text()))
    return frozenset(found)


def test_the_picture_shows_the_page_as_it_is() -> None:
    made_of = (DOCS / "images" / "page.sha256").read_text().strip()

    assert made_of == page_digest(), (
        "the page has changed: make test-page PAGE_IMAGE=docs/images/page.png ARGS='-k picture'"
    )


def test_the_tree_lists_every_package() -> None:
    tree = (DOCS / "extending" / "index.md").read_text(encoding="utf-8")

    listed = set(re.findall(r"(?m)^([a-z_]+)/ ", tree))
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} <= listed
    assert listed <= TOPS


@present
def test_commands_can_be_typed(path: Path) -> None:
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))
    for words in typed_commands(path.read_text(encoding="utf-8")):
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        if words[:1] == ["make"]:
            asked = [each for each in words[1:] if "=" not in each]
            assert set(asked) <= set(targets), words
        if words and Path(words[0]).name == "pagewire" and "..." not in words:
            check_command(words)
        if words[:2] == ["python", "-m"]:
            assert (ROOT / f"{words[2].replace('.', '/')}.py").exists(), words


@present
def test_named_options_exist(path: Path) -> None:
    sections = {each.section for each in config_options().values()} - {""}
    named = re.findall(r"`([a-z_]+)\.([a-z_]+)`", path.read_text(encoding="utf-8"))

    missing = {
        f"{section}.{name}"
        for section, name in named
        if section in sections and f"{section}.{name}" not in config_options()
    }

    assert {each for each in missing if not each.endswith((".py", ".md", ".yaml"))} == set()


@pytest.mark.parametrize("name", tables.PAGES)
def test_tables_are_those_of_the_results(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")

    assert tables.with_tables(page) == page, "run `make docs`"
    assert tables.REGION.search(page)


# A part of another table, and where the files come from.
WITHOUT_FIGURES = {"summary", "runs"}


@pytest.mark.parametrize("name", tables.PAGES)
def test_each_table_of_measurements_has_a_figure_below_it(name: str) -> None:
    parts = re.split(r"<!-- table: ([\w-]+) -->", (ROOT / name).read_text(encoding="utf-8"))[1:]
    below = dict(zip(parts[::2], parts[1::2], strict=True))

    bare = {table for table, text in below.items() if "](figures/" not in text.split("\n## ")[0]}

    assert bare <= WITHOUT_FIGURES


def test_a_table_follows_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "<!-- table: engine-step -->\nold\n<!-- end of table -->\n"
    path = tables.RESULTS / "engine-step-llama-3-8b-h200.json"
    first = json.loads(path.read_text(encoding="utf-8"))["cases"][0]

    assert f"| `{first['case']}` | {first['one_by_one_ms']:.2f} |" in tables.with_tables(page)
    assert "old" not in tables.with_tables(page)
    monkeypatch.setitem(tables.TABLES, "engine-step", lambda: "new\n")
    assert "\nnew\n" in tables.with_tables(page)


def test_what_is_hidden_by_count_has_a_column_once_it_was_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uncounted = {
        name: {key: value for key, value in row.items() if key not in ("receive_ms", "exposed_ms")}
        for name, row in tables._rows_of(tables.POOLS_FILE).items()
        if "ttft_share" not in name
    }
    new = uncounted["transfer/new@32768"] | {"receive_ms": 20.0, "exposed_ms": 5.0}
    counted = uncounted | {"transfer/new@32768": new}

    monkeypatch.setattr(tables, "_rows_of", lambda name: dict(uncounted))
    assert "counted" not in tables.transfers()

    monkeypatch.setattr(tables, "_rows_of", lambda name: dict(counted))
    heads, *_, last = tables.transfers().splitlines()
    assert heads.endswith("| hidden, counted |")
    assert last.endswith("% | 75 % |")


def test_figures_are_those_of_the_program() -> None:
    for name, drawing in draw.DRAWINGS.items():
        drawn = (draw.FIGURES / f"{name}.svg").read_text(encoding="utf-8")
        assert drawn == str(drawing()), f"{name} is stale; run `make docs`"


@pytest.mark.parametrize("name", page_figures.DRAWINGS)
def test_figures_beside_tables_show_the_results(name: str) -> None:
    drawn = (page_figures.FIGURES / f"{name}.svg").read_text(encoding="utf-8")

    assert drawn == page_figures.DRAWINGS[name](), "run `make docs`"
    assert f"figures/{name}.svg" in text_of_all_pages(), "no page shows it"


@cache
def text_of_all_pages() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in markdown_files())


def test_no_plot_of_a_table_is_left_behind() -> None:
    drawn = {path.stem for path in (page_figures.FIGURES / "tables").iterdir()}

    assert drawn == set(table_plots.PLOTS)


@pytest.mark.parametrize(
    "path",
    [DOCS / "experiments.md", *sorted((DOCS / "decisions").glob("0*.md"))],
    ids=lambda path: path.stem,
)
def test_each_table_of_numbers_has_a_figure_beside_it(path: Path) -> None:
    blocks = path.read_text(encoding="utf-8").split("\n\n")

    bare = [
        block.splitlines()[0]
        for number, block in enumerate(blocks)
        if count_numbers(block) >= 6
        and not any("](" in each and "figures/" in each for each in blocks[number - 1 : number + 2])
    ]

    assert bare == []


def count_numbers(block: str) -> int:
    """Return how many cells of a table hold numbers, by the alignment of their columns."""
    rows = [line.split("|")[2:-1] for line in block.splitlines() if line.startswith("|")]
    if len(rows) < 3 or sum(each.strip().endswith("-:") for each in rows[1]) < 2:
        return 0
    return sum(
        bool(re.search(r"\d", cell))
        for row in rows[2:]
        for cell, rule in zip(row, rows[1], strict=True)
        if rule.strip().endswith("-:")
    )


@pytest.mark.parametrize("name", draw.DRAWINGS)
def test_nothing_of_a_figure_lies_outside_of_it(name: str) -> None:
    root = ElementTree.fromstring(str(draw.DRAWINGS[name]()))
    width, height = (float(root.attrib[each]) for each in ("width", "height"))

    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        length = 7.2 * len(text.text or "")  # px, of a wide sans serif at 13 px
        before = {"start": 0.0, "middle": length / 2, "end": length}[text.attrib["text-anchor"]]
        left = float(text.attrib["x"]) - before
        assert left >= 0, text.text
        assert left + length <= width, text.text
        assert 0 <= float(text.attrib["y"]) <= height, text.text


def test_decisions_are_listed() -> None:
    page = decision_index.PAGE.read_text(encoding="utf-8")

    assert decision_index.with_list(page) == page, "run `make docs`"
    assert page.count("](0") == len(list(decision_index.FOLDER.glob("0*.md")))


def test_each_entry_of_the_lab_book_is_in_its_index() -> None:
    text = (DOCS / "experiments.md").read_text(encoding="utf-8")
    index, entries = text.split("\n## ", 1)

    titles = re.findall(r"(?m)^## (\d{4}-\d\d-\d\d: .+)$", f"## {entries}")
    listed = re.findall(r"(?m)^\| \[(\d{4}-\d\d-\d\d: [^\]]+)\]", index)
    assert listed == titles
    for title, entry in zip(titles, re.split(r"(?m)^## ", f"## {entries}")[1:], strict=True):
        labels = re.findall(r"(?m)^\*\*(Question|Setup|Result|Consequence)\.\*\*", entry)
        assert labels == ["Question", "Setup", "Result", "Consequence"], title


def test_each_page_is_in_the_navigation() -> None:
    class Loader(yaml.SafeLoader):
        """Reads a Python object as its arguments."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, tag, node: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]

    def pages(entry: object) -> set[str]:
        if isinstance(entry, str):
            return {entry}
        children = entry.values() if isinstance(entry, dict) else entry
        return set().union(*map(pages, children))

    written = {
        str(path.relative_to(DOCS))
        for path in DOCS.rglob("*.md")
        if not re.fullmatch(r"\d{4}-.+\.md", path.name)
    }
    assert written <= pages(nav)
