"""Makes the comments of fields, and trees in docstrings, part of the Python reference."""

from pathlib import Path
from typing import Any

import griffe

VALUES = ("pagewire.types.", "pagewire.errors.")  # modules whose fields have comments


class Comments(griffe.Extension):
    """Takes the comment after a field for its docstring, and shows a tree of errors as it is."""

    def on_attribute(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Read the comment after a field that has no docstring."""
        if attr.docstring is not None or attr.lineno is None:
            return
        if attr.path.startswith(VALUES) and isinstance(attr.filepath, Path):
            line = attr.filepath.read_text("utf-8").splitlines()[attr.lineno - 1]
            _, _, comment = line.partition("  # ")
            if comment and not comment.startswith(("noqa", "type:")):
                attr.docstring = griffe.Docstring(comment[0].upper() + comment[1:], parent=attr)

    def on_module(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        """Put a paragraph that draws a tree into a code block."""
        if mod.docstring is not None:
            paragraphs = mod.docstring.value.split("\n\n")
            mod.docstring.value = "\n\n".join(
                f"```\n{each}\n```" if "├──" in each else each for each in paragraphs
            )
