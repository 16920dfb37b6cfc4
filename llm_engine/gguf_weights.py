"""Fills tensors with the weights of a GGUF file, some rows at a time."""

import numpy as np
import torch
from torch import Tensor

from llm_engine.errors import CheckpointCorrupt
from llm_engine.gguf_checkpoint import GGUFTensorEntry
from llm_engine.gguf_file import BLOCKS
from llm_engine.gguf_quants import dequantize

CHUNK_ELEMENTS = 4 * 2**20  # bounds temporary memory for a large tensor, a few times 16 MiB


def fill_from_gguf(out: Tensor, entry: GGUFTensorEntry) -> None:
    """Read, dequantize and cast a tensor on its target device.

    Args:
        out: A tensor of the entry's shape, contiguous, of any dtype.
        entry: The tensor's entry.

    Raises:
        CheckpointCorrupt: If the file is now shorter than its header says.
        OSError: If it cannot be read.
    """
    columns = entry.shape[-1]
    block_elements, block_bytes = BLOCKS[entry.dtype]
    row_bytes = columns // block_elements * block_bytes
    rows = out.view(-1, columns)
    chunk_rows = max(1, CHUNK_ELEMENTS // columns)
    with entry.path.open("rb") as file:
        file.seek(entry.begin)
        for first in range(0, len(rows), chunk_rows):
            chunk = rows[first : first + chunk_rows]
            raw = np.fromfile(file, np.uint8, len(chunk) * row_bytes)
            if len(raw) < len(chunk) * row_bytes:
                raise CheckpointCorrupt(f"{entry.path}: cut off while it was read")
            blocks = torch.from_numpy(raw).view(len(chunk), row_bytes).to(out.device)
            chunk.copy_(dequantize(blocks, entry.dtype))
    if entry.num_interleaved_heads:
        pairs = out.view(entry.num_interleaved_heads, -1, 2, *out.shape[1:])
        out.copy_(pairs.transpose(1, 2).reshape(out.shape))
