"""What the page about HTTP says of fields, beside the fields that the gateway takes."""

import re
from collections.abc import Mapping
from pathlib import Path

from http_gateway import chat, completions, responses
from http_gateway.fields import Unsupported

PAGE = Path(__file__).parents[2] / "docs" / "http.md"


def test_fields_that_must_have_their_default_are_those_of_each_endpoint() -> None:
    [row] = re.findall(r"^\| fields without effect \|.*", PAGE.read_text("utf-8"), re.MULTILINE)
    cells = [set(re.findall(r"`(\w+)`", cell)) for cell in row.split("|")[2:5]]
    assert cells == [
        _with_defaults(chat.UNSUPPORTED),
        _with_defaults(completions.UNSUPPORTED) | {"best_of"},
        _with_defaults(responses.UNSUPPORTED),
    ]


def _with_defaults(table: Mapping[str, Unsupported]) -> set[str]:
    return {field for field, known in table.items() if known.off}
