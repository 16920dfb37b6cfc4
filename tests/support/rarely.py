"""Marks values of a parameter whose neighbours show nearly the same in each run."""

from typing import Any

import pytest


def rarely(*values: Any) -> list[Any]:
    """Return values, or tuples of the values of several parameters, for `make thorough`."""
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.thorough)
        for each in values
    ]
