"""That forests lie where their names say, by the model that an H200 gets."""

import pytest
import torch

from attn_kernels import cascade, decode
from attn_kernels.cascade import CascadeAttention
from benchmarks.bench import HEAD_DIM, NUM_KV_HEADS, NUM_QO_HEADS
from benchmarks.cascade_cases import BORDERS, Forest
from tests.support.triton_interpreter import interpreted

PAGE_SIZE = 64
H200_MULTIPROCESSORS = 132


@pytest.mark.parametrize("sizes", BORDERS, ids=str)
def test_across_the_border_sharing_is_chosen_and_saves_little(
    sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
):
    for launchers in (cascade, decode):
        monkeypatch.setattr(launchers, "on_hopper", lambda _: True)
        monkeypatch.setattr(
            launchers, "programs_for", lambda _, per_sm: per_sm * H200_MULTIPROCESSORS
        )
    batch, shared, own = sizes
    forest = Forest(nodes=[(-1, shared)], requests=[(0, own)] * batch)
    kv_lens, num_pages = forest.kv_lens(), forest.num_distinct_tokens() // PAGE_SIZE
    starts, indices = forest.page_tables(range(num_pages), PAGE_SIZE)
    shape = (num_pages, 1, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM)

    with interpreted():
        attention = CascadeAttention(
            torch.empty(shape, dtype=torch.bfloat16),
            num_qo_heads=NUM_QO_HEADS,
            scale=1.0,
            max_requests=batch,
            max_kv_tokens=sum(kv_lens),
        )
        estimate = attention.plan(kv_lens, starts, indices)

    assert attention.num_shared_items > 0
    assert 0.87 < estimate.cascade_us / estimate.flat_us <= 0.9
