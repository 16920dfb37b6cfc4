"""What plans of a batch refuse, and runs that do not fit their plan."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attn_kernels.cascade.launch import CascadeAttention
from attn_kernels.decode.launch import DecodeAttention, DecodeTile
from attn_kernels.decode.plan import SplitRule
from attn_kernels.errors import (
    CapacityError,
    DtypeError,
    KernelInputError,
    PageTableError,
    PlanError,
    ShapeError,
)
from attn_kernels.prefill.launch import PrefillAttention

NUM_PAGES, PAGE_SIZE = 8, 16
PAGES = torch.zeros(NUM_PAGES, 2, 2, 2, PAGE_SIZE, 64)
OPTIONS = {"num_qo_heads": 8, "scale": 1.0}
Attention = DecodeAttention | CascadeAttention | PrefillAttention


pytestmark = pytest.mark.usefixtures("launches")


def decode(**options: object) -> DecodeAttention:
    return DecodeAttention(PAGES, **OPTIONS, max_requests=4, max_kv_tokens=128, **options)


def cascade() -> CascadeAttention:
    attention = CascadeAttention(
        PAGES,
        **OPTIONS,
        max_requests=4,
        max_kv_tokens=128,
        rule=SplitRule(split_len=16, splits_per_segment=2),
        decode_tile=DecodeTile(block_n=16, num_warps=4, num_stages=2, programs_per_sm=1),
    )
    attention.model = attention.model.sharing_all()
    return attention


def prefill() -> PrefillAttention:
    return PrefillAttention(PAGES, **OPTIONS)


def queries(num_rows: int) -> torch.Tensor:
    return torch.zeros(num_rows, 8, 64)


def run_decode(attention: DecodeAttention | CascadeAttention, rows: int, entries: int) -> None:
    attention.run(queries(rows), 0, torch.zeros(entries, dtype=torch.int32))


def run_prefill(attention: PrefillAttention, rows: int, borders: int, entries: int) -> None:
    tables = (torch.zeros(size, dtype=torch.int32) for size in (borders, entries))
    attention.run(queries(rows), 0, *tables)


def starts(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


BATCHES: list[tuple[dict[str, Any], type[KernelInputError], str]] = [
    ({"kv_lens": [5, -1]}, ShapeError, "kv_lens has -1, must be 0 or more"),
    ({"kv_lens": [[5, 5]]}, ShapeError, r"kv_lens has shape \[1, 2\], must be \[any\]"),
    ({"kv_lens": np.ones(2)}, DtypeError, "kv_lens is float64, must be integers"),
    ({"kv_lens": [5, 2**64]}, DtypeError, "kv_lens is object, must be integers of at most 64"),
    ({"kv_lens": [5.7, 5.0]}, DtypeError, "kv_lens is float64, must be integers"),
    ({"kv_lens": torch.ones(2)}, DtypeError, "kv_lens is float32, must be integers"),
    ({"kv_lens": [[5], [5, 5]]}, DtypeError, "kv_lens is not a sequence of integers"),
    ({"rows": [0, -2]}, ShapeError, "rows has -2, must be 0 or more"),
    ({"rows": [3, 3]}, ShapeError, "rows has 3 more than once, must be different"),
    ({"rows": [0, 1, 2]}, ShapeError, r"rows has shape \[3\], must be \[2\]"),
    ({"table_starts": starts(0)}, ShapeError, r"table_starts has shape \[1\], must be \[2\]"),
    ({"table_starts": starts(0, -1)}, PageTableError, "table_starts has -1, must be 0 or more"),
    ({"kv_lens": [1] * 5}, CapacityError, "5 requests, at most 4 are planned"),
    ({"kv_lens": [64, 65]}, CapacityError, "129 tokens, at most 128 are planned"),
]
DECODE_BATCHES = [
    (
        {"first_private": [0], "num_shared_slots": [0, 0]},
        ShapeError,
        r"first_private has shape \[1\], must be \[2\]",
    ),
    (
        {"first_private": [0, 0], "num_shared_slots": [0]},
        ShapeError,
        r"num_shared_slots has shape \[1\], must be \[2\]",
    ),
    ({"num_shared_slots": [0, -1]}, ShapeError, "num_shared_slots has -1, must be 0 or more"),
]
CASCADE_BATCHES = [
    ({"page_indices": [0, 8]}, PageTableError, "page_indices has 8 at index 1, must be 0 to 7"),
    ({"page_indices": [-1, 0]}, PageTableError, "page_indices has -1 at index 0, must be 0 to 7"),
    ({"page_indices": [0]}, ShapeError, "page_indices has 1 entries, must have at least the .* 2"),
    ({"page_indices": [[0, 0]]}, ShapeError, r"page_indices has shape \[1, 2\], must be \[any\]"),
    ({"page_indices": [0.0, 1.0]}, DtypeError, "page_indices is float64, must be integers"),
]


def cases(*lists: list[Any]) -> Any:
    rows = [row for each in lists for row in each]
    return pytest.mark.parametrize(("changes", "error", "message"), rows, ids=[r[2] for r in rows])


@cases(BATCHES, DECODE_BATCHES)
def test_a_decode_plan_that_is_refused_leaves_the_last_one_as_it_was(
    changes: dict[str, Any], error: type[KernelInputError], message: str, launches: list[object]
):
    attention = decode()
    attention.plan([20, 3])
    planned = attention._plan.device_buffer.clone()

    with pytest.raises(error, match=message):
        attention.plan(**({"kv_lens": [5, 5]} | changes))

    assert torch.equal(attention._plan.device_buffer, planned)
    with pytest.raises(ShapeError, match=r"kv_page_indices has 2 entries, .* the plan's 3"):
        run_decode(attention, 2, 2)
    assert not launches
    run_decode(attention, 2, 3)
    assert len(launches) == 1


@cases(BATCHES, CASCADE_BATCHES)
def test_a_cascade_plan_that_is_refused_leaves_the_last_one_as_it_was(
    changes: dict[str, Any], error: type[KernelInputError], message: str, launches: list[object]
):
    attention = cascade()
    attention.plan([20, 20], starts(0, 2), starts(1, 2, 1, 3))
    assert attention.num_shared_items == 1
    buffers = (attention._plan.device_buffer, attention.decode._plan.device_buffer)
    planned = [each.clone() for each in buffers]
    batch = {"kv_lens": [5, 5], "table_starts": starts(0, 1), "page_indices": [0, 1]} | changes
    if "page_indices" in changes:
        batch["page_indices"] = np.array(changes["page_indices"])

    with pytest.raises(error, match=message):
        attention.plan(**batch)

    assert attention.num_shared_items == 1
    assert all(map(torch.equal, buffers, planned))
    with pytest.raises(ShapeError, match=r"kv_page_indices has 3 entries, .* the plan's 4"):
        run_decode(attention, 2, 3)
    assert not launches
    run_decode(attention, 2, 4)
    assert len(launches) == 2


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_entries_that_no_request_uses_may_be_any(dtype: type, launches: list[object]):
    attention = cascade()
    page_indices = np.array([-1, 7, 99, 0, -5, 99, 2], dtype=dtype)

    attention.plan([16, 0, 17], starts(1, -3, 3), np.append(page_indices[:4], page_indices[-1:]))
    run_decode(attention, 3, 5)
    assert len(launches) == 1
    with pytest.raises(PageTableError, match="page_indices has -5 at index 4, must be 0 to 7"):
        attention.plan([16, 0, 17], starts(1, -3, 3), page_indices)


@pytest.mark.parametrize(
    ("kv_lens", "error", "message"),
    [
        ([21, 21, 1], ShapeError, r"kv_lens has shape \[3\], must be \[2\]"),
        ([21, -1], ShapeError, "kv_lens has -1, must be 0 or more"),
        ([21, 9], ShapeError, "first_private is 16, .* below kv_len 9"),
        ([128, 1], CapacityError, "129 tokens, at most 128"),
    ],
)
def test_a_next_step_that_is_refused_leaves_the_last_plan_as_it_was(
    kv_lens: list[int], error: type[KernelInputError], message: str
):
    attention = cascade()
    attention.plan([20, 20], starts(0, 2), starts(1, 2, 1, 3))
    planned = attention.decode._plan.device_buffer.clone()

    with pytest.raises(error, match=message):
        attention.plan_next_step(kv_lens)

    assert torch.equal(attention.decode._plan.device_buffer, planned)
    with pytest.raises(ShapeError, match=r"kv_page_indices has 3 entries, .* the plan's 4"):
        run_decode(attention, 2, 3)


def test_a_next_step_may_need_a_longer_table(launches: list[object]):
    attention = cascade()
    attention.plan([20, 32], starts(0, 2), starts(1, 2, 1, 3))

    attention.plan_next_step([21, 33])

    with pytest.raises(ShapeError, match=r"kv_page_indices has 4 entries, .* the plan's 5"):
        run_decode(attention, 2, 4)
    assert not launches


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kv_lens": [20]}, ShapeError, r"kv_lens has shape \[1\], must be \[2\]"),
        ({"qo_lens": [1, -1]}, ShapeError, "-1 new tokens of 5, must be 0 to all of them"),
        ({"qo_lens": [1, 6]}, ShapeError, "6 new tokens of 5, must be 0 to all of them"),
        ({"first_rows": [0]}, ShapeError, r"first_rows has shape \[1\], must be \[2\]"),
        ({"first_rows": [-1, 3]}, ShapeError, "first_rows has -1, must be 0 or more"),
        (
            {"qo_lens": [2, 3], "first_rows": [4, 2]},
            ShapeError,
            "row 4 is of two requests, must be of one; see first_rows",
        ),
        ({"requests": [0, 1, 2]}, ShapeError, r"requests has shape \[3\], must be \[2\]"),
        ({"requests": [0, -1]}, ShapeError, "requests has -1, must be 0 or more"),
        ({"requests": np.zeros(2)}, DtypeError, "requests is float64, must be integers"),
    ],
)
def test_a_prefill_plan_that_is_refused_leaves_the_last_one_as_it_was(
    changes: dict[str, Any], error: type[KernelInputError], message: str, launches: list[object]
):
    attention = prefill()
    attention.plan([3, 1], [20, 5])
    items = attention._kernel._items

    with pytest.raises(error, match=message):
        attention.plan(**({"qo_lens": [1, 1], "kv_lens": [5, 5]} | changes))

    assert attention._kernel._items is items
    with pytest.raises(ShapeError, match="q has 3 rows, must have at least the plan's 4"):
        run_prefill(attention, 3, 3, 3)
    assert not launches
    run_prefill(attention, 4, 3, 3)
    assert len(launches) == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((5, 4, 4), "q has 5 rows, must have at least the plan's 6"),
        ((6, 3, 4), "kv_page_indptr has 3 entries, must have at least the plan's 4"),
        ((6, 4, 3), "kv_page_indices has 3 entries, must have at least the plan's 4"),
    ],
)
def test_prefill_of_tensors_that_are_shorter_than_planned(
    sizes: tuple[int, int, int], message: str, launches: list[object]
):
    attention = prefill()
    # Two chunks of request 2, and an empty one, whose row and pages nothing reads.
    attention.plan(
        [2, 1, 1, 0], [20, 30, 17, 900], first_rows=[1, 4, 5, 99], requests=[0, 2, 2, 50]
    )

    with pytest.raises(ShapeError, match=message):
        run_prefill(attention, *sizes)

    assert not launches
    run_prefill(attention, 6, 4, 4)
    assert len(launches) == 1


@pytest.mark.parametrize(
    ("rows", "entries", "message"),
    [
        (3, 6, "q has 3 rows, must have at least the plan's 4"),
        (4, 5, "kv_page_indices has 5 entries, must have at least the plan's 6"),
    ],
)
@pytest.mark.parametrize("make", [decode, cascade])
def test_decode_of_tensors_that_are_shorter_than_planned(
    make: Callable[[], Any], rows: int, entries: int, message: str, launches: list[object]
):
    attention = make()
    batch = {"kv_lens": [33, 1, 0], "rows": [3, 1, 0], "table_starts": starts(3, 0, 99)}
    attention.plan(**batch, **({"page_indices": starts(*[0] * 6)} if make is cascade else {}))

    with pytest.raises(ShapeError, match=message):
        run_decode(attention, rows, entries)

    assert not launches
    run_decode(attention, 4, 6)
    assert len(launches) == 1


def test_a_table_without_gaps_must_hold_all_pages(launches: list[object]):
    attention = decode()
    attention.plan([17, 16, 1])

    with pytest.raises(ShapeError, match=r"kv_page_indices has 3 entries, .* the plan's 4"):
        run_decode(attention, 3, 3)
    assert not launches


@pytest.mark.parametrize("make", [decode, cascade, prefill])
def test_a_run_before_any_plan(make: Callable[[], Attention], launches: list[object]):
    tables = [torch.zeros(2, dtype=torch.int32)] * (2 if make is prefill else 1)

    with pytest.raises(PlanError, match="nothing is planned, plan must come before run"):
        make().run(queries(1), 0, *tables)
    assert not launches


def test_a_next_step_before_any_plan():
    with pytest.raises(PlanError, match="plan must come before plan_next_step"):
        cascade().plan_next_step([1])
