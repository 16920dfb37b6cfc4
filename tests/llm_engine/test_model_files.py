"""One door for Hugging Face folders and GGUF files."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from llm_engine import gguf_folder
from llm_engine.checkpoint import fingerprint
from llm_engine.errors import CheckpointCorrupt, CheckpointMissing
from llm_engine.gguf_file import read_gguf_header
from llm_engine.load_engine import load_engine
from llm_engine.model_files import find_gguf, model_name, open_model
from llm_engine.weights import load_weights
from tests.support.checkpoints import write_checkpoint
from tests.support.gguf_files import write_gguf


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEWIRE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    path = tmp_path / "model" / "tiny.Q8_0.gguf"
    write_gguf(path)
    shutil.rmtree(path.parent / "unquantized")
    (path.parent / "config.json").write_text('{"model_type": "llama"}')  # as some publish it
    (path.parent / "README.md").write_text("")

    assert find_gguf(path.parent) == find_gguf(path) == path
    assert open_model(path.parent) == open_model(path)


def test_published_weights_are_preferred(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    write_checkpoint(tmp_path)

    assert find_gguf(tmp_path) is None
    assert open_model(tmp_path).config.vocab_size == 211
    assert open_model(tmp_path).folder == tmp_path


def test_several_gguf_files_are_not_guessed_from(tmp_path: Path) -> None:
    for name in ("b.Q4_K_M.gguf", "a.Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")

    words = r"holds 2 GGUF files \(a.Q8_0.gguf, b.Q4_K_M.gguf\); name one"
    with pytest.raises(CheckpointMissing, match=words):
        open_model(tmp_path)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(100))

    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors: not a GGUF file"):
        open_model(tmp_path / "model.safetensors")


def test_a_model_is_called_as_its_folder_or_file() -> None:
    assert model_name(Path("/models/llama-3-8b")) == "llama-3-8b"
    assert model_name(Path("/models/Tiny.Q4_K_M.gguf")) == "Tiny.Q4_K_M"


def identity(path: Path) -> str:
    files = open_model(path)
    return fingerprint(files.config, files.tensors)


def test_the_fingerprint_depends_on_the_weights_and_not_on_the_place(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    whole = identity(path)
    shutil.copy(path, tmp_path / "copy.gguf")
    same = identity(tmp_path / "copy.gguf")
    for tensor in read_gguf_header(path).tensors.values():
        with path.open("r+b") as file:
            file.seek((tensor.begin + tensor.end) // 2)
            [byte] = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        assert identity(path) != whole
        shutil.copy(tmp_path / "copy.gguf", path)

    assert same == identity(path) == whole


def test_the_text_side_is_written_once_for_each_header(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "model.gguf")
    folder = open_model(tmp_path / "model.gguf").folder
    written_at = (folder / "tokenizer.json").stat().st_mtime_ns
    shutil.copy(tmp_path / "model.gguf", tmp_path / "copy.gguf")

    assert open_model(tmp_path / "copy.gguf").folder == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == written_at
    assert list(cache_dir.iterdir()) == [folder]
    write_gguf(tmp_path / "other.gguf", metadata={"tokenizer.chat_template": "{{ 1 }}"})
    assert open_model(tmp_path / "other.gguf").folder != folder
    # Another version of the code writes a folder of its own.
    monkeypatch.setattr(gguf_folder, "_writers_digest", lambda: b"newer")
    assert open_model(tmp_path / "model.gguf").folder != folder


def test_a_damaged_folder_of_the_cache_is_noticed(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    folder = open_model(tmp_path / "model.gguf").folder
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(json.loads(config) | {"rms_norm_eps": 0.5}))

    assert open_model(tmp_path / "model.gguf").folder == folder
    assert (folder / "config.json").read_text() == config


def test_loading_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "model.gguf", type_name="Q4_1")
    header = read_gguf_header(tmp_path / "model.gguf")
    monkeypatch.setattr("llm_engine.load_progress.REPORT_PERIOD_S", 0.0)
    reports: list[tuple[int, int]] = []

    load_engine(
        tmp_path / "model.gguf",
        page_size=16,
        num_pages=2,
        device="cpu",
        report_loaded=lambda done, total: reports.append((done, total)),
    )

    total = sum(each.end - each.begin for each in header.tensors.values())
    assert len(reports) == len(header.tensors)
    assert reports == sorted(reports)
    assert reports[-1] == (total, total)


def test_a_file_that_shrinks_between_header_and_weights_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    files = open_model(path)
    with path.open("r+b") as file:
        file.truncate(max(each.end for each in files.tensors.values()) - 1)

    with pytest.raises(CheckpointCorrupt, match="cut off while it was read"):
        load_weights(
            files.config,
            files.tensors,
            device=torch.device("cpu"),
            dtype=torch.float32,
            on_loaded=lambda num_bytes: None,
        )
