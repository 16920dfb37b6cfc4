"""Shapes of random checkpoints, and folders that have one. Without torch, whose import is slow.

benchmarks.random_checkpoint writes them.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "max_position_embeddings": 65_536,  # the model's own is 8,192; workloads are longer
        "rope_theta": 500_000.0,
    },
    "llama-3.2-1b": {  # six clusters of it fit on one GPU
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128_256,
        "max_position_embeddings": 65_536,
        "rope_theta": 500_000.0,
    },
    "tiny": {  # runs on a busy CPU; its contexts are as long as those of a scaled-down benchmark
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 4096,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
    },
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 4096,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
    },
}


def ensure_random_checkpoint(name: str, folder: Path) -> str:
    """Write the checkpoint of a shape unless the folder has all of it; returns whether it did.

    Another process writes it, so that this one holds no GPU memory.

    Raises:
        SystemExit: The folder has something else.
    """
    if _is_whole(SHAPES[name], folder):
        return f"found {folder}"
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder}: is not empty and not a complete random checkpoint of {name}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}-{os.getpid()}")  # no half of one is ever found
    command = [
        sys.executable,
        "-m",
        "benchmarks.random_checkpoint",
        "--shape",
        name,
        "--out",
        str(aside),
    ]
    try:
        subprocess.run(command, check=True, cwd=Path(__file__).parent.parent)  # noqa: S603
        aside.replace(folder)
    except OSError:
        if not _is_whole(SHAPES[name], folder):  # another run has written it meanwhile
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return f"wrote {folder}"


def _is_whole(shape: dict[str, Any], folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_bytes())
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        shards = set(index["weight_map"].values())
        num_bytes = sum((folder / shard).stat().st_size for shard in shards)
    except (OSError, ValueError, KeyError):
        return False
    is_equal = all(config.get(key) == value for key, value in shape.items())
    return is_equal and num_bytes > int(index["metadata"]["total_size"])  # and headers
