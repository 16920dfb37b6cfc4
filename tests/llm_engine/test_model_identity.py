import json
import shutil
from pathlib import Path

import pytest

from llm_engine.errors import CheckpointMissing
from llm_engine.model_identity import read_identity
from tests.support.checkpoints import write_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


def test_copies_are_one_model_wherever_they_lie(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere" / "tiny")
    (copy / "README.md").write_text("not of the model")

    assert read_identity(copy) == read_identity(model)
    assert read_identity(model).differences(read_identity(copy)) == ""


def retrained(model: Path) -> None:
    write_checkpoint(model, seed=1)


def configured(model: Path) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-6}))


def retokenized(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"version": "1.0"}')


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ([retrained], "another configuration or other weights"),
        ([configured], "another configuration or other weights"),
        ([retokenized], "another tokenizer.json"),
        (
            [retrained, retokenized],
            "another configuration or other weights and another tokenizer.json",
        ),
    ],
    ids=["weights", "configuration", "tokenizer", "all"],
)
def test_models_that_differ_are_told_apart(
    model: Path, tmp_path: Path, change: list, told: str
) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    for each in change:
        each(other)

    assert read_identity(model).differences(read_identity(other)) == told


def test_a_model_without_a_tokenizer_is_none(model: Path) -> None:
    (model / "tokenizer.json").unlink()

    with pytest.raises(CheckpointMissing, match=r"tokenizer.json: no such file; the tokenizer"):
        read_identity(model)
