import os
import re
import tomllib
from pathlib import Path

import pytest

from cluster.environment import prepare_local_ray
from cluster.reference import ENVIRONMENT

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("given", "found"), [(None, "ERROR"), ("DEBUG", "DEBUG")])
def test_grpc_logs_only_errors_unless_a_user_wants_more(monkeypatch, given, found):
    monkeypatch.setattr(os, "environ", {} if given is None else {"GRPC_VERBOSITY": given})

    prepare_local_ray()

    assert os.environ["GRPC_VERBOSITY"] == found


def test_every_variable_that_is_read_is_documented():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]
    files = [path for name in packages for path in (ROOT / name.replace(".", "/")).glob("*.py")]
    reads = re.compile(r"""(?:environ(?:\.get\(|\[)|getenv\()"(\w+)\"""")
    read = {name for path in files for name in reads.findall(path.read_text(encoding="utf-8"))}

    assert read == set(ENVIRONMENT)
