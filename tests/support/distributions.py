"""The two distributions of this tree, as their pyproject.toml files say."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLIENT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SERVER = tomllib.loads((ROOT / "server" / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = [
    name for each in (CLIENT, SERVER) for name in each["tool"]["setuptools"]["packages"]
]  # by their import names
