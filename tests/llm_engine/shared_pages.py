"""Rows of a pass that share pages, and passes over them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from llm_engine import decode_triton, operations_triton  # noqa: F401  # else it stays interpreted
from llm_engine.attention import AttentionBackend
from llm_engine.attention_torch import TorchAttention
from llm_engine.attention_triton import TritonAttention
from llm_engine.forward_batch import build_forward_batch
from llm_engine.sampling import SequenceSlice

PAGE_SIZE, NUM_PAGES, NUM_LAYERS = 16, 40, 2
HEAD_DIM = 64
PREFIX = list(range(16, 32))  # pages of 256 tokens: the least that is shared


def randn(device: torch.device, *shape: int, seed: int) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device, torch.bfloat16)


def num_heads(device: torch.device) -> tuple[int, int]:
    """Return how many there are of queries and of keys: the interpreter takes as long for each."""
    return (4, 2) if device.type == "cuda" else (2, 1)


def make_pages(device: torch.device) -> Tensor:
    _, num_kv_heads = num_heads(device)
    shape = (NUM_PAGES, NUM_LAYERS, 2, num_kv_heads, PAGE_SIZE, HEAD_DIM)
    return randn(device, *shape, seed=7)


def make_backend(
    kind: type[TorchAttention] | type[TritonAttention],
    device: torch.device,
    sliding_window: int | None = None,
) -> AttentionBackend:
    angles = torch.arange(600 * HEAD_DIM // 2, device=device).view(600, -1).float()
    return kind(
        make_pages(device),
        angles.cos(),
        angles.sin(),
        num_qo_heads=num_heads(device)[0],
        scale=HEAD_DIM**-0.5,
        sliding_window=sliding_window,
    )


def attend(
    backend: AttentionBackend, slices: Sequence[SequenceSlice], device: torch.device
) -> Tensor:
    """One pass over two layers; queries of each token depend on its position only."""
    backend.plan(build_forward_batch(slices, PAGE_SIZE, device))
    positions = [each.start + index for each in slices for index in range(len(each.token_ids))]
    outs = []
    num_qo_heads, num_kv_heads = num_heads(device)
    for layer in range(NUM_LAYERS):
        fused = randn(device, 600, num_qo_heads + 2 * num_kv_heads, HEAD_DIM, seed=layer)
        q, k, v = fused[positions].split([num_qo_heads, num_kv_heads, num_kv_heads], dim=1)
        outs.append(backend.attend(layer, backend.rotate_and_append(layer, q, k, v)))
    return torch.stack(outs)


def slice_of(
    start: int, length: int, page_ids: list[int], *, num_prompt_tokens: int = 1
) -> SequenceSlice:
    return SequenceSlice(
        token_ids=[1] * length,
        start=start,
        page_ids=page_ids,
        num_prompt_tokens=num_prompt_tokens,
    )


SLICES = [
    slice_of(0, 5, [0], num_prompt_tokens=5),
    slice_of(260, 1, [*PREFIX, 1]),
    slice_of(10, 1, [2]),
    slice_of(258, 6, [*PREFIX, 3], num_prompt_tokens=260),  # resumed: the end of a prompt, and rows
    slice_of(300, 1, [*PREFIX, 4, 5, 6]),
    slice_of(250, 5, [*range(33, 40), *range(7, 16)], num_prompt_tokens=250),
]
