"""Writes a checkpoint of a known shape with seeded random weights, where only the cost matters.

    python -m benchmarks.random_checkpoint --shape llama-3-8b --out DIR

It has the layout of any Hugging Face folder (config.json, sharded safetensors with an index,
tokenizer.json), in bfloat16, and takes the same path through the loader. The tokenizer is the demo
model's: prompts of these runs are token ids.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.checkpoint_shapes import SHAPES
from cluster.demo_model import BOS, EOS, build_tokenizer

SHARD_BYTES = 2 << 30
SEED = 20261121


def write_random_checkpoint(shape: dict[str, Any], folder: Path, device: torch.device) -> int:
    """Write all files of a Llama checkpoint; returns the bytes of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
    }
    config = (
        shape
        | ends
        | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        }
    )
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", ends)
    return _write_shards(folder, _weights(shape, device))


def _weights(shape: dict[str, Any], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator(device).manual_seed(SEED)

    def matrix(rows: int, columns: int) -> Tensor:
        values = torch.randn(
            rows, columns, dtype=torch.bfloat16, device=device, generator=generator
        )
        return values.mul_(columns**-0.5).cpu()

    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    qo_dim = shape["num_attention_heads"] * shape["head_dim"]
    kv_dim = shape["num_key_value_heads"] * shape["head_dim"]
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    yield "model.embed_tokens.weight", matrix(shape["vocab_size"], hidden)
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", ones.clone()
        yield f"{prefix}self_attn.q_proj.weight", matrix(qo_dim, hidden)
        yield f"{prefix}self_attn.k_proj.weight", matrix(kv_dim, hidden)
        yield f"{prefix}self_attn.v_proj.weight", matrix(kv_dim, hidden)
        yield f"{prefix}self_attn.o_proj.weight", matrix(hidden, qo_dim)
        yield f"{prefix}post_attention_layernorm.weight", ones.clone()
        yield f"{prefix}mlp.gate_proj.weight", matrix(inner, hidden)
        yield f"{prefix}mlp.up_proj.weight", matrix(inner, hidden)
        yield f"{prefix}mlp.down_proj.weight", matrix(hidden, inner)
    yield "model.norm.weight", ones.clone()
    yield "lm_head.weight", matrix(shape["vocab_size"], hidden)


def _write_shards(folder: Path, weights: Iterator[tuple[str, Tensor]]) -> int:
    """Write shards of about SHARD_BYTES and their index; only one shard is held in memory."""
    shard_of: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    shard_bytes = total_bytes = 0

    def flush() -> None:
        nonlocal shard, shard_bytes
        name = f"model-{len(set(shard_of.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name)
        shard_of.update(dict.fromkeys(shard, name))
        shard, shard_bytes = {}, 0

    for name, tensor in weights:
        if shard and shard_bytes + tensor.nbytes > SHARD_BYTES:
            flush()
        shard[name] = tensor
        shard_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    index = {"metadata": {"total_size": total_bytes}, "weight_map": shard_of}
    _write_json(folder / "model.safetensors.index.json", index)
    return total_bytes


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    total_bytes = write_random_checkpoint(
        SHAPES[options.shape], options.out, torch.device(options.device)
    )
    sys.stderr.write(f"{options.out}: {total_bytes / 1e9:.2f} GB of weights\n")


if __name__ == "__main__":
    main()
