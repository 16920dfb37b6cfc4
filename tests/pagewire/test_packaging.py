import os
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_package_is_installed():
    found = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for top in ROOT.iterdir()
        if (top / "__init__.py").exists() and top.name != "tests"
        for path in top.rglob("__init__.py")
    }

    assert sorted(found) == sorted(SETUPTOOLS["packages"])


def test_an_editable_installation_is_a_path_entry():
    # setuptools makes one only of packages that lie as they do below the folder named here.
    assert SETUPTOOLS["package-dir"] == {"": "."}


@pytest.mark.parametrize(
    ("extra", "target"),
    [("", "-c constraints.txt torch -e .\n"), ("cuda12", "torch -e .[cuda12]\n")],
)
def test_make_installs_the_extra_and_keeps_to_the_tested_versions_where_it_can(
    tmp_path, extra, target
):
    command = ["make", "-n", "demo", f"VENV={tmp_path}", f"EXTRA={extra}"]

    # Without the settings of a make that runs this test.
    environment = {"PATH": os.environ["PATH"]}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=20
    )

    lines = [each for each in result.stdout.splitlines(True) if "pip install" in each]
    line, trained = lines
    assert line.replace('"', "").endswith(target)
    assert "--no-deps" in trained
    assert ("constraints.txt" in line) == (extra != "cuda12")
