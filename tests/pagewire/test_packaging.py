import tomllib
from pathlib import Path

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
