"""A folder that cannot be served is refused: file, tensor, what was found, what is needed."""

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llm_engine.checkpoint import fingerprint, read_checkpoint
from llm_engine.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    CheckpointMissing,
    EngineError,
    UnsupportedModel,
)
from llm_engine.load_engine import load_engine
from llm_engine.model_config import read_model_config
from tests.support.checkpoints import write_checkpoint

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    write_checkpoint(folder / "single", "llama")
    write_checkpoint(folder / "sharded", "llama", max_shard_size="60KB")
    write_checkpoint(folder / "tied", "qwen2", tie_word_embeddings=True)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the three checkpoints that the test may damage."""
    shutil.copytree(pristine, tmp_path, dirs_exist_ok=True)
    return tmp_path


def edit_json(path: Path, **changes: object) -> None:
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value != "-"}))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def load(path: Path) -> None:
    load_engine(path, page_size=8, num_pages=4, device="cpu")


def assert_refused(path: Path, error: type[EngineError], *words: str) -> None:
    """Check the error and its words, and that it takes less than the promised second."""
    began = time.perf_counter()
    with pytest.raises(error) as raised:
        load(path)
    assert time.perf_counter() - began < 1
    for word in words:
        assert word in str(raised.value)


def test_good_folders_load(folder: Path) -> None:
    for name in ("single", "sharded", "tied"):
        load(folder / name)


def test_missing_shard(folder: Path) -> None:
    shard = sorted((folder / "sharded").glob("*.safetensors"))[1]
    shard.unlink()

    assert_refused(folder / "sharded", CheckpointMissing, shard.name, "no such file", "shards")


def test_tensor_missing_in_its_shard(folder: Path) -> None:
    index = json.loads((folder / "sharded" / "model.safetensors.index.json").read_text())
    shard = index["weight_map"][Q_PROJ]
    edit_tensors(folder / "sharded" / shard, lambda tensors: tensors.pop(Q_PROJ))

    assert_refused(folder / "sharded", CheckpointMissing, shard, Q_PROJ)


def test_tensor_missing_everywhere(folder: Path) -> None:
    path = folder / "single" / "model.safetensors"
    edit_tensors(path, lambda tensors: tensors.pop("lm_head.weight"))

    assert_refused(folder / "single", CheckpointMissing, "lm_head.weight", "[211, 48]")


def test_wrong_shape(folder: Path) -> None:
    path = folder / "single" / "model.safetensors"
    edit_tensors(path, lambda tensors: tensors.update({Q_PROJ: torch.zeros(48, 44)}))

    assert_refused(
        folder / "single", CheckpointMismatch, "model.safetensors", Q_PROJ, "[48, 44]", "[48, 48]"
    )


def test_wrong_type(folder: Path) -> None:
    path = folder / "single" / "model.safetensors"
    quantized = torch.zeros(48, 48, dtype=torch.int8)
    edit_tensors(path, lambda tensors: tensors.update({Q_PROJ: quantized}))

    assert_refused(folder / "single", CheckpointMismatch, Q_PROJ, "I8", "F32, F16, BF16")


def test_a_tensor_without_a_place(folder: Path) -> None:
    path = folder / "single" / "model.safetensors"
    bias = {Q_PROJ.replace("weight", "bias"): torch.zeros(48)}
    edit_tensors(path, lambda tensors: tensors.update(bias))

    assert_refused(folder / "single", CheckpointMismatch, "q_proj.bias", "no place")


def test_a_tied_output_and_old_rotary_tensors_are_ignored(folder: Path) -> None:
    extra = {
        "lm_head.weight": torch.zeros(211, 48),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    edit_tensors(folder / "tied" / "model.safetensors", lambda tensors: tensors.update(extra))

    load(folder / "tied")


@pytest.mark.parametrize("kept_bytes", [0, 5, 100, 5000, -1])
def test_truncated_safetensors(folder: Path, kept_bytes: int) -> None:
    path = folder / "single" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])

    assert_refused(folder / "single", CheckpointCorrupt, "model.safetensors", "cut off")


def test_a_header_that_is_not_one(folder: Path) -> None:
    path = folder / "single" / "model.safetensors"
    for header in (b"[]", b"{]", b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": 7}}', b"\xff\xfe"):
        path.write_bytes(len(header).to_bytes(8, "little") + header)

        assert_refused(folder / "single", CheckpointCorrupt, "model.safetensors", "header")


def test_pickled_weights_are_refused_unopened(folder: Path) -> None:
    (folder / "single" / "model.safetensors").unlink()
    (folder / "single" / "pytorch_model.bin").write_bytes(b"never read")

    assert_refused(folder / "single", CheckpointMissing, "pytorch_model.bin", "pickled", "refused")


def test_no_weights_or_shards_without_an_index(folder: Path) -> None:
    (folder / "single" / "model.safetensors").unlink()
    (folder / "sharded" / "model.safetensors.index.json").unlink()

    assert_refused(folder / "single", CheckpointMissing, "model.safetensors", "neither")
    assert_refused(folder / "sharded", CheckpointMissing, "without an index")


def test_a_shard_outside_the_folder(folder: Path) -> None:
    index_path = folder / "sharded" / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"][Q_PROJ] = "../single/model.safetensors"
    index_path.write_text(json.dumps(index))

    assert_refused(folder / "sharded", CheckpointCorrupt, "../single", "plain file name")


def test_missing_and_corrupt_config(folder: Path) -> None:
    (folder / "tied" / "config.json").unlink()
    (folder / "single" / "config.json").write_text('{"architectures": [')
    (folder / "sharded" / "config.json").write_text("[1, 2]")

    assert_refused(folder / "tied", CheckpointMissing, "config.json", "no such file")
    assert_refused(folder / "single", CheckpointCorrupt, "config.json", "not valid JSON")
    assert_refused(folder / "sharded", CheckpointCorrupt, "config.json", "list")
    assert_refused(folder / "nowhere", CheckpointMissing, "config.json")


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("architectures", ["MixtralForCausalLM"], "LlamaForCausalLM"),
        ("architectures", "-", "LlamaForCausalLM"),
        ("num_key_value_heads", 4, "a divisor of num_attention_heads (6)"),
        ("hidden_size", 0, "at least 1"),
        ("hidden_size", "48", "an integer"),
        ("hidden_size", "-", "required field"),
        ("head_dim", 7, "even"),
        ("rms_norm_eps", -1.0, "above 0"),
        ("hidden_act", "gelu", "silu"),
        ("dtype", "float8_e4m3fn", "bfloat16"),
        ("quantization_config", {"bits": 4}, "no quantized weights"),
        ("eos_token_id", [1, 300], "within 0..210"),
        ("attention_bias", "yes", "true or false"),
    ],
)
def test_a_field_that_cannot_be_served(
    folder: Path, field: str, value: object, allowed: str
) -> None:
    (folder / "single" / "generation_config.json").unlink()
    edit_json(folder / "single" / "config.json", **{field: value})

    assert_refused(folder / "single", UnsupportedModel, "config.json", field, allowed)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, ["rope_type", "dynamic", "llama3"]),
        ({"rope_type": "linear"}, ["factor", "missing"]),
        ({"rope_type": "linear", "factor": "two"}, ["factor", "a number"]),
        (
            {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1},
            ["high_freq_factor", "above low_freq_factor"],
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"full_attention": {"rope_type": "default"}}, ["full_attention"]),
    ],
)
def test_rotary_scaling_that_is_not_implemented(
    folder: Path, rope: dict[str, object], words: list[str]
) -> None:
    edit_json(folder / "single" / "config.json", rope_parameters="-", rope_scaling=rope)

    assert_refused(folder / "single", UnsupportedModel, "rope_scaling", *words)


def test_a_window_on_some_layers_only_is_refused(folder: Path) -> None:
    edit_json(
        folder / "tied" / "config.json",
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=1,
        layer_types="-",
    )

    assert_refused(folder / "tied", UnsupportedModel, "layer_types", "the same for all layers")


def test_the_old_spelling_of_config_json_means_the_same(folder: Path) -> None:
    path = folder / "single" / "config.json"
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    edit_json(path, rope_parameters=rope, dtype="bfloat16")
    new = read_model_config(folder / "single")
    edit_json(
        path,
        rope_parameters="-",
        rope_scaling={"type": "linear", "factor": 2.0},
        rope_theta=5e5,
        dtype="-",
        torch_dtype="bfloat16",
    )

    assert read_model_config(folder / "single") == new


def test_end_tokens_come_from_generation_config_first(folder: Path) -> None:
    path = folder / "single" / "generation_config.json"
    found = []
    for value in ([7, 9], 5, "-"):
        edit_json(path, eos_token_id=value)
        found.append(read_model_config(folder / "single").eos_token_ids)
    path.unlink()
    found.append(read_model_config(folder / "single").eos_token_ids)

    assert found == [(7, 9), (5,), (2,), (2,)]


def test_fingerprints_tell_weights_and_settings_apart_but_not_files(
    folder: Path, tmp_path: Path
) -> None:
    def identity(path: Path) -> str:
        config = read_model_config(path)
        return fingerprint(config, read_checkpoint(path, config))

    write_checkpoint(folder / "retrained", "llama", seed=1)
    whole = identity(folder / "single")
    edit_json(folder / "sharded" / "config.json", transformers_version="9.9")

    assert re.fullmatch("[0-9a-f]{32}", whole)
    assert identity(folder / "sharded") == whole
    assert identity(folder / "retrained") != whole
    edit_json(folder / "sharded" / "config.json", rms_norm_eps=1e-4)
    assert identity(folder / "sharded") != whole
