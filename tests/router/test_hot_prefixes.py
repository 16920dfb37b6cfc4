"""Prefixes that prompts have in common, counted and shown without what is in them."""

from pagewire.protos import inference_pb2
from router.hot_prefixes import HotPrefixes
from router.wire import hot_prefix
from tests.router.scripted_worker import PAGE_SIZE, ScriptedWorker, running_router
from tests.support.virtual_time import run_virtual

PAGES = [bytes([page]) * 16 for page in range(9)]


def hottest(prefixes: HotPrefixes, count: int = 10) -> list[tuple[bytes, int, int]]:
    return [(p.page_hash, p.num_tokens, p.num_hits) for p in prefixes.hottest(count)]


def test_the_longest_known_prefix_of_each_prompt_is_counted() -> None:
    prefixes = HotPrefixes(max_prefixes=10)
    for num_known in (3, 0, 5, 3, 3, 5, 1):
        prefixes.add("", PAGES, num_known=num_known, page_size=16)

    assert hottest(prefixes) == [(PAGES[2], 48, 3), (PAGES[4], 80, 2), (PAGES[0], 16, 1)]
    assert hottest(prefixes, 1) == [(PAGES[2], 48, 3)]


def test_those_that_no_prompt_had_for_longest_are_forgotten() -> None:
    prefixes = HotPrefixes(max_prefixes=2)
    for num_known in (1, 2, 1, 3):
        prefixes.add("", PAGES, num_known=num_known, page_size=16)

    assert hottest(prefixes) == [(PAGES[0], 16, 2), (PAGES[2], 48, 1)]


def test_what_is_shown_is_too_little_of_the_hash_to_find_its_pages_with() -> None:
    prefixes = HotPrefixes(max_prefixes=2)
    prefixes.add("", PAGES, num_known=2, page_size=16)
    [hot] = prefixes.hottest(1)
    shown = hot_prefix(hot, ["decode-0"])

    assert (shown.id, shown.tokens, shown.hits) == (PAGES[1][:4], 32, 1)
    assert list(shown.workers) == ["decode-0"]


def test_the_status_tells_of_prefixes_that_prompts_shared() -> None:
    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0")) as tested:
            shared = list(range(10, 10 + 3 * PAGE_SIZE))
            for last in (50, 60, 70):
                await tested.generate(prompt=[*shared, last, last, last, last, last])
            await tested.generate(prompt=[99] * 9)

            request = inference_pb2.GetClusterStatusRequest()
            status = await tested.stub.GetClusterStatus(request)

        [prefix] = status.hot_prefixes
        assert (prefix.tokens, prefix.hits) == (3 * PAGE_SIZE, 2)
        assert len(prefix.id) == 4
        # No worker has told of its pages: they are expected there, not yet held.
        assert list(prefix.workers) == []

    run_virtual(main())
