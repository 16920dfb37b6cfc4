"""The command line without a process of its own, where only words and exit codes matter."""

import io
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

import pytest

from cli import commands as cli


def run_main(*arguments, text="", stdout=None):
    """Run a command in this process, with streams that are not terminals.

    Args:
        arguments: The words after `pagewire`.
        text: Standard input.
        stdout: A file that takes standard output; None: the result has it.
    """
    stderr = io.StringIO()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as kept:
        with (
            patch.object(sys, "argv", ["pagewire", *arguments]),
            patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()))),
            patch.dict(os.environ, COLUMNS="80"),
            redirect_stdout(stdout or kept),
            redirect_stderr(stderr),
            pytest.raises(SystemExit) as end,
        ):
            cli.main()
        kept.seek(0)
        return subprocess.CompletedProcess(
            arguments, end.value.code, kept.read(), stderr.getvalue()
        )
