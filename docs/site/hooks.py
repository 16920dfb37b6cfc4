"""What MkDocs does not do by itself: pages from elsewhere in the repository, and links to them.

1. on_config   leaves out PENDING pages, and lists the decision records
2. on_files    adds the pages that are generated, or whose text lies elsewhere in the repository
3. on_page_markdown  turns links into the repository into links within the site
4. on_post_build     lists external links, and fails if a page would load anything from another host
"""

import logging
import re
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.site.links import PENDING, Link, find_links, replace_links, separate_lists
from protos.reference import reference_page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# page |-> where its text lies, below the root
ELSEWHERE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "deployment/hosts.md": "deploy/README.md",
    "deployment/kubernetes.md": "deploy/kubernetes/README.md",
}
# page |-> figure that stands for its Mermaid diagram, which needs a program from another host
DIAGRAMS = {"protocol.md": "figures/request.svg"}
SOURCES = "repository"  # folder of the site with the files of the repository that pages link to
LOADS = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"https?:|<link\b[^>]*stylesheet[^>]*https?:"
)

log = logging.getLogger("mkdocs.hooks.pagewire")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation."""
    config.nav = _existing(config.nav or [])
    records = sorted(f"decisions/{path.name}" for path in (DOCS / "decisions").glob("0*.md"))
    config.nav[-1]["Decisions"] += records
    return config


def _existing(nav: list[Any]) -> list[Any]:
    kept: list[Any] = []
    for entry in nav:
        title, target = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
        if isinstance(target, list):
            kept.append({title: _existing(target)})
        elif not _is_pending(target):
            kept.append(entry)
    return kept


def _is_pending(page: str) -> bool:
    return page in PENDING and not (DOCS / page).exists()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in docs/."""
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    files.append(File.generated(config, "api/grpc.md", content=reference_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page whose links lead to pages and files of the site."""
    here = page.file.src_uri
    if here in DIAGRAMS:
        figure = relpath(DIAGRAMS[here], dirname(here) or ".")
        markdown = re.sub(r"(?ms)^```mermaid$.*?^```$", f"![Sequence diagram]({figure})", markdown)
    if "```mermaid" in markdown:
        raise PluginError(f"{here}: no figure stands for its Mermaid diagram; see DIAGRAMS")
    source = ELSEWHERE.get(here, f"docs/{here}")

    def replaced(link: Link) -> str | None:
        path, _, anchor = link.target.partition("#")
        if link.is_external or not path:
            return None
        target = normpath(f"{dirname(source)}/{path}".lstrip("/"))
        uri = _place(target, config, files)
        if uri is None:
            return link.text
        shown = relpath(uri, dirname(here) or ".") + (f"#{anchor}" if anchor else "")
        return f"{'!' if link.is_image else ''}[{link.text}]({shown})"

    return separate_lists(replace_links(markdown, replaced))


def _place(target: str, config: MkDocsConfig, files: Files) -> str | None:
    """Return where in the site a path of the repository is; None: there is nothing to show."""
    pages = {source: page for page, source in ELSEWHERE.items()}
    if target in pages:
        return pages[target]
    if target.startswith("docs/"):
        page = target.removeprefix("docs/")
        return None if _is_pending(page) else page
    path = ROOT / target
    if path.is_dir():
        return None
    # As plain text, which a browser shows whatever the file is.
    uri = f"{SOURCES}/{target}" + ("" if path.suffix in (".json", ".svg") else ".txt")
    if path.is_file() and files.get_file_from_path(uri) is None:
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return uri


def on_post_build(config: MkDocsConfig) -> None:
    """Check that the site needs no other host; write the list of links that lead to one."""
    site = Path(config.site_dir)
    for path in sorted(site.rglob("*.html")):
        if found := LOADS.search(path.read_text("utf-8")):
            raise PluginError(f"{path}: loads from another host: {found[0]}")
    sources = [*DOCS.rglob("*.md"), *(ROOT / each for each in ELSEWHERE.values())]
    links = {
        link.target
        for path in sources
        for link in find_links(path.read_text("utf-8"))
        if link.is_external
    }
    listed = site.parent / "external-links.txt"
    listed.write_text("".join(f"{each}\n" for each in sorted(links)), "utf-8")
    log.info("%d external links, which nothing has fetched: %s", len(links), listed)
