"""Dequantizes blocks of GGUF files to float32, in torch, so that GPUs can do it, too.

A row is cut into blocks of 32 or 256 elements; a block holds small integers and the scales (and
minima) that turn them into weights. Layouts: ggml-common.h of ggml. The result is bit-identical to
that of the `gguf` package, which the tests compare.

Legend: B blocks, E elements of a block, G groups of a block that have a scale each.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from llm_engine.gguf_file import BLOCKS

# Types that are no blocks, as files of both formats call them.
PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NIBBLES = (0, 4)  # shifts that split a byte
PAIRS = (0, 2, 4, 6)
BITS = tuple(range(8))


def dequantize(raw: Tensor, type_name: str) -> Tensor:
    """Return float32 weights [rows, columns] of rows of blocks.

    Args:
        raw: uint8 [rows, bytes of a row], contiguous.
        type_name: A key of gguf_file.BLOCKS.
    """
    if type_name in PLAIN_DTYPES:
        return raw.view(PLAIN_DTYPES[type_name]).float()
    blocks = raw.view(-1, BLOCKS[type_name][1])
    return _BLOCK_READERS[type_name](blocks).view(len(raw), -1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_spread(blocks[:, 2:18], NIBBLES) - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _spread(blocks[:, 4:20], NIBBLES) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    high = _spread(blocks[:, 2:6], BITS, transposed=True)
    return _half(blocks, 0) * ((_spread(blocks[:, 6:22], NIBBLES) | high << 4) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    high = _spread(blocks[:, 4:8], BITS, transposed=True)
    low = _spread(blocks[:, 8:24], NIBBLES)
    return _half(blocks, 0) * (low | high << 4) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:34].view(torch.int8)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, values = blocks[:, :16], _spread(_parts(blocks[:, 16:80], 2), PAIRS)
    scale_BG = _half(blocks, 80) * (scales & 15)
    minimum_BG = _half(blocks, 82) * (scales >> 4)
    return _scaled(values, scale_BG, minimum_BG)


def _q3_k(blocks: Tensor) -> Tensor:
    high = _spread(blocks[:, :32], BITS)
    values = _spread(_parts(blocks[:, 32:96], 2), PAIRS) - (1 - high) * 4
    packed = blocks[:, 96:108]
    scales_BG = _spread(packed[:, :8], NIBBLES) | _spread(packed[:, 8:], PAIRS) << 4
    return _scaled(values, _half(blocks, 108) * (scales_BG - 32))


def _q4_k(blocks: Tensor) -> Tensor:
    values = _spread(_parts(blocks[:, 16:144], 4), NIBBLES)
    return _scaled(values, *_scales_and_minima(blocks))


def _q5_k(blocks: Tensor) -> Tensor:
    high = _spread(blocks[:, 16:48], BITS)
    values = _spread(_parts(blocks[:, 48:176], 4), NIBBLES) | high << 4
    return _scaled(values, *_scales_and_minima(blocks))


def _q6_k(blocks: Tensor) -> Tensor:
    low = _spread(_parts(blocks[:, :128], 2), NIBBLES)
    high = _spread(_parts(blocks[:, 128:192], 2), PAIRS)
    scales_BG = blocks[:, 192:208].view(torch.int8)
    return _scaled((low | high << 4) - 32, _half(blocks, 208) * scales_BG)


def _half(blocks: Tensor, begin: int) -> Tensor:
    """Return the float16 number at a byte of each block, float32 [B, 1]."""
    return blocks[:, begin : begin + 2].view(torch.float16).float()


def _parts(x: Tensor, count: int) -> Tensor:
    """Cut [B, n] into [B, count, n / count]."""
    return x.reshape(len(x), count, -1)


def _spread(packed: Tensor, shifts: tuple[int, ...], *, transposed: bool = False) -> Tensor:
    """Split bytes into fields of equal width, int8 [B, E].

    Args:
        packed: uint8 [B, ..., bytes]. The lowest fields of all bytes come first, then the next.
        shifts: The shifts of the fields in a byte.
        transposed: Whether all fields of the first byte come first instead.
    """
    mask = (1 << 8 // len(shifts)) - 1
    fields = torch.stack([packed >> shift & mask for shift in shifts], -1 if transposed else -2)
    return fields.flatten(1).view(torch.int8)


def _scaled(values: Tensor, scale_BG: Tensor, minimum_BG: Tensor | None = None) -> Tensor:
    """Return values [B, E] times their group's scale, minus its minimum, float32 [B, E]."""
    scaled: Tensor = scale_BG[:, :, None] * _parts(values, scale_BG.shape[1])
    if minimum_BG is not None:
        scaled -= minimum_BG[:, :, None]
    return scaled.flatten(1)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return those of the 8 groups of Q4_K and Q5_K, float32 [B, 8]: 6 bits each in 12 bytes."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1)
    return _half(blocks, 0) * scales, _half(blocks, 2) * minima


_BLOCK_READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
