from itertools import pairwise

import numpy as np
import pytest

from attn_kernels.decode_plan import FIELDS, DecodeItems, SplitRule, plan_decode

RULE = SplitRule(split_len=256, splits_per_segment=4)
FIRST_ENTRY, SLOT, NUM_SLOTS, NUM_ITEMS, ENDS_SEGMENT = map(
    FIELDS.index, ("first_entry", "slot", "num_slots", "num_items", "ends_segment")
)


def plan(
    kv_lens: list[int],
    *,
    num_programs: int = 264,
    window: int | None = None,
    max_items: int = 10_000,
    first_private: list[int] | None = None,
    num_shared_slots: list[int] | None = None,
) -> DecodeItems:
    return plan_decode(
        kv_lens,
        rows=range(len(kv_lens)),
        table_starts=range(len(kv_lens)),
        rule=RULE,
        sliding_window=window,
        num_programs=num_programs,
        num_kv_heads=8,
        max_items=max_items,
        first_private=first_private,
        num_shared_slots=num_shared_slots,
    )


def ranges_of(items: DecodeItems, request: int) -> list[tuple[int, int]]:
    mine = items.fields[items.fields[:, FIRST_ENTRY] == request]
    return [(int(row[2]), int(row[3])) for row in mine[np.argsort(mine[:, 2])]]


def test_few_tokens_are_cut_into_splits_to_use_the_whole_device():
    items = plan([1024])

    assert ranges_of(items, 0) == [(0, 256), (256, 512), (512, 768), (768, 1024)]
    assert items.num_slots == 4


def test_many_tokens_are_cut_into_segments():
    items = plan([1024 + 5] * 256)

    assert ranges_of(items, 3) == [(0, 1024), (1024, 1029)]
    assert items.num_slots == 2 * 256


def test_a_request_of_one_item_needs_no_slot():
    items = plan([200, 256])

    assert items.num_slots == 0
    assert items.fields[:, NUM_SLOTS].tolist() == [0, 0]


def test_long_items_come_first():
    items = plan([300, 65_536, 40])

    lengths = items.fields[:, 3] - items.fields[:, 2]
    assert (np.diff(lengths) <= 0).all()


@pytest.mark.parametrize("num_programs", [1, 264, 100_000])
def test_items_cover_every_token_of_every_request_once(num_programs: int):
    rng = np.random.default_rng(0)
    lens = rng.integers(1, 9_000, size=50).tolist()
    items = plan(lens, num_programs=num_programs)

    for request, kv_len in enumerate(lens):
        ranges = ranges_of(items, request)
        assert ranges[0][0] == 0
        assert ranges[-1][1] == kv_len
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
        assert all(begin % 256 == 0 for begin, _ in ranges)
    used = items.fields[items.fields[:, NUM_SLOTS] > 0][:, SLOT]
    assert sorted(used.tolist()) == list(range(items.num_slots))


def test_slots_of_a_request_follow_its_tokens():
    items = plan([4096, 2048])

    for request in (0, 1):
        mine = items.fields[items.fields[:, FIRST_ENTRY] == request]
        mine = mine[np.argsort(mine[:, 2])]
        first = items.first_slots[request]
        assert mine[:, SLOT].tolist() == list(range(first, first + len(mine)))
        assert (mine[:, NUM_SLOTS] == len(mine)).all()
        assert (mine[:, NUM_ITEMS] == len(mine)).all()


def test_a_window_leaves_out_what_is_before_it_but_cuts_at_the_same_places():
    items = plan([2000], window=300)

    assert ranges_of(items, 0) == [(1536, 1792), (1792, 2000)]
    assert (items.fields[:, 4] == 1700).all()
    assert items.fields[:, ENDS_SEGMENT].tolist() == [0, 1]


def test_private_items_begin_behind_the_shared_part_and_follow_its_slots():
    items = plan([3000, 1024, 1300], first_private=[1024, 0, 768], num_shared_slots=[1, 0, 3])

    assert ranges_of(items, 0)[0][0] == 1024
    assert ranges_of(items, 1)[0][0] == 0
    assert ranges_of(items, 2)[0][0] == 768
    for request, num_shared in enumerate([1, 0, 3]):
        mine = items.fields[items.fields[:, FIRST_ENTRY] == request]
        mine = mine[np.argsort(mine[:, 2])]
        first = items.first_slots[request] + num_shared
        assert mine[:, SLOT].tolist() == list(range(first, first + len(mine)))
        assert (mine[:, NUM_SLOTS] == num_shared + len(mine)).all()
        assert (mine[:, NUM_ITEMS] == len(mine)).all()


def test_a_segment_that_begins_in_a_shared_slot_is_continued_split_by_split():
    # So many requests that segments are preferred.
    items = plan([2300] * 300, first_private=[512] * 300, num_shared_slots=[1] * 300)

    assert ranges_of(items, 7) == [(512, 768), (768, 1024), (1024, 2048), (2048, 2300)]
    mine = items.fields[items.fields[:, FIRST_ENTRY] == 7]
    assert mine[np.argsort(mine[:, 2])][:, ENDS_SEGMENT].tolist() == [0, 1, 1, 1]


def test_a_request_of_one_item_behind_a_shared_slot_is_folded_too():
    items = plan([1200], first_private=[1024], num_shared_slots=[1])

    assert items.fields[0, [NUM_SLOTS, NUM_ITEMS]].tolist() == [2, 1]
    assert items.num_slots == 2


def test_splits_are_not_considered_beyond_the_buffers():
    assert plan([1024], max_items=3).num_items == 1


def test_a_skewed_batch_is_spread_over_all_programs():
    items = plan([65_536] + [512] * 63)

    load = np.zeros(264)
    lengths = np.repeat(items.fields[:, 3] - items.fields[:, 2], 8)
    for unit, length in enumerate(lengths):
        load[unit % 264] += length
    assert load.max() < 1.15 * load.mean()
