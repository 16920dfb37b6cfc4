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
        out: A tensor for the entry's rows, of any dtype, which may lie in groups apart from each
            other; if the entry's heads are interleaved, contiguous and of the entry's shape.
        entry: The tensor's entry.

    Raises:
        CheckpointCorrupt: If the file is now shorter than its header says.
        OSError: If it cannot be read.
    """
    columns = entry.shape[-1]
    block_elements, block_bytes = BLOCKS[entry.dtype]
    row_bytes = columns // block_elements * block_bytes
    groups = out if len(entry.shape) > 1 else out[None]
    group_rows = groups[0].numel() // columns
    chunk_groups = max(1, CHUNK_ELEMENTS // (group_rows * columns))
    with entry.path.open("rb") as file:
        file.seek(entry.begin)
        for first in range(0, len(groups), chunk_groups):
            chunk = groups[first : first + chunk_groups]
            num_rows = len(chunk) * group_rows
            raw = np.fromfile(file, np.uint8, num_rows * row_bytes)
            if len(raw) < num_rows * row_bytes:
                raise CheckpointCorrupt(f"{entry.path}: cut off while it was read")
            blocks = torch.from_numpy(raw).view(num_rows, row_bytes).to(out.device)
            chunk.copy_(dequantize(blocks, entry.dtype).view(chunk.shape))
    if entry.num_interleaved_heads:
        pairs = out.view(entry.num_interleaved_heads, -1, 2, *out.shape[1:])
        out.copy_(pairs.transpose(1, 2).reshape(out.shape))
