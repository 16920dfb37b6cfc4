from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_kernels.decode.plan import (
    FIELDS,
    ITEM_TOKENS,
    DecodeItems,
    SplitRule,
    lane_excess,
    max_slots,
    plan_decode,
)

RULE = SplitRule(split_len=256, splits_per_segment=4)
FIRST_ENTRY, BEGIN, END, FIRST_TOKEN, SLOT, NUM_SLOTS, NUM_ITEMS, IS_TAIL, OTHERS, LANE_ITEMS = map(
    FIELDS.index,
    (
        "first_entry",
        "begin",
        "end",
        "first_token",
        "slot",
        "num_slots",
        "num_items",
        "is_tail",
        "others",
        "lane_items",
    ),
)


def plan(
    kv_lens: list[int],
    *,
    num_lanes: int = 33,
    window: int | None = None,
    keeps_whole: bool = True,
    num_busy_lanes: int | None = None,
    first_private: list[int] | None = None,
    num_shared_slots: list[int] | None = None,
) -> DecodeItems:
    return plan_decode(
        kv_lens,
        rows=range(len(kv_lens)),
        table_starts=range(len(kv_lens)),  # names the request
        rule=RULE,
        sliding_window=window,
        num_lanes=num_lanes,
        keeps_whole=keeps_whole,
        num_busy_lanes=num_busy_lanes,
        first_private=first_private,
        num_shared_slots=num_shared_slots,
    )


def items_of(items: DecodeItems, request: int) -> np.ndarray:
    """The request's items as the kernel meets them in the lanes, in key order."""
    mine = np.array([item for lane in lanes_of(items) for item in lane])
    mine = mine[mine[:, FIRST_ENTRY] == request]
    return mine[np.argsort(mine[:, BEGIN])]


def ranges_of(items: DecodeItems, request: int) -> list[tuple[int, int]]:
    return [(int(item[BEGIN]), int(item[END])) for item in items_of(items, request)]


def lanes_of(items: DecodeItems) -> list[list[np.ndarray]]:
    """What each lane does, read from the table as the kernel reads it."""
    lanes = []
    for lane in range(items.num_lanes):
        first = items.table[lane]
        others = first[OTHERS] + np.arange(first[LANE_ITEMS] - 1)
        lanes.append([first, *items.table[others]] if first[LANE_ITEMS] else [])
    return lanes


def loads_of(items: DecodeItems) -> np.ndarray:
    return np.array([sum(item[END] - item[BEGIN] for item in lane) for lane in lanes_of(items)])


def slots_filled(item: np.ndarray) -> list[int]:
    """The slots that the kernel stores for an item, by its rule of when to store."""
    count = 1
    for border in range(item[BEGIN] + RULE.split_len, item[END], RULE.split_len):
        is_alone = item[BEGIN] % RULE.segment_len and (
            border // RULE.segment_len == item[BEGIN] // RULE.segment_len
        )
        count += bool(border % RULE.segment_len == 0 or is_alone)
    return list(range(item[SLOT], item[SLOT] + count))


def test_one_request_is_spread_over_all_lanes():
    assert ranges_of(plan([1024]), 0) == [(0, 256), (256, 512), (512, 768), (768, 1024)]
    assert plan([33 * 256]).num_items == 33


def test_requests_that_fit_the_lanes_one_by_one_are_not_cut():
    items = plan([1024] * 32)

    assert items.num_items == 32
    assert items.num_slots == 0
    assert loads_of(items).tolist() == [1024] * 32 + [0]


@pytest.mark.parametrize(("keeps_whole", "num_slots"), [(True, [0] * 4), (False, [0, 0, 0, 5])])
def test_a_request_in_one_item_needs_slots_only_for_several_segments(
    keeps_whole: bool, num_slots: list[int]
):
    items = plan([200, 256, 1024, 5000], num_lanes=1, keeps_whole=keeps_whole)

    assert items.fields[:, NUM_SLOTS].tolist() == num_slots
    assert items.num_slots == sum(num_slots)


def test_requests_are_whole_where_lanes_can_be_equal_without_a_cut():
    items = plan([1024] * 64)

    assert items.num_items == 64
    assert items.num_slots == 0
    assert loads_of(items).tolist() == [2048] * 32 + [0]


def test_a_long_request_is_cut_into_whole_segments_with_short_ones_between_them():
    items = plan([65_536] + [512] * 63)
    long = items_of(items, 0)

    assert ((long[:, END] - long[:, BEGIN]) % RULE.segment_len == 0).all()
    assert long[0, NUM_SLOTS] == 65_536 // RULE.segment_len
    assert [len(lane) > 1 for lane in lanes_of(items)] == [True] * 33


@pytest.mark.parametrize("phase", range(4))
def test_pieces_of_a_long_request_that_begins_within_a_segment_end_with_segments(phase: int):
    begin = phase * RULE.split_len
    items = plan([begin + 65_536] + [512] * 63, first_private=[begin] + [0] * 63)
    long = items_of(items, 0)

    assert (long[1:, BEGIN] % RULE.segment_len == 0).all()
    num_splits = -phase % 4  # before the first segment that the request has as a whole
    num_segments = -(-(65_536 - num_splits * RULE.split_len) // RULE.segment_len)
    assert long[0, NUM_SLOTS] == num_splits + num_segments


def test_long_requests_that_begin_within_segments_fit_the_bound_of_slots():
    window = 331_371
    lens = [window + 268] * 22 + [300]
    items = plan_decode(
        lens,
        rows=range(23),
        table_starts=range(23),
        rule=SplitRule(),
        sliding_window=window,
        num_lanes=132,
        keeps_whole=False,
    )
    bound = max_slots(23, sum(lens), 132, SplitRule(), begins_within=True)

    assert items.num_slots <= bound


def test_pieces_that_leave_no_room_in_any_lane_leave_the_rest_to_all():
    # 16 pieces of 8 splits and 64 tokens make a lane's share: 131 splits and 4 requests.
    with np.errstate(divide="raise", invalid="raise"):
        items = plan([16 * 8192, 256, 256, 256], num_lanes=16)

    assert ranges_of(items, 0) == [(8192 * lane, 8192 * (lane + 1)) for lane in range(16)]
    assert loads_of(items).max() <= 8192 + 3 * 256


def test_lanes_without_work_are_the_last_ones():
    num_items = [len(lane) for lane in lanes_of(plan([300, 300]))]

    assert num_items == [1] * 4 + [0] * 29


@pytest.mark.parametrize(
    "kv_lens",
    [[8192] * 128, [1024] * 256, [65_536] + [512] * 63, [32_768] * 4 + [1024] * 60, [16_384]],
)
def test_lanes_are_equally_loaded(kv_lens: list[int]):
    loads = loads_of(plan(kv_lens))

    assert loads.max() <= loads.mean() + 512


LENS = st.lists(st.integers(0, 9000), min_size=1, max_size=40)


@given(
    lens=LENS,
    num_lanes=st.integers(1, 70),
    num_idle=st.integers(0, 40),
    window=st.none() | st.integers(1, 3000),
    keeps_whole=st.booleans(),
)
def test_items_cover_every_visible_token_once_and_fill_every_slot_once(
    lens: list[int], num_lanes: int, num_idle: int, window: int | None, keeps_whole: bool
):
    items = plan(
        lens,
        num_lanes=num_lanes + num_idle,
        num_busy_lanes=num_lanes,
        window=window,
        keeps_whole=keeps_whole,
    )

    filled: list[int] = []
    for request, kv_len in enumerate(lens):
        mine = items_of(items, request)
        first_token = max(kv_len - window, 0) if window else 0
        ranges = ranges_of(items, request)
        assert ranges[0][0] == first_token // 256 * 256
        assert ranges[-1][1] == kv_len
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
        assert all(begin % 256 == 0 for begin, _ in ranges)
        assert (mine[:, FIRST_TOKEN] == first_token).all()
        assert (mine[:, NUM_ITEMS] == len(mine)).all()
        assert mine[:, IS_TAIL].tolist() == [0] * (len(mine) - 1) + [1]
        if mine[0, NUM_SLOTS]:
            slots = [slot for item in mine for slot in slots_filled(item)]
            first = int(items.first_slots[request])
            assert slots == list(range(first, first + mine[0, NUM_SLOTS]))
            filled += slots
        else:
            assert len(mine) == 1
            assert keeps_whole or len(slots_filled(mine[0])) == 1
    assert sorted(filled) == list(range(items.num_slots))
    assert sum(len(lane) for lane in lanes_of(items)[:num_lanes]) == items.num_items
    assert not any(lanes_of(items)[num_lanes:])
    assert items.num_items <= len(lens) + 2 * num_lanes
    bound = max_slots(len(lens), sum(lens), num_lanes, RULE, begins_within=window is not None)
    assert items.num_slots <= bound


def test_private_items_begin_behind_the_shared_part_and_follow_its_slots():
    first_private, num_shared = [1024, 0, 768], [1, 0, 3]
    items = plan([3000, 1024, 1300], first_private=first_private, num_shared_slots=num_shared)

    for request in range(3):
        mine = items_of(items, request)
        slots = [slot for item in mine for slot in slots_filled(item)]
        first = items.first_slots[request] + num_shared[request]
        assert mine[0, BEGIN] == first_private[request]
        assert slots == list(range(first, first + len(slots)))
        assert (mine[:, NUM_SLOTS] == num_shared[request] + len(slots)).all()
        assert (mine[:, NUM_ITEMS] == len(mine)).all()


def test_a_request_of_one_item_behind_a_shared_slot_is_folded_too():
    items = plan([1200], first_private=[1024], num_shared_slots=[1])

    assert items.fields[0, [NUM_SLOTS, NUM_ITEMS]].tolist() == [2, 1]
    assert items.num_slots == 2


@pytest.mark.parametrize("lens", [[1024] * 32, [2048] * 3, [5000, 100, 256, 0], [700] * 90])
def test_the_excess_of_the_busiest_lane_is_that_of_the_plan(lens: list[int]):
    items = plan(lens)
    lanes = lanes_of(items)
    splits = [sum(-(-(item[END] - item[BEGIN]) // 256) for item in lane) for lane in lanes]
    loads = np.array(splits) * 256 + np.array([len(lane) for lane in lanes]) * ITEM_TOKENS

    excess = lane_excess(np.array(lens), num_lanes=33, rule=RULE)

    assert excess == pytest.approx(loads.max() / loads.mean())


def test_a_batch_of_no_requests_leaves_all_lanes_empty():
    assert lanes_of(plan([])) == [[]] * 33
