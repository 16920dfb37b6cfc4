"""Small GGUF files, written by the `gguf` package from the models of tests/support/checkpoints.py.

Names and the order of rows are those of llama.cpp's conversion, spelled out here once more. What
quantization loses, the model that is returned has lost too: its weights are those of the file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.support.checkpoints import write_checkpoint

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Rows are whole blocks of 32, and the vocabulary holds tokenizer_keys
NARROW = {"vocab_size": 272, "hidden_size": 96, "intermediate_size": 64}
# Rows are whole blocks of 256
WIDE = {
    "vocab_size": 272,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
# Where a block has float16 numbers, and the largest product of the integers that they scale
_HALVES = {
    "Q2_K": ((80, 82), 15 * 3),
    "Q3_K": ((108,), 32 * 4),
    "Q4_K": ((0, 2), 63 * 15),
    "Q5_K": ((0, 2), 63 * 31),
    "Q6_K": ((208,), 128 * 32),
}


def write_gguf(
    path: Path,
    family: str = "llama",
    *,
    type_name: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    **changes: Any,
) -> PreTrainedModel:
    """Write a file beside a checkpoint's folder and return the model, with the file's weights.

    Args:
        path: Of the file; its folder is made if it does not exist.
        family: A key of tests.support.checkpoints.CLASSES.
        type_name: Of all matrices, as ggml calls it.
        metadata: Keys that are added or changed; None as a value leaves one out.
        tensors: float32 tensors by name that are added or changed; None leaves one out.
        changes: Fields of config.json, as for write_checkpoint.
    """
    model = write_checkpoint(path.parent / "unquantized", family, **(NARROW | changes))
    config = model.config
    architecture = "llama" if family == "mistral" else family
    names = gguf.get_tensor_name_map(
        {each: key for key, each in gguf.MODEL_ARCH_NAMES.items()}[architecture],
        config.num_hidden_layers,
    )
    arrays: dict[str, tuple[np.ndarray, str]] = {}
    source = np.random.default_rng(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a tied output is not among them
            gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert gguf_name, name
            heads = _interleaved_heads(name, config) if architecture == "llama" else 0
            stored = interleave(parameter.float().numpy(), heads)
            raw, kind = stored, "F32"
            if stored.ndim == 2:
                raw, kind = _quantize(stored, type_name, source), type_name
                weights = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
                parameter.copy_(torch.from_numpy(separate(weights.copy(), heads)))
            arrays[gguf_name] = (raw, kind)
    for name, array in (tensors or {}).items():
        arrays.pop(name, None)
        if array is not None:
            arrays[name] = (np.asarray(array, np.float32), "F32")
    keys = (
        model_keys(config, architecture) | tokenizer_keys(config.vocab_size) | dict(metadata or {})
    )
    write_file(path, architecture, keys, arrays)
    return model


def model_keys(config: Any, architecture: str) -> dict[str, Any]:
    """Return the metadata that the conversion writes of config.json."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if architecture == "llama":
        keys |= {"rope.dimension_count": head_dim, "vocab_size": config.vocab_size}
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def tokenizer_keys(vocab_size: int) -> dict[str, Any]:
    """Return a byte-level vocabulary with a token for each row of the embedding."""
    words = ["\u0120t", "he", "\u0120the"]
    tokens = ["<s>", "</s>", *sorted(bytes_to_unicode().values()), *words]
    tokens += [f"[PAD{index}]" for index in range(vocab_size - len(tokens))]
    types = [CONTROL] * 2 + [NORMAL] * 259 + [UNUSED] * (vocab_size - 261)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["\u0120 t", "h e", "\u0120t he"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def write_file(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    arrays: Mapping[str, tuple[np.ndarray, str]],
) -> None:
    """Write metadata and tensors: name |-> (content as it is in the file, type)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if value is not None:
            writer.add_key_value(key, value, _value_type(value))
    for name, (array, type_name) in arrays.items():
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave(weights: np.ndarray, heads: int) -> np.ndarray:
    """Move the rows of each head's two halves to alternate; 0 heads: none."""
    if not heads:
        return weights
    halves = weights.reshape(heads, 2, -1, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def separate(weights: np.ndarray, heads: int) -> np.ndarray:
    """Undo interleave."""
    if not heads:
        return weights
    pairs = weights.reshape(heads, -1, 2, *weights.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weights.shape))


def random_blocks(rows: int, columns: int, type_name: str, source: np.random.Generator) -> Any:
    """Return rows of blocks, uint8, with weights between -1 and 1."""
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    shape = (rows, columns // block_elements, block_bytes)
    blocks = source.integers(0, 256, shape, dtype=np.uint8)
    begins, largest = _HALVES[type_name]
    for begin in begins:
        scales = source.uniform(0.2 / largest, 0.5 / largest, shape[:2]).astype(np.float16)
        blocks[:, :, begin : begin + 2] = scales[:, :, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def _quantize(weights: np.ndarray, type_name: str, source: np.random.Generator) -> np.ndarray:
    if type_name in _HALVES:  # the package reads these, and writes them not
        return random_blocks(*weights.shape, type_name, source)
    return gguf.quants.quantize(weights, gguf.GGMLQuantizationType[type_name])


def _interleaved_heads(name: str, config: Any) -> int:
    if ".q_proj." in name:
        return config.num_attention_heads
    return config.num_key_value_heads if ".k_proj." in name else 0


def _value_type(value: Any) -> gguf.GGUFValueType:
    if isinstance(value, int) and not isinstance(value, bool):
        return gguf.GGUFValueType.UINT32
    return gguf.GGUFValueType.get_type(value)
