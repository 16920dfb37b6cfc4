"""A pytest plugin that skips whatever imports torch, Triton, Ray or transformers: `make quick`."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

import pytest

HEAVY = {"ray", "torch", "transformers", "triton"}


class _SkipHeavy(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        package = name.partition(".")[0]
        if package in HEAVY:
            pytest.skip(f"needs {package}", allow_module_level=True)


sys.meta_path.insert(0, _SkipHeavy())
