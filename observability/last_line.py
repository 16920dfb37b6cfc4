"""Reads the reason out of an error that Ray brings from another process."""

import re


def last_line(error: Exception) -> str:
    """Return the last line of Ray's error, which is the reason, without the path of its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"^(\w+\.)+\w+: ", "", lines[-1]) if lines else type(error).__name__
