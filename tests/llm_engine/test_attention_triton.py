import pytest
import torch

from llm_engine.attention import AttentionBackend
from llm_engine.attention_torch import TorchAttention
from llm_engine.attention_triton import TritonAttention
from llm_engine.forward_batch import build_forward_batch
from llm_engine.sampling import SequenceSlice

PAGE_SIZE, NUM_LAYERS, NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 6, 2, 16


def randn(device: torch.device, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def run(
    backend: AttentionBackend, slices: list[SequenceSlice], device: torch.device
) -> torch.Tensor:
    """One pass of two layers; queries of each token depend on its position only."""
    backend.plan(build_forward_batch(slices, PAGE_SIZE, device))
    positions = [s.start + index for s in slices for index in range(len(s.token_ids))]
    outs = []
    for layer in range(NUM_LAYERS):
        heads = NUM_QO_HEADS + 2 * NUM_KV_HEADS
        fused = randn(device, 64, heads, HEAD_DIM, seed=layer)[positions]
        q, k, v = fused.split([NUM_QO_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        rotated = backend.rotate_and_append(layer, q, k, v)
        outs.append(backend.attend(layer, rotated))
    return torch.stack(outs)


def make_backends(
    device: torch.device, sliding_window: int | None
) -> tuple[tuple[TritonAttention, torch.Tensor], tuple[TorchAttention, torch.Tensor]]:
    angles = randn(device, 64, HEAD_DIM // 2, seed=9)
    shape = (16, NUM_LAYERS, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM)
    made = []
    for backend in (TritonAttention, TorchAttention):
        pages = torch.zeros(shape, device=device)
        attention = backend(
            pages,
            angles.cos(),
            angles.sin(),
            num_qo_heads=NUM_QO_HEADS,
            scale=0.3,
            sliding_window=sliding_window,
        )
        made.append((attention, pages))
    return made[0], made[1]


def slice_of(start: int, length: int, page_ids: list[int]) -> SequenceSlice:
    """Several tokens are the end of a prompt, a single one was drawn."""
    return SequenceSlice(
        token_ids=range(length),
        start=start,
        page_ids=page_ids,
        num_prompt_tokens=start + length if length > 1 else start,
    )


@pytest.mark.parametrize("sliding_window", [None, 10])
def test_gives_what_the_torch_back_end_gives_over_several_passes(
    device: torch.device, sliding_window: int | None
):
    first, second, third = [3, 7, 1, 0], [15, 2, 5], [4]
    passes = [
        [slice_of(0, 13, first), slice_of(0, 8, second)],  # prefill
        [slice_of(13, 1, first), slice_of(8, 9, second), slice_of(0, 1, third)],  # mixed
        [slice_of(14, 1, first), slice_of(17, 1, second), slice_of(1, 1, third)],  # decode
    ]
    (triton, triton_pages), (reference, reference_pages) = make_backends(device, sliding_window)

    for slices in passes:
        torch.testing.assert_close(
            run(triton, slices, device), run(reference, slices, device), atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(triton_pages, reference_pages)


def test_a_sequence_decodes_to_the_same_bits_beside_a_prefill_and_alone(device: torch.device):
    (attention, _), _ = make_backends(device, None)
    run(attention, [slice_of(0, 20, [3, 7, 1])], device)

    alone = run(attention, [slice_of(20, 1, [3, 7, 1])], device)
    beside = run(attention, [slice_of(0, 5, [9]), slice_of(20, 1, [3, 7, 1])], device)

    assert torch.equal(beside[:, 5:], alone)
