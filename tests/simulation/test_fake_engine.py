from dataclasses import replace

import numpy as np
import pytest

from kv_cache.layout import num_pages_for
from llm_engine.sampling import Draw, SampledToken, SamplingParams, SequenceSlice, choice_seed
from tests.support.fake_engine import FakeEngine, FakeModel, fake_tokens

PAGE_SIZE = 4
MODEL = FakeModel(vocab_size=500, eos_token_ids=(7,))
PROMPT = tuple(range(20, 33))
PARAMS = SamplingParams(max_tokens=9, seed=3, ignore_eos=True)


def make_engine() -> FakeEngine:
    return FakeEngine(MODEL, num_pages=64, page_size=PAGE_SIZE)


def draw_after(
    prompt: tuple[int, ...], tokens: list[int], params: SamplingParams, choice: int = 0
) -> Draw:
    return Draw(
        params=params,
        seed=choice_seed(params.seed, choice),
        position=len(prompt) + len(tokens),
        prompt_token_ids=prompt,
        output_token_ids=tokens,
    )


def generate(
    engine: FakeEngine,
    pages: list[int],
    *,
    chunks: tuple[int, ...] = (len(PROMPT),),
    params: SamplingParams = PARAMS,
    tamper_at: int | None = None,
) -> list[int]:
    """Run a whole request, prefill in chunks; a byte of page 0 flips before step tamper_at."""
    start = 0
    drawn: list[tuple[SampledToken, ...]] = []
    for length in chunks:
        last = start + length == len(PROMPT)
        drawn = engine.forward(
            [
                SequenceSlice(
                    token_ids=PROMPT[start : start + length],
                    start=start,
                    page_ids=pages,
                    num_prompt_tokens=len(PROMPT),
                    draws=(draw_after(PROMPT, [], params),) if last else (),
                )
            ]
        )
        assert len(drawn[0]) == last
        start += length
    tokens = [drawn[0][0].token_id]
    while len(tokens) < params.max_tokens:
        if len(tokens) == tamper_at:
            engine.storage.slots[pages[0], 1, 3] ^= 1
        each = SequenceSlice(
            token_ids=tokens[-1:],
            start=len(PROMPT) + len(tokens) - 1,
            page_ids=pages,
            num_prompt_tokens=len(PROMPT),
            draws=(draw_after(PROMPT, tokens, params),),
        )
        tokens.append(engine.forward([each])[0][0].token_id)
    return tokens


def test_tokens_equal_the_oracle_for_any_pages_and_chunks() -> None:
    expected = fake_tokens(PROMPT, PARAMS, model=MODEL)

    for pages, chunks in (([0, 1, 2, 3, 4, 5], (13,)), ([9, 3, 60, 5, 33, 1], (3, 1, 7, 2))):
        assert generate(make_engine(), pages, chunks=chunks) == expected


def test_a_changed_page_changes_the_next_token() -> None:
    expected = fake_tokens(PROMPT, PARAMS, model=MODEL)

    tokens = generate(make_engine(), [5, 4, 3, 2, 1, 0], tamper_at=4)

    assert tokens[:4] == expected[:4]
    assert tokens[4] != expected[4]


def test_swapped_pages_change_the_token() -> None:
    engine = make_engine()
    first = generate(engine, [0, 1, 2, 3, 4, 5], params=SamplingParams(max_tokens=1))
    draws = (draw_after(PROMPT, [], SamplingParams(max_tokens=1)),)

    swapped = SequenceSlice(
        token_ids=PROMPT[-1:],
        start=len(PROMPT) - 1,
        page_ids=[1, 0, 2, 3],
        num_prompt_tokens=len(PROMPT),
        draws=draws,
    )

    assert engine.forward([swapped])[0][0].token_id != first[0]


def test_the_chunk_after_a_foreign_page_is_foreign_too() -> None:
    engine = make_engine()
    generate(engine, [0, 1, 2, 3, 4, 5])
    before = engine.storage.export_pages([1])
    engine.storage.slots[0] = 0

    second = SequenceSlice(
        token_ids=PROMPT[4:8], start=4, page_ids=[0, 1], num_prompt_tokens=len(PROMPT)
    )
    engine.forward([second])

    assert (engine.storage.export_pages([1]) != before).any()


def test_penalties_seed_and_position_matter_and_the_seed_not_when_greedy() -> None:
    def tokens(**changes: float) -> list[int]:
        params = {"max_tokens": 6, "ignore_eos": True, "seed": 1} | changes
        return fake_tokens(PROMPT, SamplingParams(**params), model=MODEL)  # type: ignore[arg-type]

    assert tokens() != tokens(seed=2)
    assert tokens() != tokens(presence_penalty=0.5)
    assert tokens(temperature=0) == tokens(temperature=0, seed=2)
    assert fake_tokens(PROMPT, PARAMS, model=MODEL, choice=1) != fake_tokens(
        PROMPT, PARAMS, model=MODEL
    )


def test_generation_ends_with_end_stop_and_context() -> None:
    small = FakeModel(vocab_size=4, eos_token_ids=(1,))

    ended = fake_tokens(PROMPT, SamplingParams(max_tokens=200), model=small)
    stopped = fake_tokens(
        PROMPT, SamplingParams(max_tokens=200, ignore_eos=True, stop_token_ids=(2,)), model=small
    )
    at_least = fake_tokens(PROMPT, SamplingParams(max_tokens=200, min_tokens=30), model=small)
    context = fake_tokens(PROMPT, PARAMS, model=small, max_context_tokens=len(PROMPT) + 3)

    assert ended[-1] == 1
    assert ended.count(1) == 1
    assert stopped[-1] == 2
    assert len(at_least) > 30
    assert 1 not in at_least[:30]
    assert len(context) == 3


def test_logprobs_list_the_drawn_token_first() -> None:
    params = SamplingParams(max_tokens=1, logprobs=3)

    token = MODEL.draw(b"slots", draw_after(PROMPT, [], params))

    assert token.logprob is not None
    assert len(token.top_logprobs) == 3
    assert token.top_logprobs[0] == (token.token_id, token.logprob)


def test_pages_travel_as_bytes_with_equal_digests() -> None:
    engine, other = make_engine(), make_engine()
    generate(engine, [0, 1, 2, 3, 4, 5])

    contents = engine.storage.export_pages([2, 0])
    other.storage.import_pages([40, 50], contents)
    other.storage.copy_pages([(50, 51)])

    assert contents.shape == (2, engine.layout.page_bytes)
    assert contents.dtype == np.uint8
    assert other.storage.digest_pages([40, 51]) == engine.storage.digest_pages([2, 0])
    assert engine.storage.page_bytes == engine.layout.page_bytes


def test_computed_tokens_are_counted() -> None:
    engine = make_engine()

    generate(engine, [0, 1, 2, 3, 4, 5], chunks=(5, 8))

    assert engine.num_computed_tokens == len(PROMPT) + PARAMS.max_tokens - 1
    assert engine.num_passes == 2 + PARAMS.max_tokens - 1


def test_misuse_is_refused() -> None:
    engine = make_engine()
    page = SequenceSlice(token_ids=[1], start=0, page_ids=[3], num_prompt_tokens=1)

    with pytest.raises(AssertionError, match="same page"):
        engine.forward([page, page])
    with pytest.raises(AssertionError, match="too few pages"):
        engine.forward([replace(page, token_ids=[1] * 5, num_prompt_tokens=5)])
    with pytest.raises(AssertionError, match="out of range"):
        engine.storage.copy_pages([(0, 64)])
    with pytest.raises(AssertionError, match="two copies"):
        engine.storage.copy_pages([(0, 2), (1, 2)])
    with pytest.raises(AssertionError, match="is overwritten"):
        engine.storage.copy_pages([(0, 1), (1, 2)])


def test_sequences_of_one_batch_do_not_touch_each_other() -> None:
    engine = make_engine()
    prompts = [tuple(range(n, n + 5 + n)) for n in range(1, 6)]
    slices = []
    for idx, prompt in enumerate(prompts):
        num_pages = num_pages_for(len(prompt), PAGE_SIZE)
        slices.append(
            SequenceSlice(
                token_ids=prompt,
                start=0,
                page_ids=range(idx * 5, idx * 5 + num_pages),
                num_prompt_tokens=len(prompt),
                draws=(draw_after(prompt, [], PARAMS),),
            )
        )

    drawn = engine.forward(slices)

    params = SamplingParams(max_tokens=1, seed=3)
    for prompt, (token,) in zip(prompts, drawn, strict=True):
        assert [token.token_id] == fake_tokens(prompt, params, model=MODEL)
