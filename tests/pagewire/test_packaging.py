import os
import re
import subprocess

import pytest

from tests.support.distributions import CLIENT, PACKAGES, ROOT, SERVER


def test_every_package_is_installed():
    found = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for top in ROOT.iterdir()
        if (top / "__init__.py").exists() and top.name != "tests"
        for path in top.rglob("__init__.py")
    }

    assert sorted(found) == sorted(PACKAGES)


def test_an_editable_installation_is_a_path_entry():
    # setuptools makes one only of packages that lie as they do below the folder named here.
    assert CLIENT["tool"]["setuptools"]["package-dir"] == {"": "."}
    assert SERVER["tool"]["setuptools"]["package-dir"] == {"": ".."}


def test_client_and_server_go_together():
    version = CLIENT["project"]["version"]
    extras = CLIENT["project"]["optional-dependencies"]

    assert SERVER["project"]["version"] == version
    assert f"pagewire=={version}" in SERVER["project"]["dependencies"]
    assert extras["router"] == [f"pagewire-server=={version}"]
    assert extras["server"] == [f"pagewire-server[engine]=={version}"]
    for name in ("cuda", "cuda12"):
        assert "pagewire-server[engine]" in SERVER["project"]["optional-dependencies"][name]
        assert extras[name] == [f"pagewire-server[{name}]=={version}"]


def test_client_and_server_want_the_same_versions_of_what_both_import():
    client, server = (
        {re.match(r"[\w-]+", each)[0]: each for each in project["project"]["dependencies"]}
        for project in (CLIENT, SERVER)
    )

    assert client.keys() & server.keys() >= {"grpcio", "protobuf"}
    for name in client.keys() & server.keys():
        assert client[name] == server[name]


@pytest.mark.parametrize(
    ("extra", "target"),
    [
        ("", "-c constraints.txt torch -e . -e ./server[engine]\n"),
        ("cuda12", "torch -e . -e ./server[cuda12]\n"),
    ],
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

    # Not the line of the warning, which says what to run.
    line, trained = (
        each for each in result.stdout.splitlines(True) if "pip install --progress-bar" in each
    )
    assert line.replace('"', "").endswith(target)
    assert "--no-deps" in trained
    assert ("constraints.txt" in line) == (extra != "cuda12")
