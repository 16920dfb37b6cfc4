"""Commands of pagewire as documentation shows them: read as the command line would, never run."""

from collections.abc import Sequence
from pathlib import Path

from typer.main import get_command

from cli import commands as cli


def check_command(words: Sequence[str]) -> None:
    """Parse the words of a pagewire command; fails on names and flags that do not exist."""
    assert Path(words[0]).name == "pagewire"
    group = get_command(cli.app)
    parent = group.make_context("pagewire", ["version"])
    group.get_command(parent, words[1]).make_context(words[1], [*words[2:]], parent=parent)
