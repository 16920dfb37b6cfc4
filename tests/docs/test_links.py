"""Relative links of all Markdown files lead to files and headings that exist."""

from pathlib import Path

import pytest

from docs.site.links import PENDING, Link, anchors, find_links, replace_links, separate_lists
from tests.docs.pages import ROOT, markdown_files


def broken_links(path: Path) -> list[str]:
    """Targets of a file that lead nowhere."""
    return [
        link.target
        for link in find_links(path.read_text(encoding="utf-8"))
        if not link.is_external and not leads_somewhere(path, link.target)
    ]


def leads_somewhere(path: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    found = path.parent / name if name else path
    if found.parent.resolve() == ROOT / "docs" and found.name in PENDING and not found.exists():
        return True
    if not found.exists() or (name and not found.resolve().is_relative_to(ROOT)):
        return False
    return not anchor or anchor in anchors(found.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", markdown_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_what_exists(path: Path) -> None:
    assert broken_links(path) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# One `two`, three\n\n```sh\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md) [b](gone.md) [c](there.md#one-two-three) [d](there.md#no-heading)\n"
        "[`e`](gone.md#e) [![f](gone.svg)](there.md) [g\nh](gone/) `[i](code.md)` [j](#page)\n"
        "```\n[k](block.md)\n```\n[l](https://example.com/gone)\n"
        '<img src="gone.png" width="360"\n  alt="m">\n'
    )

    inside = [link for link in find_links(page.read_text()) if not link.is_external]
    missing = [
        link.target for link in inside if not (page.parent / link.target.partition("#")[0]).exists()
    ]

    assert len(find_links(page.read_text())) == 11
    assert missing == ["gone.md", "gone.md#e", "gone.svg", "gone/", "gone.png"]
    assert "no-heading" not in anchors((tmp_path / "there.md").read_text())
    assert "one-two-three" in anchors((tmp_path / "there.md").read_text())


def test_replacing_a_link_leaves_all_else_as_it_was() -> None:
    text = 'See [the `code`](a.md), `[not](a.md)`, ![image](a.md) and <img src="a.md" alt="tag">.\n'

    def replace(link: Link) -> str | None:
        return None if link.text == "image" else f"<{link.text}>"

    assert replace_links(text, replace) == (
        "See <the `code`>, `[not](a.md)`, ![image](a.md) and <tag>.\n"
    )


def test_a_list_behind_a_paragraph_becomes_one_on_the_site() -> None:
    text = "Two:\n1. *a*\n   more\n2. b\n\n- c\n- d\n\n```\nx\n- y\n```\n"

    assert separate_lists(text) == text.replace("Two:\n", "Two:\n\n")
