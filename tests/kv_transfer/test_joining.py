"""Work that waits for the same thread and is done in one turn of it."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.joining import JOINED_BYTES, JoinedDigests, take_joined
from tests.kv_transfer.pair import Panic, make_storage
from tests.support.virtual_time import run_inline, run_virtual

T = TypeVar("T")


class Turns:
    """Runs what it is given, each in a second; counts it."""

    def __init__(self) -> None:
        self.num = 0

    async def __call__(self, function: Callable[[], T], /) -> T:
        self.num += 1
        await asyncio.sleep(1.0)
        return function()


def test_digests_that_wait_are_computed_together() -> None:
    async def scenario() -> None:
        storage, turns = make_storage(64, 1), Turns()
        digests = JoinedDigests(storage, run_blocking=turns)
        asked = [[1], [5, 2], [], [9, 1, 3], [7]]

        began = asyncio.get_running_loop().time()
        found = await asyncio.gather(*map(digests.of, asked))

        assert found == [tuple(storage.digest_pages(each)) for each in asked]
        assert turns.num == 1
        first = asyncio.create_task(digests.of([4]))
        await asyncio.sleep(0.5)
        behind = [asyncio.create_task(digests.of([page])) for page in range(20)]
        assert await first == tuple(storage.digest_pages([4]))
        assert await asyncio.gather(*behind) == [
            (digest,) for digest in storage.digest_pages(range(20))
        ]
        assert turns.num == 3
        assert asyncio.get_running_loop().time() - began == 3.0

    run_virtual(scenario())


def test_whoever_leaves_takes_no_digest_of_others() -> None:
    async def scenario() -> None:
        storage, turns = make_storage(64, 1), Turns()
        digests = JoinedDigests(storage, run_blocking=turns)
        asked = [asyncio.create_task(digests.of([page, page + 1])) for page in range(6)]
        await asyncio.sleep(0.5)
        asked[0].cancel()  # while its digests are computed
        late = [asyncio.create_task(digests.of([page])) for page in range(6)]
        await asyncio.sleep(0)
        late[2].cancel()  # before

        found = await asyncio.gather(*asked, *late, return_exceptions=True)

        for index, each in enumerate(found):
            if index in (0, 8):
                assert isinstance(each, asyncio.CancelledError)
            else:
                pages = [index, index + 1] if index < 6 else [index - 6]
                assert each == tuple(storage.digest_pages(pages))
        assert await digests.of([3]) == tuple(storage.digest_pages([3]))

    run_virtual(scenario())


def test_an_error_is_told_to_whoever_asked_for_it_alone() -> None:
    async def scenario() -> None:
        storage = make_storage(64, 1)
        digests = JoinedDigests(storage, run_blocking=run_inline)

        wrong, right = await asyncio.gather(
            digests.of([64]), digests.of([1]), return_exceptions=True
        )

        assert isinstance(wrong, AssertionError)
        assert right == tuple(storage.digest_pages([1]))
        with pytest.raises(AssertionError, match="out of range"):
            await digests.of([64])

    run_virtual(scenario())


@pytest.mark.parametrize("found", ["too few", "too many", "panic"])
def test_a_fault_of_one_ends_none_that_was_asked_for_with_it_or_behind(found: str) -> None:
    async def scenario() -> None:
        storage, turns = make_storage(64, 1), Turns()
        digest = storage.digest_pages

        def spoiled(page_ids: Sequence[int]) -> list[bytes]:
            digests = digest(page_ids)
            if 7 not in page_ids:
                return digests
            if found == "panic":
                raise Panic
            return digests[:-1] if found == "too few" else [b"", *digests]

        storage.digest_pages = spoiled  # type: ignore[method-assign]
        digests = JoinedDigests(storage, run_blocking=turns)
        wanted = [[1], [7, 2], [3, 4]]
        asked = [asyncio.create_task(digests.of(pages)) for pages in wanted]
        await asyncio.sleep(0.5)
        behind = asyncio.create_task(digests.of([5]))

        _, late = await asyncio.wait([*asked, behind], timeout=10)

        assert not late, "digests are waited for that nobody computes"
        for task, pages in zip([*asked, behind], [*wanted, [5]], strict=True):
            if 7 in pages:
                with pytest.raises(Panic if found == "panic" else AssertionError):
                    await task
            else:
                assert await task == tuple(digest(pages))
        assert await digests.of([6]) == tuple(digest([6]))

    run_virtual(scenario())


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1), page_bytes=st.sampled_from([8 << 20, 64 << 20])
)
def test_what_is_joined_is_what_comes_next_and_not_too_large(
    sizes: list[int], page_bytes: int
) -> None:
    waiting = deque(sizes)

    turns = []
    while waiting:
        turns.append(take_joined(waiting, lambda size: size, page_bytes))

    assert [size for turn in turns for size in turn] == sizes
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        assert len(turn) == 1 or sum(turn) * page_bytes <= JOINED_BYTES
        if following is not None:
            assert (sum(turn) + following[0]) * page_bytes > JOINED_BYTES


def test_pages_larger_than_a_turn_are_taken_one_by_one() -> None:
    waiting = deque([1, 1])

    assert take_joined(waiting, lambda size: size, 2 * JOINED_BYTES) == [1]
    assert waiting == deque([1])
