"""Links and headings of Markdown texts, for the site's hooks and for the test that checks them."""

import re
from collections.abc import Callable
from dataclasses import dataclass

# Pages of docs/ that are not written yet: their places in the navigation, and links to them, wait.
PENDING: frozenset[str] = frozenset()

_CODE = re.compile(
    r"^(?P<fence> *(?:```+|~~~+))[^\n]*\n.*?^(?P=fence)[`~]* *$"  # a block
    r"|(?<!`)(?P<ticks>`+)(?!`)(?:(?!\n\n).)+?(?<!`)(?P=ticks)(?!`)",  # a span
    re.MULTILINE | re.DOTALL,
)
_IMAGE = r"!\[[^\[\]]*\]\([^()\s]*\)"
_LINK = re.compile(rf"(!?)\[((?:[^\[\]]|{_IMAGE})*)\]\(([^()\s]+)\)")
_TAG = re.compile(r"<img\b[^>]*>")
_LIST = re.compile(r"^(?![-*] |\d+\. |[\s|#>])(.+)\n(?=(?:[-*]|1\.) )", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """An inline link or image, in Markdown or as the tag img."""

    text: str
    target: str  # as written: path, path#anchor, #anchor or URL
    is_image: bool

    @property
    def is_external(self) -> bool:
        """Whether it leads out of the repository."""
        return re.match(r"[a-z][a-z+.-]*:", self.target) is not None


def find_links(markdown: str) -> list[Link]:
    """Return the links outside of code, an image before the link that it is the text of."""
    found: list[Link] = []
    replace_links(markdown, lambda link: found.append(link))
    return found


def replace_links(markdown: str, replace: Callable[[Link], str | None]) -> str:
    """Replace the links outside of code; None leaves a link as it is."""

    def changed(prose: str, show: Callable[[str], str]) -> str:
        def replaced(match: re.Match[str]) -> str:
            text = _LINK.sub(replaced, match[2])
            link = Link(text=show(text), target=match[3], is_image=bool(match[1]))
            new = replace(link)
            return f"{match[1]}[{text}]({match[3]})" if new is None else new

        def replaced_tag(match: re.Match[str]) -> str:
            given = dict(re.findall(r'(\w+)="([^"]*)"', match[0]))
            new = replace(Link(text=given.get("alt", ""), target=given["src"], is_image=True))
            return match[0] if new is None else new

        return _TAG.sub(replaced_tag, _LINK.sub(replaced, prose))

    return _outside_code(markdown, changed)


def separate_lists(markdown: str) -> str:
    """Put an empty line before each list that follows a paragraph, as Python-Markdown wants it."""
    return _outside_code(markdown, lambda prose, _: _LIST.sub(r"\1\n\n", prose))


def _outside_code(markdown: str, change: Callable[[str, Callable[[str], str]], str]) -> str:
    """Change a text whose code is hidden; `change` also gets what shows the code of a part."""
    codes: list[str] = []

    def hide(code: re.Match[str]) -> str:
        codes.append(code[0])
        return f"\0{len(codes) - 1}\0"

    def show(text: str) -> str:
        return re.sub("\0(\\d+)\0", lambda number: codes[int(number[1])], text)

    return show(change(_CODE.sub(hide, markdown), show))


def anchors(markdown: str) -> set[str]:
    """Return the anchors of the headings, as the site and code hosts make them."""
    prose = _CODE.sub(lambda code: "" if "\n" in code[0] else code[0], markdown)
    return {_slug(heading) for heading in _HEADING.findall(prose)}


def _slug(heading: str) -> str:
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
