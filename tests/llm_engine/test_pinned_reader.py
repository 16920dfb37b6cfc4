import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llm_engine import pinned_reader as module
from llm_engine import weights
from llm_engine.errors import CheckpointCorrupt
from llm_engine.model_files import ModelFiles, open_model
from llm_engine.pinned_reader import reading_pinned
from llm_engine.weights import DecoderWeights, load_weights
from tests.support.checkpoints import write_checkpoint

CPU = torch.device("cpu")
OFFSET = 6  # of the tensors in their file


@pytest.fixture
def source() -> torch.Tensor:
    return torch.arange(7 * 4 * 8, dtype=torch.int32).view(7, 4, 8).to(torch.bfloat16)


@pytest.fixture
def path(source: torch.Tensor, tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"header" + source.view(torch.uint8).numpy().tobytes())
    return path


@pytest.mark.parametrize("piece_bytes", [1, 64, 150, 2**20], ids="{} bytes".format)
@pytest.mark.parametrize("is_apart", [False, True], ids=["together", "apart"])
def test_a_tensor_is_filled_by_pieces_of_any_size(
    source: torch.Tensor,
    path: Path,
    piece_bytes: int,
    is_apart: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
    around = torch.zeros(7, 2, 4, 8, dtype=source.dtype)
    out = around[:, 1] if is_apart else around.view(14, 4, 8)[:7]

    with reading_pinned(CPU) as reader:
        for each in reader.fill(out, path, OFFSET):
            each.result()

    assert torch.equal(out, source)
    assert around.float().sum() == source.float().sum()  # nothing else was written


def test_a_file_that_ends_too_soon_is_an_error_of_its_pieces(
    source: torch.Tensor, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 64)
    path.write_bytes(path.read_bytes()[:-1])
    with reading_pinned(CPU) as reader:
        *pieces, last = reader.fill(torch.empty_like(source), path, OFFSET)
        with pytest.raises(EOFError, match="cut off while it was read"):
            last.result()
        assert [each.exception() for each in pieces] == [None] * 6


def test_a_file_that_is_gone_is_an_error(source: torch.Tensor, tmp_path: Path) -> None:
    with reading_pinned(CPU) as reader, pytest.raises(FileNotFoundError):
        reader.fill(torch.empty_like(source), tmp_path / "gone", 0)


def loaded(
    files: ModelFiles, on_loaded: Callable[[int], None] = lambda num: None
) -> DecoderWeights:
    return load_weights(
        files.config, files.tensors, device=CPU, dtype=torch.float32, on_loaded=on_loaded
    )


def all_tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple):
        return [each for one in value for each in all_tensors(one)]
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return [each for field in fields for each in all_tensors(getattr(value, field.name))]


def test_a_model_has_the_same_weights_as_from_mapped_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, "qwen2", max_shard_size="60KB")  # it has biases
    files = open_model(tmp_path)
    expected = all_tensors(loaded(files))
    monkeypatch.setattr(weights, "READER_DEVICES", ("cpu",))
    monkeypatch.setattr(weights, "safe_open", None)
    monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    done: list[int] = []

    found = all_tensors(loaded(files, done.append))

    assert len(found) == len(expected) > 10
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert sorted(done) == sorted(each.end - each.begin for each in files.tensors.values())


def test_a_file_that_shrinks_is_told_with_its_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "READER_DEVICES", ("cpu",))
    write_checkpoint(tmp_path, "llama")
    files = open_model(tmp_path)
    last = max(files.tensors, key=lambda name: files.tensors[name].end)
    with files.tensors[last].path.open("r+b") as file:
        file.truncate(files.tensors[last].end - 1)

    with pytest.raises(CheckpointCorrupt, match=f"tensor {last} cannot be read: cut off while"):
        loaded(files)
