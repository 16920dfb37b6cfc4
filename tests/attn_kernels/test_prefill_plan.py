import numpy as np
import pytest

from attn_kernels.errors import CapacityError
from attn_kernels.prefill import plan
from attn_kernels.prefill.plan import (
    UNIT_COST,
    PrefillBatch,
    PrefillCapacity,
    UnitTable,
    plan_items,
    plan_units,
)

GROUP, NUM_KV_HEADS, BLOCK = 4, 8, 128
TOKEN_BYTES = 512  # of one head, key and value


def batch_of(*lens: tuple[int, int]) -> PrefillBatch:
    qo_lens = np.array([qo for qo, _ in lens], dtype=np.int64)
    return PrefillBatch(
        requests=np.arange(len(lens)),
        first_rows=np.cumsum(qo_lens) - qo_lens,
        qo_lens=qo_lens,
        kv_lens=np.array([kv for _, kv in lens], dtype=np.int64),
    )


def units_of(batch: PrefillBatch, *, max_programs: int = 132, window: int | None = None):
    return plan_units(
        batch,
        group=GROUP,
        num_kv_heads=NUM_KV_HEADS,
        block_m=BLOCK,
        block_n=BLOCK,
        sliding_window=window,
        token_bytes=TOKEN_BYTES,
        max_programs=max_programs,
    )


def loads_of(table: UnitTable) -> list[float]:
    loads = []
    for first, last in zip(table.unit_indptr[:-1], table.unit_indptr[1:], strict=True):
        _, _, qo_lens, kv_lens, tiles, _ = table.units[first:last].astype(int).T
        last_tokens = np.minimum((tiles * BLOCK + BLOCK - 1) // GROUP, qo_lens - 1)
        key_tiles = (kv_lens - qo_lens + last_tokens) // BLOCK + 1
        loads.append(float((key_tiles + UNIT_COST).sum()))
    return loads


def test_items_cover_each_row_once_and_the_longest_come_first():
    items = plan_items(batch_of((33, 40), (1, 200), (0, 7)), group=GROUP, block_m=BLOCK)

    assert items.tolist() == [[1, 33, 1, 200, 0], [0, 0, 33, 40, 1], [0, 0, 33, 40, 0]]


@pytest.mark.parametrize("window", [None, 1000])
def test_each_tile_of_each_head_is_one_unit(window: int | None):
    batch = batch_of((2048, 2048), (512, 4096), (1, 1), (77, 30_000))

    table = units_of(batch, window=window)

    items = plan_items(batch, group=GROUP, block_m=BLOCK)
    expected = sorted([*item, head] for item in items.tolist() for head in range(NUM_KV_HEADS))
    assert sorted(table.units.tolist()) == expected
    assert table.unit_indptr[0] == 0
    assert table.unit_indptr[-1] == len(expected)
    assert (np.diff(table.unit_indptr) >= 1).all()


def test_each_unit_of_a_short_prompt_has_a_program():
    batch = batch_of((500, 600), (0, 3), (1, 1024))

    table = units_of(batch, max_programs=17 * NUM_KV_HEADS)

    items = plan_items(batch, group=GROUP, block_m=BLOCK)
    expected = [[*item, head] for item in items.tolist() for head in range(NUM_KV_HEADS)]
    assert table.units.tolist() == expected
    assert table.unit_indptr.tolist() == list(range(17 * NUM_KV_HEADS + 1))


@pytest.mark.parametrize(
    "lens",
    [[(8192, 8192)], [(2048, 2048)] * 4, [(2048, 34_816)], [(512, 4096)] * 8, [(16_384, 16_384)]],
)
def test_programs_get_equal_shares(lens: list[tuple[int, int]]):
    loads = loads_of(units_of(batch_of(*lens)))

    assert max(loads) <= 1.05 * sum(loads) / len(loads)


def test_a_long_unit_starts_early_though_its_head_comes_late():
    table = units_of(batch_of((32, 60_000), *[(1024, 1024)] * 8))

    first_units = table.units[table.unit_indptr[:-1]]
    assert sorted(first_units[first_units[:, 3] == 60_000][:, 5]) == list(range(NUM_KV_HEADS))
    assert max(loads_of(table)) == 60_000 // BLOCK + 1 + UNIT_COST


def test_heads_that_overflow_the_cache_together_come_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
):
    batch = batch_of((4096, 4096))
    monkeypatch.setattr(plan, "LONG_PART", float("inf"))

    monkeypatch.setattr(plan, "L2_BYTES", 2 * 4096 * TOKEN_BYTES)
    pairs = units_of(batch, max_programs=1).units[:, 5]
    monkeypatch.setattr(plan, "L2_BYTES", 1)
    singles = units_of(batch, max_programs=1).units[:, 5]

    tiles = 4096 * GROUP // BLOCK
    assert (pairs // 2 == np.repeat(np.arange(4), 2 * tiles)).all()
    assert (singles == np.repeat(np.arange(8), tiles)).all()


def test_a_batch_without_new_tokens_has_no_program():
    table = units_of(batch_of((0, 5)))

    assert table.unit_indptr.tolist() == [0]
    assert table.units.shape == (0, plan.UNIT_FIELDS)


def test_programs_that_are_added_are_idle():
    table = units_of(batch_of((0, 9), (3, 40), (5, 5)), max_programs=6)

    padded = table.with_programs(9)

    assert padded.unit_indptr[:7].tolist() == table.unit_indptr.tolist()
    assert np.diff(padded.unit_indptr)[6:].tolist() == [1, 1, 1]
    assert (padded.units[: len(table.units)] == table.units).all()
    for request, _, qo_len, kv_len, tile, head in padded.units[len(table.units) :]:
        assert request in (1, 2), "the page of a request without new tokens may not be read"
        assert (qo_len, kv_len, tile, head) == (0, 1, 0, 0)


@pytest.mark.parametrize("lens", [[1] * 7, [33], [31, 2], [64, 1, 1], [129, 0, 0, 0, 0, 0, 1]])
def test_a_batch_of_any_lengths_has_no_more_items_than_its_capacity(lens: list[int]):
    batch = batch_of(*((qo, qo + 5) for qo in lens))
    capacity = PrefillCapacity(max_tokens=sum(lens), max_requests=len(lens))

    capacity.check(batch)
    most = capacity.max_items(group=GROUP, block_m=BLOCK)

    assert len(plan_items(batch, group=GROUP, block_m=BLOCK)) <= most


def test_a_batch_above_the_capacity_is_refused():
    capacity = PrefillCapacity(max_tokens=8, max_requests=2)

    with pytest.raises(CapacityError, match="9 new tokens, at most 8 are planned"):
        capacity.check(batch_of((4, 4), (5, 5)))
    with pytest.raises(CapacityError, match="3 requests, at most 2 are planned"):
        capacity.check(batch_of((4, 4), (0, 5), (1, 1)))
