import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attn_kernels.sampling import launch, reference
from attn_kernels.sampling.reference import filter_logits
from attn_kernels.sampling.reference_gumbel import random_bits
from llm_engine.sampler import upload_edits
from llm_engine.sampling import Draw, SampledToken, SamplingParams
from tests.llm_engine.driver import sample
from tests.support.triton_interpreter import interpreted

VOCAB_SIZE = 50
GREEDY = SamplingParams(temperature=0)
# 0.999 quantiles of chi-square by degrees of freedom.
CHI_SQUARE = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3, 8: 26.1, 9: 27.9}


def make_draw(params: SamplingParams, position: int = 10, **changes: Any) -> Draw:
    draw = Draw(
        params=params,
        seed=params.seed,
        position=position,
        prompt_token_ids=(1, 2, 3),
        output_token_ids=(),
    )
    return replace(draw, **changes)


def make_logits(num_rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(num_rows, vocab_size, generator=generator)


def draw_many(logits: torch.Tensor, params: SamplingParams, count: int) -> Counter[int]:
    """Draw at `count` positions from one row of logits."""
    draws = [make_draw(params, position) for position in range(count)]
    return Counter(each.token_id for each in sample(logits.expand(count, -1), draws))


def assert_frequencies(counts: Counter[int], probs: torch.Tensor) -> None:
    """Chi-square test of observed counts; tokens that are expected seldom are taken together."""
    total = counts.total()
    frequent = [token for token, prob in enumerate(probs.tolist()) if prob * total >= 20][:9]
    observed = [counts[token] for token in frequent]
    expected = [probs[token].item() * total for token in frequent]
    rest = total - sum(expected)
    if rest > 1e-6 * total:
        observed.append(total - sum(observed))
        expected.append(rest)
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    assert statistic < CHI_SQUARE[len(expected) - 1], (observed, expected)


def reference_set(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Return the tokens that the filters keep, by sorting; ties at the end are all kept."""
    ranked = sorted(range(len(logits)), key=lambda token: -logits[token])
    ranked = ranked[: top_k or None]
    weights = [math.exp(logits[token] - logits[ranked[0]]) for token in ranked]
    mass = 0.0
    kept = []
    for token, weight in zip(ranked, weights, strict=True):
        if mass >= top_p and kept:
            break
        kept.append(token)
        mass += weight / sum(weights)
    lowest = max(logits[kept[-1]], logits[ranked[0]] + math.log(min_p) if min_p else -math.inf)
    return {token for token, logit in enumerate(logits) if logit >= lowest}


def test_filters_keep_the_set_of_a_sorting_reference() -> None:
    rng = random.Random(1)
    logits = make_logits(300, seed=2)
    logits[::3] = (logits[::3] * 2).round() / 2  # many ties
    top_k = [rng.choice([0, 1, 2, 5, 17, VOCAB_SIZE]) for _ in logits]
    top_p = [rng.choice([1.0, 0.95, 0.5, 0.1, 1e-6]) for _ in logits]
    min_p = [rng.choice([0.0, 0.02, 0.3, 1.0]) for _ in logits]

    filtered = filter_logits(
        logits.clone(),
        torch.tensor([k or VOCAB_SIZE for k in top_k]),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(min_p, dtype=torch.float64),
        VOCAB_SIZE,
    )

    for row, values in enumerate(filtered):
        kept = set(torch.nonzero(values > -torch.inf).flatten().tolist())
        assert kept == reference_set(logits[row].tolist(), top_k[row], top_p[row], min_p[row])
        assert (values[list(kept)] == logits[row, list(kept)]).all()


@pytest.mark.parametrize("max_k", [20, VOCAB_SIZE])
def test_the_set_does_not_depend_on_how_many_logits_are_ranked(max_k: int) -> None:
    logits = make_logits(40, seed=3).round()
    top_k = torch.tensor([1, 3, 7, 20]).repeat(10)
    top_p = torch.full((40,), 0.8, dtype=torch.float64)
    min_p = torch.zeros(40, dtype=torch.float64)

    filtered = filter_logits(logits.clone(), top_k, top_p, min_p, max_k)

    expected = [reference_set(logits[row].tolist(), int(top_k[row]), 0.8, 0) for row in range(40)]
    assert [set(torch.nonzero(row > -torch.inf).flatten().tolist()) for row in filtered] == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 6, "top_p": 0.8, "min_p": 0.05, "temperature": 1.4},
    ],
    ids=str,
)
def test_frequencies_follow_the_filtered_probabilities(changes: dict[str, Any]) -> None:
    params = SamplingParams(seed=11, **changes)
    logits = make_logits(1, seed=4, vocab_size=12)
    scaled = logits[0] / params.temperature
    kept = reference_set(scaled.tolist(), params.top_k, params.top_p, params.min_p)
    probs = torch.zeros(12)
    probs[list(kept)] = scaled[list(kept)].softmax(dim=-1)

    counts = draw_many(logits, params, 8000)

    assert set(counts) <= kept
    assert_frequencies(counts, probs)


def test_seeds_are_independent_of_each_other() -> None:
    logits = torch.zeros(4000, 2)
    pairs = Counter()
    by_seed = []
    for seed in (1, 2):
        params = SamplingParams(seed=seed)
        drawn = sample(logits, [make_draw(params, position) for position in range(4000)])
        by_seed.append([each.token_id for each in drawn])
    pairs.update(2 * a + b for a, b in zip(*by_seed, strict=True))

    assert_frequencies(pairs, torch.full((4,), 0.25))


def test_a_draw_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(6)
    logits = make_logits(60, seed=7)
    draws = [
        make_draw(
            SamplingParams(
                seed=row,
                temperature=rng.choice([0, 0.7, 1.0]),
                top_k=rng.choice([0, 3, 10]),
                top_p=rng.choice([1.0, 0.6]),
                min_p=rng.choice([0.0, 0.1]),
                repetition_penalty=rng.choice([1.0, 1.3]),
                logprobs=rng.choice([None, 0, 2]),
            ),
            position=row,
            output_token_ids=tuple(rng.randrange(VOCAB_SIZE) for _ in range(row)),
            banned_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 2]))),
        )
        for row in range(60)
    ]
    order = rng.sample(range(60), 60)

    together = sample(logits, draws)
    shuffled = sample(logits[order], [draws[row] for row in order])
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 7 * VOCAB_SIZE)
    chunked = sample(logits, draws)
    alone = [sample(logits[row : row + 1], [draws[row]])[0] for row in range(60)]

    assert [shuffled[order.index(row)].token_id for row in range(60)] == [
        each.token_id for each in together
    ]
    assert chunked == together
    assert [each.token_id for each in alone] == [each.token_id for each in together]


def test_greedy_takes_the_lowest_id_of_equally_probable_tokens() -> None:
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[1, [30, 12, 40]] = 5.0

    drawn = sample(logits, [make_draw(GREEDY)] * 3)

    assert [each.token_id for each in drawn] == [0, 12, 0]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3)], ids=["greedy", "random"])
def test_banned_and_impossible_tokens_are_never_drawn(params: SamplingParams) -> None:
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    logits[0, [4, 5, 6, 7]] = torch.tensor([3.0, 2.0, 1.0, 0.0])
    draws = [make_draw(params, position, banned_token_ids=(4, 6)) for position in range(500)]

    drawn = {each.token_id for each in sample(logits.expand(500, -1), draws)}

    assert drawn == ({5} if params.temperature == 0 else {5, 7})


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = make_logits(50, seed=8) * 50

    tiny = sample(logits, [make_draw(SamplingParams(temperature=1e-30, seed=9))] * 50)
    greedy = sample(logits, [make_draw(GREEDY)] * 50)

    assert tiny == greedy


def edited_logits(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    edits = upload_edits([draw], logits.device)
    assert edits is not None
    return reference.edit_logits(logits, edits)


def test_penalties_edit_logits_as_documented() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, 1.0, 0.5]])
    draw = make_draw(
        SamplingParams(
            temperature=0, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5
        ),
        prompt_token_ids=(0, 1, 0),
        output_token_ids=(1, 2, 2),
    )

    edited = edited_logits(logits, draw)

    # Token 0 is only in the prompt; 1 in both, 2 twice in the output, 3 and 4 nowhere.
    assert edited[0].tolist() == [1.0, -4.0 - 0.75, 1.0 - 1.25, 1.0, 0.5]
    assert logits[0].tolist() == [2.0, -2.0, 2.0, 1.0, 0.5]


def test_repetition_penalty_equals_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = make_logits(1, seed=9)
    tokens = [3, 9, 9, 30, 41]
    draw = make_draw(
        SamplingParams(repetition_penalty=1.7),
        prompt_token_ids=tokens[:2],
        output_token_ids=tokens[2:],
    )

    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([tokens]), logits.clone())

    assert torch.equal(edited_logits(logits, draw), expected)


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    logits = make_logits(3, seed=10)
    params = SamplingParams(temperature=0, repetition_penalty=5.0, logprobs=4)
    draws = [
        make_draw(params, banned_token_ids=(int(logits[0].argmax()),)),
        make_draw(SamplingParams(seed=1)),
        make_draw(SamplingParams(seed=1, logprobs=0, temperature=0.3)),
    ]
    expected = logits.double().log_softmax(dim=-1).numpy()

    first, second, third = sample(logits, draws)

    best = np.argsort(-expected[0])[:4]
    assert [token for token, _ in first.top_logprobs] == best.tolist()
    assert [value for _, value in first.top_logprobs] == pytest.approx(
        expected[0][best].tolist(), abs=1e-5
    )
    assert first.logprob == pytest.approx(expected[0][first.token_id], abs=1e-5)
    assert first.token_id != best[0]
    assert second.logprob is None
    assert third.logprob == pytest.approx(expected[2][third.token_id], abs=1e-5)
    assert third.top_logprobs == ()


@pytest.fixture
def _several_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_several_threads")
def test_logprobs_of_a_large_vocabulary_are_exact_and_depend_on_no_other_row() -> None:
    logits = 2 * make_logits(5, seed=12, vocab_size=128_256)
    tokens = torch.arange(5, dtype=torch.int32)
    logits[3, [100_000, 7, 70_000]] = 30.0
    sampler = reference.TokenSampler(vocab_size=128_256, max_rows=5, device="cpu")
    expected = logits.double().log_softmax(dim=-1)

    found = sampler.logprobs(logits, tokens, 2)

    assert found.top_tokens[3].tolist() == [7, 70_000]
    top = expected.gather(1, found.top_tokens.long())
    torch.testing.assert_close(found.top.double(), top, atol=1e-6, rtol=1e-7)
    torch.testing.assert_close(found.chosen.double(), expected.diagonal(), atol=1e-6, rtol=1e-7)
    for row in range(5):
        alone = sampler.logprobs(logits[row : row + 1], tokens[row : row + 1], 2)
        assert torch.equal(alone.chosen[0], found.chosen[row])
        assert torch.equal(alone.top[0], found.top[row])
        assert torch.equal(alone.top_tokens[0], found.top_tokens[row])


def test_half_precision_logits_and_an_unlimited_number_of_logprobs_work() -> None:
    logits = make_logits(2, seed=11)
    params = SamplingParams(logprobs=VOCAB_SIZE + 10)

    for dtype in (torch.bfloat16, torch.float16):
        first, _ = sample(logits.to(dtype), [make_draw(params)] * 2)

        assert len(first.top_logprobs) == VOCAB_SIZE
        assert sum(math.exp(value) for _, value in first.top_logprobs) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3)], ids=["greedy", "random"])
def test_nothing_is_drawn_from_invalid_logits_and_other_rows_keep_their_tokens(
    params: SamplingParams, bad: float
) -> None:
    draws = [make_draw(replace(params, logprobs=2)) for _ in range(3)]
    logits = make_logits(3, seed=13)
    first, _, last = sample(logits, draws)
    logits[1, 7] = bad

    with interpreted():
        assert sample(logits, draws, launch.TokenSampler)[1] is None
    assert sample(logits, draws) == [first, None, last]


def mixed_draws(count: int, vocab_size: int) -> list[Draw]:
    return [
        make_draw(
            SamplingParams(
                seed=row,
                temperature=0.0 if row % 5 == 0 else 0.8,
                top_k=(0, 50)[row % 2],
                top_p=(1.0, 0.9)[row // 2 % 2],
                min_p=(0.0, 0.05)[row // 4 % 2],
                repetition_penalty=(1.0, 1.2)[row // 8 % 2],
                frequency_penalty=(0.0, 0.7)[row // 16 % 2],
                logprobs=(None, 3, 0)[row % 3],
            ),
            position=row,
            output_token_ids=[(row * k) % vocab_size for k in range(row % 4)],
            banned_token_ids=(1, 5, 9) if row % 7 == 0 else (),
        )
        for row in range(count)
    ]


def assert_same_tokens(found: list[SampledToken], expected: list[SampledToken]) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert mine.token_id == other.token_id
        assert (mine.logprob is None) == (other.logprob is None)
        if other.logprob is not None:
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [token for token, _ in mine.top_logprobs] == [
            token for token, _ in other.top_logprobs
        ]
        assert [value for _, value in mine.top_logprobs] == pytest.approx(
            [value for _, value in other.top_logprobs], abs=1e-5
        )


def test_the_kernels_draw_the_same_tokens() -> None:
    logits = make_logits(40, seed=12, vocab_size=300)
    before = logits.clone()
    draws = mixed_draws(40, 300)

    with interpreted():
        found = sample(logits, draws, launch.TokenSampler)
        half = sample(logits.bfloat16(), draws, launch.TokenSampler)

    assert_same_tokens(found, sample(logits, draws))
    expected = sample(logits.bfloat16(), draws)
    assert [each.token_id for each in half] == [each.token_id for each in expected]
    assert torch.equal(logits, before)


@pytest.mark.gpu
def test_cuda_draws_the_same_tokens_as_the_cpu() -> None:
    logits = make_logits(64, seed=12, vocab_size=32_000)
    draws = mixed_draws(64, 32_000)
    bases = torch.arange(-5, 5)

    assert torch.equal(random_bits(bases, 999), random_bits(bases.cuda(), 999).cpu())
    assert_same_tokens(sample(logits.cuda(), draws), sample(logits, draws))
    assert_same_tokens(sample(logits.cuda(), draws, launch.TokenSampler), sample(logits, draws))
