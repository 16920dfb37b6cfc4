"""The two distributions of this tree, as their pyproject.toml files say, and their modules."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLIENT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SERVER = tomllib.loads((ROOT / "server" / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = [
    name for each in (CLIENT, SERVER) for name in each["tool"]["setuptools"]["packages"]
]  # by their import names
SOURCES = sorted(path for name in PACKAGES for path in (ROOT / name.replace(".", "/")).glob("*.py"))
# The folders whose code runs in a cluster and its clients, without kernels and benchmarks.
SERVING = (
    *("cli", "cluster", "credentials", "decode_worker", "grammars", "http_gateway", "kv_cache"),
    *("kv_transfer", "llm_engine", "observability", "options", "pagewire", "prefill_worker"),
    *("protos", "router", "worker"),
)


def serving_modules_with(pattern: re.Pattern[str]) -> set[str]:
    """Return the paths of the modules of SERVING in which a pattern is found."""
    return {
        str(path.relative_to(ROOT))
        for folder in SERVING
        for path in (ROOT / folder).rglob("*.py")
        if pattern.search(path.read_text(encoding="utf-8"))
    }
