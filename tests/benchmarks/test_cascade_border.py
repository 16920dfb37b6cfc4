"""That the planner takes the faster way in forests that were timed both ways on an H200."""

import json
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from attn_kernels.cascade import launch as cascade
from attn_kernels.cascade.launch import CascadeAttention
from attn_kernels.cascade.model import CascadeModel
from attn_kernels.decode import launch as decode
from benchmarks import cascade_border
from benchmarks.bench import FP8_SCALE
from benchmarks.cascade_border import (
    DTYPES,
    FITTED,
    FITTED_DTYPES,
    Row,
    Shape,
    buffer_rows,
    forest_of,
    plan_forest,
    shape_of,
)
from tests.benchmarks.rehearsal import Rehearsal
from tests.support.triton_interpreter import interpreted

RESULTS = Path(cascade_border.__file__).parent / "results"
FITTED_RESULTS = RESULTS / "cascade-border-h200.json"
# Other heads and pages; float16, pages of 1 to 32, windows and caps
OTHER_RESULTS = ("cascade-border-shapes-h200.json", "cascade-border-options-h200.json")
H200_MULTIPROCESSORS = 132


@pytest.fixture(autouse=True)
def programs_of_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    for launchers in (cascade, decode):
        monkeypatch.setattr(
            launchers, "programs_for", lambda _, per_sm: per_sm * H200_MULTIPROCESSORS
        )


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose kernels as on an H200; they cannot be launched."""
    for launchers in (cascade, decode):
        monkeypatch.setattr(launchers, "on_hopper", lambda _: True)


@lru_cache
def model_of(dtype: str, shape: Shape, max_requests: int) -> CascadeModel:
    num_kv_heads = shape.num_kv_heads
    pages = torch.zeros((2, 1, 2, num_kv_heads, shape.page_size, shape.head_dim))
    pages = pages.to(DTYPES[dtype])
    scale = torch.full((1, num_kv_heads), FP8_SCALE) if pages.element_size() == 1 else None
    with interpreted():
        return CascadeAttention(
            pages,
            num_qo_heads=shape.num_qo_heads,
            scale=1.0,
            max_requests=max_requests,
            max_kv_tokens=1 << 20,
            k_scale=scale,
            v_scale=scale,
        ).model


def is_shared_now(row: Row) -> bool:
    shape = shape_of(row.shape)
    model = model_of(row.dtype, shape, buffer_rows(row.num_requests, shape.group))
    return plan_forest(forest_of(row.forest, shape.page_size), shape, model).num_items > 0


@pytest.mark.parametrize("dtype", FITTED_DTYPES)
@pytest.mark.usefixtures("on_h200")
def test_no_forest_is_shared_that_takes_longer_so_and_few_are_not_that_gain(dtype: str):
    rows = [Row(**row) for row in json.loads(FITTED_RESULTS.read_text()) if row["dtype"] == dtype]
    chosen = [is_shared_now(row) for row in rows]

    ratios = [row.cascade_us / row.flat_us for row in rows]
    assert max(ratio for ratio, is_shared in zip(ratios, chosen, strict=True) if is_shared) < 1.03
    for kind, least in (("prefix", 0.7), ("random", 0.5)):
        gaining = [
            is_shared
            for row, ratio, is_shared in zip(rows, ratios, chosen, strict=True)
            if ratio < 0.9 and row.forest.startswith(kind)
        ]
        assert len(gaining) > 50
        assert sum(gaining) > least * len(gaining)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OTHER_RESULTS)
@pytest.mark.usefixtures("on_h200")
def test_nor_is_one_shared_that_takes_longer_so_with_other_shapes_and_options(name: str):
    rows = [Row(**row) for row in json.loads((RESULTS / name).read_text())]
    slower = [row for row in rows if row.cascade_us >= 1.03 * row.flat_us]
    faster = [row for row in rows if row.cascade_us < 0.8 * row.flat_us]

    assert not [row for row in slower if is_shared_now(row)]
    for shape in {row.shape for row in rows}:
        some = [row for row in faster if row.shape == shape][:20]
        assert sum(map(is_shared_now, some)) > 5, shape


@pytest.mark.thorough
def test_a_forest_near_the_border_is_run_both_ways_and_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
):
    bench = Rehearsal(pool_bytes=16 << 20)
    monkeypatch.setattr(cascade_border, "NEAR", (0.0, 1e9))

    with interpreted():
        row = cascade_border.time_one(bench, "bfloat16", FITTED, "prefix/4,256,64")

    assert row is not None
    assert (row.forest, row.num_requests) == ("prefix/4,256,64", 4)
    shared, flat = bench.outs
    assert torch.allclose(shared.float(), flat.float(), atol=0.02)
    assert shared.abs().sum() > 0


def test_a_forest_far_from_the_border_is_not_timed():
    with interpreted():
        assert cascade_border.time_one(Rehearsal(), "bfloat16", FITTED, "prefix/2,256,256") is None
