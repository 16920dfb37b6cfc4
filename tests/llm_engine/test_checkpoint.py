"""A folder that cannot be served is refused: file, tensor, what was found, what is needed."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from attn_kernels.sampling.launch import TokenSampler
from llm_engine.checkpoint import fingerprint, read_checkpoint
from llm_engine.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    CheckpointMissing,
    EngineError,
    UnsupportedModel,
)
from llm_engine.kernel_shapes import check_kernel_shapes
from llm_engine.load_engine import load_engine
from llm_engine.model_config import read_model_config
from tests.support.checkpoints import edit_json, write_checkpoint
from tests.support.wall_clock import assert_within

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
    assert_within(time.perf_counter() - began, 1)
    for word in words:
        assert word in str(raised.value)


def test_good_folders_load(folder: Path) -> None:
    for name in ("single", "sharded", "tied"):
        load(folder / name)


def test_missing_shard(folder: Path) -> None:
    shard = sorted((folder / "sharded").glob("*.safetensors"))[1]
    shard.unlink()

    assert_refused(folder / "sharded", CheckpointMissing, shard.name, "no such file", "shards")


@pytest.mark.parametrize("name", ["x" * 256, "\ud83d", "\0"], ids=["long", "half", "NUL"])
def test_a_shard_with_a_name_that_no_file_can_have(folder: Path, name: str) -> None:
    path = folder / "sharded" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][Q_PROJ] = name
    path.write_text(json.dumps(index))

    assert_refused(folder / "sharded", CheckpointMissing, path.name, "no such file")


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


def test_old_rotary_tensors_are_ignored(folder: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    edit_tensors(folder / "tied" / "model.safetensors", lambda tensors: tensors.update(extra))

    load(folder / "tied")


def test_a_tied_output_of_another_shape_is_refused(folder: Path) -> None:
    extra = {"lm_head.weight": torch.zeros(48, 211)}
    edit_tensors(folder / "tied" / "model.safetensors", lambda tensors: tensors.update(extra))

    assert_refused(folder / "tied", CheckpointMismatch, "lm_head.weight", "[48, 211]", "[211, 48]")


@pytest.mark.parametrize("kept_bytes", [0, 5, 100, 5000, -1])
def test_truncated_safetensors(folder: Path, kept_bytes: int) -> None:
    path = folder / "single" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])

    assert_refused(folder / "single", CheckpointCorrupt, "model.safetensors", "cut off")


@pytest.mark.parametrize("begin", [-4, -(10**6)])
def test_a_tensor_that_begins_before_the_data(folder: Path, begin: int) -> None:
    path = folder / "single" / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    first, last = header[Q_PROJ]["data_offsets"]
    header[Q_PROJ]["data_offsets"] = [begin, begin + last - first]
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])

    assert_refused(folder / "single", CheckpointCorrupt, "model.safetensors", f"tensor {Q_PROJ}")


@pytest.mark.parametrize(
    "shape",
    [[10**40] * 200, "9" * 5000, [2**63], [True]],
    ids=["long", "text", "large", "truth"],
)
def test_a_shape_that_no_tensor_has(folder: Path, shape: object) -> None:
    path = folder / "single" / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header[Q_PROJ]["shape"] = shape
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])

    words = ("not a safetensors header", "allowed: a list of up to 8 integers")
    assert_refused(folder / "single", CheckpointCorrupt, path.name, *words)


def test_a_header_that_is_not_one(folder: Path) -> None:
    path = folder / "single" / "model.safetensors"
    infinite = b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 0]}}'
    no_list = b'{"a": {"dtype": "F32", "shape": 7}}'
    for header in (b"[]", b"{]", b'{"a": 3}', no_list, infinite, b"\xff\xfe"):
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
        ("intermediate_size", 84, "multiples of 8"),
        ("hidden_size", 0, "from 1 to"),
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
        ({"rope_type": "factors", "factors": [1.0, "2"]}, ["factors", "numbers above 0"]),
    ],
)
def test_rotary_scaling_that_is_not_implemented(
    folder: Path, rope: dict[str, object], words: list[str]
) -> None:
    edit_json(folder / "single" / "config.json", rope_parameters="-", rope_scaling=rope)

    assert_refused(folder / "single", UnsupportedModel, "rope_scaling", *words)


@pytest.mark.parametrize(
    "field",
    [
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "vocab_size",
    ],
)
@pytest.mark.parametrize("value", [10**9 + 10**10, 10**400, -(10**400)])
def test_sizes_are_bounded_before_anything_is_made_of_them(
    folder: Path, field: str, value: int
) -> None:
    edit_json(folder / "single" / "config.json", **{field: value})

    assert_refused(folder / "single", UnsupportedModel, "config.json", field, "an integer from")


def test_numbers_of_layers_that_would_take_for_ever_are_refused_at_once(folder: Path) -> None:
    edit_json(folder / "single" / "config.json", num_hidden_layers=10**9)

    assert_refused(folder / "single", UnsupportedModel, "num_hidden_layers", "1 to 4096")


@pytest.mark.parametrize("value", [10**400, 1e300, 1e-300, float("inf"), float("nan"), True, "1"])
@pytest.mark.parametrize("field", ["factor", "beta_fast", "beta_slow"])
def test_a_number_that_is_none_or_too_large_is_refused(
    folder: Path, field: str, value: object
) -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    edit_json(folder / "single" / "config.json", rope_parameters=yarn | {field: value})

    assert_refused(folder / "single", UnsupportedModel, field, "a number above 0, 1e-30 to 1e+30")


@pytest.mark.parametrize("number", [1e-30, 1e30])
@pytest.mark.parametrize("field", ["factor", "beta_fast", "beta_slow", "rope_theta"])
def test_numbers_at_their_bounds_make_declared_errors(
    folder: Path, field: str, number: float
) -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    edit_json(folder / "single" / "config.json", rope_parameters=yarn | {field: number})

    with contextlib.suppress(EngineError):
        load(folder / "single")


def test_a_context_too_short_for_any_answer_is_refused(folder: Path) -> None:
    edit_json(folder / "single" / "config.json", max_position_embeddings=2)
    assert_refused(folder / "single", UnsupportedModel, "max_position_embeddings", "from 3 to")

    edit_json(folder / "single" / "config.json", max_position_embeddings=3)
    load(folder / "single")


@pytest.mark.parametrize("opening", ["[", '{"a": '])
def test_json_of_great_depth_is_refused(folder: Path, opening: str) -> None:
    deep = opening * 100_000
    (folder / "single" / "config.json").write_text(f'{{"architectures": {deep}')
    (folder / "sharded" / "model.safetensors.index.json").write_text(f'{{"weight_map": {deep}')
    header = deep.encode()
    (folder / "tied" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)

    for name, file in (
        ("single", "config.json"),
        ("sharded", "model.safetensors.index.json"),
        ("tied", "model.safetensors"),
    ):
        assert_refused(folder / name, CheckpointCorrupt, file)


def test_an_integer_of_more_digits_than_python_reads_is_refused(folder: Path) -> None:
    path = folder / "single" / "config.json"
    path.write_text(path.read_text().replace("512", "1" * 5000))

    assert_refused(folder / "single", CheckpointCorrupt, "config.json", "not valid JSON")


def test_a_found_value_of_any_size_makes_a_short_error(folder: Path) -> None:
    edit_json(folder / "single" / "config.json", architectures=["x" * 10**4] * 100)

    with pytest.raises(UnsupportedModel) as raised:
        load(folder / "single")
    assert len(str(raised.value)) < 5000


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"head_dim": 24}, ["head_dim is 24", "a multiple of 16 up to 256"]),
        ("qwen3", {"head_dim": 272}, ["head_dim is 272", "a multiple of 16 up to 256"]),
        (
            "qwen2",
            {"head_dim": 16, "num_attention_heads": 17, "num_key_value_heads": 1},
            ["num_attention_heads is 17", "1 to 16 times num_key_value_heads (1)"],
        ),
    ],
)
def test_heads_without_a_kernel_are_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    family: str,
    changes: dict[str, int],
    words: list[str],
) -> None:
    write_checkpoint(tmp_path, family, num_hidden_layers=1, **changes)
    read = Mock(side_effect=CheckpointMissing)
    monkeypatch.setattr("llm_engine.load_engine.load_weights", read)

    with pytest.raises(UnsupportedModel) as raised:
        load_engine(tmp_path, page_size=16, num_pages=4, device="cpu", attention="triton")
    assert all(word in str(raised.value) for word in ["config.json", *words])
    read.assert_not_called()
    with pytest.raises(CheckpointMissing):  # torch's attention takes any heads
        load_engine(tmp_path, page_size=16, num_pages=4, device="cpu", attention="torch")


def test_a_vocabulary_without_a_kernel_is_refused_before_weights_are_read(folder: Path) -> None:
    source = folder / "single" / "config.json"
    config = replace(read_model_config(folder / "single"), head_dim=64)

    check_kernel_shapes(source, replace(config, vocab_size=2**20))  # which the sampler takes
    TokenSampler(vocab_size=2**20, max_rows=1, device="cpu")
    with pytest.raises(UnsupportedModel, match=rf"{source}: vocab_size is 1048577, must be at m"):
        check_kernel_shapes(source, replace(config, vocab_size=2**20 + 1))


LOADING = """
import sys, time
from pathlib import Path
from llm_engine import load_engine as module

class Loaded(Exception):
    pass

def load_weights(*_, **__):
    deadline = time.monotonic() + 60
    while not set(module.TRITON_MODULES) <= sys.modules.keys() and time.monotonic() < deadline:
        time.sleep(0.01)
    raise Loaded(set(module.TRITON_MODULES) <= sys.modules.keys())

before = set(module.TRITON_MODULES) & sys.modules.keys()
module.load_weights = load_weights
try:
    module.load_engine(
        Path(sys.argv[1]), page_size=16, num_pages=4, device="cpu", attention="triton"
    )
except Loaded as loaded:
    print(before, loaded)
"""


@pytest.mark.thorough
def test_triton_is_imported_while_the_weights_are_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", num_hidden_layers=1, head_dim=16)
    command = [sys.executable, "-c", LOADING, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)

    assert found.stdout == "set() True\n"


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


def test_a_factor_for_each_frequency(folder: Path) -> None:
    rope = {"rope_type": "factors", "factors": [1.0, 2.0, 4.0]}
    edit_json(folder / "single" / "config.json", rope_parameters=rope)

    assert_refused(folder / "single", UnsupportedModel, "factors is 'a list of 3'", "(4)")
