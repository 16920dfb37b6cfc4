"""The safetensors files of a checkpoint folder: which tensors exist, where, and whether they fit.

This module reads only headers, without torch, so that a folder that cannot be served is refused
before anything expensive happens. It never opens pickled weights.
"""

import hashlib
import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from llm_engine.config_fields import read_json
from llm_engine.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    CheckpointMissing,
    UnsupportedModel,
)
from llm_engine.model_config import ModelConfig

WEIGHT_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
MAX_HEADER_BYTES = 100_000_000  # the limit of the format itself
MAX_DIMENSIONS = 8  # no message could show the product of thousands
SAMPLE_BYTES = 256  # of each tensor, for the fingerprint
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
# Recomputed from the configuration; old checkpoints carry it.
IGNORED_SUFFIX = "rotary_emb.inv_freq"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor in a file's header."""

    path: Path
    dtype: str  # name in safetensors: "F32", "BF16", ...
    shape: tuple[int, ...]
    begin: int  # byte offsets in the file
    end: int


Tensors = Mapping[str, TensorEntry]  # tensor name |-> entry


def read_checkpoint(model_dir: Path, config: ModelConfig) -> Tensors:
    """Return all tensors of the model, with the shapes that it requires.

    Raises:
        CheckpointMissing: If a file or a tensor is missing.
        CheckpointCorrupt: If a file is truncated or not in the format.
        CheckpointMismatch: If a shape, a type or the set of tensors contradicts config.json.
        UnsupportedModel: If there is an adapter beside the weights.
    """
    adapter = model_dir / "adapter_config.json"
    if adapter.exists():  # transformers would apply it
        raise UnsupportedModel(f"{adapter}: must be absent: merge the adapter into the weights")
    expected = expected_shapes(config)
    found = _find_tensors(model_dir)
    if OUTPUT in found:  # it is used even if config.json calls it tied to the embedding
        expected[OUTPUT] = expected[EMBEDDING]
    for name, shape in expected.items():
        entry = found.get(name)
        if entry is None:
            raise CheckpointMissing(
                f"{model_dir}: tensor {name} {list(shape)} is in none of its safetensors files"
            )
        if entry.shape != shape:
            raise CheckpointMismatch(
                f"{entry.path}: tensor {name} has shape {list(entry.shape)}, "
                f"config.json requires {list(shape)}"
            )
        if entry.dtype not in WEIGHT_DTYPE_BYTES:
            raise CheckpointMismatch(
                f"{entry.path}: tensor {name} has type {entry.dtype}, "
                f"must be one of {', '.join(WEIGHT_DTYPE_BYTES)}"
            )
    for name in sorted(found.keys() - expected.keys()):
        if not name.endswith(IGNORED_SUFFIX):
            raise CheckpointMismatch(
                f"{found[name].path}: tensor {name} has no place in a {config.family} model "
                "with this config.json"
            )
    return {name: found[name] for name in expected}


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of a model, in the order of computation."""
    hidden, inner = config.hidden_size, config.intermediate_size
    qo_size = config.num_qo_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}

    def linear(name: str, num_out: int, num_in: int, has_bias: bool) -> None:
        shapes[f"{name}.weight"] = (num_out, num_in)
        if has_bias:
            shapes[f"{name}.bias"] = (num_out,)

    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        linear(f"{prefix}.self_attn.q_proj", qo_size, hidden, config.has_qkv_bias)
        linear(f"{prefix}.self_attn.k_proj", kv_size, hidden, config.has_qkv_bias)
        linear(f"{prefix}.self_attn.v_proj", kv_size, hidden, config.has_qkv_bias)
        if config.has_qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
        linear(f"{prefix}.self_attn.o_proj", hidden, qo_size, config.has_output_bias)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        linear(f"{prefix}.mlp.gate_proj", inner, hidden, config.has_mlp_bias)
        linear(f"{prefix}.mlp.up_proj", inner, hidden, config.has_mlp_bias)
        linear(f"{prefix}.mlp.down_proj", hidden, inner, config.has_mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config.has_tied_embeddings:
        shapes[OUTPUT] = (config.vocab_size, hidden)
    return shapes


def fingerprint(config: ModelConfig, tensors: Tensors) -> str:
    """Return an identity of configuration and weights, 32 hex digits, without reading all of them.

    It covers every tensor's name, type and shape and a sample of its bytes, so that two trainings
    of one architecture differ. File names and their order do not matter.
    """
    identity = hashlib.blake2b(digest_size=16)
    settings: dict[str, Any] = asdict(config) | {"rope_type": type(config.rope).__name__}
    identity.update(json.dumps(settings, sort_keys=True).encode())
    for name, entry in sorted(tensors.items()):
        identity.update(f"\n{name} {entry.dtype} {entry.shape} ".encode())
        middle = max(entry.begin, (entry.begin + entry.end - SAMPLE_BYTES) // 2)
        with entry.path.open("rb") as file:
            file.seek(middle)
            identity.update(file.read(min(SAMPLE_BYTES, entry.end - middle)))
    return identity.hexdigest()


def _find_tensors(model_dir: Path) -> dict[str, TensorEntry]:
    index_path = model_dir / "model.safetensors.index.json"
    # If both exist, the single file wins, as in transformers.
    if (model_dir / "model.safetensors").exists() or not index_path.exists():
        return _read_header(_single_file(model_dir))
    index = read_json(index_path).nested("weight_map")
    shard_of = {name: index.string(name) for name in index.names()}
    if not shard_of:
        raise CheckpointCorrupt(f"{index_path}: weight_map is empty")
    headers: dict[str, dict[str, TensorEntry]] = {}
    shards = sorted(set(shard_of.values()))
    for shard in shards:
        if Path(shard).name != shard:
            raise CheckpointCorrupt(f"{index_path}: shard {shard!r} is not a plain file name")
        if not os.path.exists(model_dir / shard):  # False also for a name that no file can have
            raise CheckpointMissing(
                f"{model_dir / shard}: no such file; {index_path.name} lists {len(shards)} shards, "
                "and all must be in the folder"
            )
        headers[shard] = _read_header(model_dir / shard)
    found = {}
    for name, shard in shard_of.items():
        if name not in headers[shard]:
            raise CheckpointMissing(
                f"{model_dir / shard}: tensor {name} is not there, though {index_path.name} says so"
            )
        found[name] = headers[shard][name]
    return found


def _single_file(model_dir: Path) -> Path:
    path = model_dir / "model.safetensors"
    if path.exists():
        return path
    names = sorted(each.name for each in model_dir.glob("*"))
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        found = f"found {', '.join(others)} without an index"
    elif pickled:
        found = f"found only {', '.join(pickled)}: pickled weights can run code and are refused"
    else:
        found = "found neither"
    raise CheckpointMissing(
        f"{model_dir}: needs model.safetensors or model.safetensors.index.json with its shards; "
        f"{found}"
    )


def _read_header(path: Path) -> dict[str, TensorEntry]:
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, file_bytes - 8):
                raise CheckpointCorrupt(
                    f"{path}: cut off or not safetensors: "
                    f"{file_bytes} bytes with a header of {header_bytes}"
                )
            # All its numbers are integers; int() refuses how others are written.
            header = json.loads(file.read(header_bytes), parse_float=int, parse_constant=int)
            data_begin = 8 + header_bytes
            entries = {
                name: _entry(path, value, data_begin)
                for name, value in header.items()
                if name != "__metadata__"
            }
    except OSError as error:
        raise CheckpointCorrupt(f"{path}: cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path}: not a safetensors header: {error!r}") from error
    for name, entry in entries.items():
        if entry.begin < data_begin or entry.end > file_bytes:
            raise CheckpointCorrupt(
                f"{path}: cut off or damaged: tensor {name} lies from byte {entry.begin} to "
                f"{entry.end}, the file has data from {data_begin} to {file_bytes}"
            )
        element_bytes = WEIGHT_DTYPE_BYTES.get(entry.dtype)
        if element_bytes and entry.end - entry.begin != element_bytes * prod(entry.shape):
            raise CheckpointCorrupt(
                f"{path}: tensor {name} has {entry.end - entry.begin} bytes, "
                f"{entry.dtype} {list(entry.shape)} needs {element_bytes * prod(entry.shape)}"
            )
    return entries


def _entry(path: Path, value: Any, data_begin: int) -> TensorEntry:
    begin, end = _integers(value["data_offsets"])[:2]
    return TensorEntry(
        path=path,
        dtype=str(value["dtype"]),
        shape=_integers(value["shape"]),
        begin=data_begin + begin,
        end=data_begin + end,
    )


def _integers(values: object) -> tuple[int, ...]:
    """Return the sizes or offsets of a tensor; TypeError: they are no short list of integers."""
    if (
        not isinstance(values, list)
        or len(values) > MAX_DIMENSIONS
        or not all(type(each) is int and abs(each) < 2**63 for each in values)
    ):
        allowed = f"a list of up to {MAX_DIMENSIONS} integers of 64 bits"
        raise TypeError(f"found {reprlib.repr(values)}; allowed: {allowed}")
    return tuple(values)
