"""The commands of clients, and how a process runs them."""

import sys

from tests.support.rarely import rarely

COMMANDS = [
    ("generate", "x"),
    ("chat",),
    ("top", "--once", "--interval", "0.1"),
    *rarely((("generate", "x", "--json"),), (("status", "--once"),), (("status", "--json"),)),
]
PAGEWIRE = [sys.executable, "-m", "cli"]
