from dataclasses import dataclass

from kv_cache.prefix_cache import PrefixCache, SequencePages
from worker.prompt_chunk import PromptChunk, next_chunk, next_chunks

TOKENS = list(range(13))


@dataclass(eq=False)
class Prompt:
    pages: SequencePages | None
    tokens: list[int]
    num_computed: int = 0
    num_launched: int = 0
    num_in_flight: int = 0
    is_ended: bool = False
    awaits_masks: bool = False


def scene() -> tuple[PrefixCache, Prompt]:
    """A prompt of three full pages and one token, and the cache that has its pages."""
    cache = PrefixCache(num_pages=16, page_size=4, fingerprint="f")
    return cache, Prompt(cache.reserve(TOKENS, incoming=False), TOKENS)


def launched(prompt: Prompt, most: int) -> PromptChunk[Prompt]:
    chunk = next_chunk(prompt, most)
    assert chunk is not None
    chunk.count_in_flight(1)
    return chunk


def test_chunks_launched_one_behind_the_other_compute_each_token_once() -> None:
    cache, prompt = scene()

    chunks = [launched(prompt, 6) for _ in range(3)]

    assert next_chunk(prompt, 6) is None
    assert [(each.start, each.num_tokens) for each in chunks] == [(0, 6), (6, 6), (12, 1)]
    assert [each.is_last for each in chunks] == [False, False, True]
    num_ready = []
    for chunk in chunks:
        chunk.count_in_flight(-1)
        assert chunk.commit(cache)
        num_ready.append(cache.match(TOKENS).num_ready_pages)
    assert num_ready == [1, 3, 3]
    assert (prompt.num_computed, prompt.num_launched, prompt.num_in_flight) == (13, 0, 0)


def test_a_chunk_behind_one_that_failed_commits_nothing() -> None:
    cache, prompt = scene()
    first, second = launched(prompt, 8), launched(prompt, 8)

    first.count_in_flight(-1)
    prompt.is_ended = True
    second.count_in_flight(-1)

    assert not second.commit(cache)
    assert prompt.num_computed == 0
    assert cache.match(TOKENS).num_ready_pages == 0


def test_prompts_share_the_tokens_of_a_step_in_their_order() -> None:
    _, ended = scene()
    ended.is_ended = True
    prompts = [scene()[1], ended, scene()[1], scene()[1]]

    chunks = next_chunks(prompts, 20)

    assert [each.prompt for each in chunks] == [prompts[0], prompts[2]]
    assert [each.num_tokens for each in chunks] == [13, 7]


def test_a_last_chunk_waits_for_masks_and_leaves_its_tokens_to_others() -> None:
    waits, goes = scene()[1], scene()[1]
    waits.awaits_masks = True

    assert next_chunks([waits], 12)[0].num_tokens == 12
    assert [each.prompt for each in next_chunks([waits, goes], 13)] == [goes]


def test_nothing_of_an_ended_prompt_is_launched() -> None:
    _, prompt = scene()

    prompt.is_ended = True

    assert next_chunk(prompt, 6) is None
