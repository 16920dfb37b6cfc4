"""Sampling on a GPU in a served vocabulary: the tokens of the reference, frequencies, graphs."""

import pytest
import torch

from attn_kernels.sampling.launch import TokenSampler
from tests.attn_kernels.sampling_case import (
    KINDS,
    Row,
    draw_with_torch,
    kept_tokens,
    logits_of_kind,
    random_rows,
    row_params,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

VOCAB_SIZE = 128_256


@pytest.fixture(scope="module")
def sampler() -> TokenSampler:
    return TokenSampler(vocab_size=VOCAB_SIZE, max_rows=64, device="cuda")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_are_those_of_the_reference(sampler: TokenSampler, kind: str, dtype: torch.dtype):
    rows = random_rows(64, VOCAB_SIZE, seed=7)
    logits = logits_of_kind(kind, len(rows), VOCAB_SIZE).to("cuda", dtype)
    params = row_params(rows, "cuda")

    drawn = sampler.sample(logits, params)

    assert drawn.tolist() == draw_with_torch(logits, rows)
    for _ in range(20):  # the order of atomics does not matter
        assert torch.equal(sampler.sample(logits, params), drawn)
    poisoned = torch.full((64, VOCAB_SIZE + 40), torch.nan, dtype=dtype, device="cuda")
    poisoned[:, 7 : VOCAB_SIZE + 7] = logits
    assert torch.equal(sampler.sample(poisoned[:, 7 : VOCAB_SIZE + 7], params), drawn)
    alone = [sampler.sample(logits[i : i + 1], row_params([rows[i]], "cuda")) for i in range(8)]
    assert torch.cat(alone).tolist() == drawn[:8].tolist()


@pytest.mark.parametrize(
    "row",
    [Row(temperature=1.7), Row(top_k=20, top_p=0.9), Row(top_p=0.8), Row(min_p=0.05)],
    ids=str,
)
def test_two_million_draws_follow_the_filtered_probabilities(row: Row):
    batch, num_batches, vocab_size = 1 << 14, 128, 400
    logits = logits_of_kind("normal", 1, vocab_size).cuda() / 2
    sampler = TokenSampler(vocab_size=vocab_size, max_rows=batch, device="cuda")
    params = row_params([row] * batch, "cuda")
    counts = torch.zeros(vocab_size, dtype=torch.int64, device="cuda")

    for index in range(num_batches):
        torch.arange(index * batch, (index + 1) * batch, out=params.positions)
        counts += sampler.sample(logits.expand(batch, -1), params).bincount(minlength=vocab_size)

    kept = torch.tensor(sorted(kept_tokens(logits[0], row)))
    assert counts.sum() == batch * num_batches
    assert counts[kept].sum() == counts.sum(), "a token of probability zero was drawn"
    probs = (logits[0].double() / row.temperature).cpu()[kept].softmax(0)
    expected = probs * batch * num_batches
    is_frequent = expected >= 20
    observed = counts.cpu()[kept].double()
    statistic = ((observed - expected) ** 2 / expected)[is_frequent].sum()
    degrees = int(is_frequent.sum()) - 1
    # Chi-square has mean `degrees` and variance twice that; five deviations.
    assert abs(statistic - degrees) < 5 * (2 * degrees) ** 0.5


def test_a_captured_graph_draws_for_later_logits_and_parameters(sampler: TokenSampler):
    rows = random_rows(40, VOCAB_SIZE, seed=8)
    logits = logits_of_kind("one-hot", 40, VOCAB_SIZE).cuda()
    params = row_params([Row(temperature=0)] * 40, "cuda")
    out = torch.empty(40, dtype=torch.int32, device="cuda")
    sampler.sample(logits, params, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.sample(logits, params, out=out)
    changed = row_params(rows, "cuda")

    for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "positions"):
        getattr(params, name).copy_(getattr(changed, name))
    logits.copy_(logits_of_kind("normal", 40, VOCAB_SIZE))
    graph.replay()

    assert out.tolist() == draw_with_torch(logits, rows)
