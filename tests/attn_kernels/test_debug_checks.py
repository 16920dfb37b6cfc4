"""The debug mode: what launchers refuse after they have waited for the device."""

import runpy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from attn_kernels import debug_checks
from attn_kernels.append.launch import rotate_and_append
from attn_kernels.cascade.launch import CascadeAttention
from attn_kernels.debug_checks import debug
from attn_kernels.decode.launch import DecodeAttention
from attn_kernels.errors import KernelInputError, PageTableError, ScaleError, ShapeError
from attn_kernels.pages.launch import copy_pages, gather_pages, scatter_pages
from attn_kernels.pages.launch_digest import digest_pages
from attn_kernels.prefill.launch import PrefillAttention
from attn_kernels.sampling.launch import TokenSampler
from attn_kernels.sampling.rows import LogitEdits, RowParams

NUM_PAGES, PAGE_SIZE = 4, 16
PAGES = torch.zeros(NUM_PAGES, 2, 2, 2, PAGE_SIZE, 64)
FP8_PAGES = PAGES.to(torch.float8_e4m3fn)
SCALE = torch.ones(2, 2)
OPTIONS: dict[str, Any] = {"num_qo_heads": 8, "scale": 1.0}
LIMITS: dict[str, Any] = {"max_requests": 4, "max_kv_tokens": 128}


pytestmark = pytest.mark.usefixtures("launches")


checking = partial(patch.object, debug, "is_on", new=True)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def ids(*values: int) -> torch.Tensor:
    return ints(*values, dtype=torch.int64)


def decode(indices: torch.Tensor, sliding_window: int | None = None, **batch: Any) -> None:
    attention = DecodeAttention(PAGES, **OPTIONS, **LIMITS, sliding_window=sliding_window)
    attention.plan(**({"kv_lens": [20, 3]} | batch))
    attention.run(torch.zeros(2, 8, 64), 0, indices)


def cascade(indices: torch.Tensor) -> None:
    attention = CascadeAttention(PAGES, **OPTIONS, **LIMITS)
    attention.plan([20, 3], np.array([0, 2]), np.array([0, 1, 2]))
    attention.run(torch.zeros(2, 8, 64), 0, indices)


def prefill(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    sliding_window: int | None = None,
    qo_lens: tuple[int, int] = (2, 1),
) -> None:
    attention = PrefillAttention(PAGES, **OPTIONS, sliding_window=sliding_window)
    attention.plan(qo_lens, [20, 33])
    attention.run(torch.zeros(3, 8, 64), 0, indptr, indices)


def append(**changes: torch.Tensor) -> None:
    arguments = {"positions": ids(0, 8), "append_page": ids(3, -1), "append_offset": ids(15, 99)}
    rotate_and_append(
        torch.zeros(2, 8, 64),
        torch.zeros(2, 2, 64),
        torch.zeros(2, 2, 64),
        PAGES,
        0,
        cos=torch.zeros(9, 32),
        sin=torch.zeros(9, 32),
        **(arguments | changes),
    )


def sample(rows: torch.Tensor, tokens: torch.Tensor) -> None:
    sampler = TokenSampler(vocab_size=40, max_rows=2, device="cpu")
    halves = torch.full((2,), 0.5, dtype=torch.float64)
    params = RowParams(
        temperature=halves,
        top_k=ids(0, 0),
        top_p=halves,
        min_p=halves,
        seeds=ids(0, 0),
        positions=ids(0, 0),
    )
    factors = torch.ones(len(rows))
    edits = LogitEdits(rows=rows, tokens=tokens, repetition=factors, subtract=factors)
    sampler.sample(torch.zeros(2, 40), params, edits=edits)


def logprobs(tokens: torch.Tensor) -> None:
    TokenSampler(vocab_size=40, max_rows=2, device="cpu").logprobs(torch.zeros(2, 40), tokens, 0)


def gather(page_ids: torch.Tensor) -> None:
    gather_pages(PAGES, page_ids, torch.zeros_like(PAGES))


def scatter(page_ids: torch.Tensor) -> None:
    scatter_pages(torch.zeros_like(PAGES), page_ids, PAGES)


def digest(page_ids: torch.Tensor) -> None:
    digest_pages(torch.zeros(4, 8, dtype=torch.int32), page_ids, ids(*range(16)).view(2, 8))


REFUSED: list[tuple[Callable[[], None], type[KernelInputError], str]] = [
    (
        lambda: decode(ints(0, 4, 1)),
        PageTableError,
        "kv_page_indices has 4 at index 1, must be 0 to 3",
    ),
    (lambda: decode(ints(0, 1, -1)), PageTableError, "kv_page_indices has -1 at index 2"),
    (lambda: cascade(ints(0, 1, 4)), PageTableError, "kv_page_indices has 4 at index 2"),
    (lambda: prefill(ints(0, 2, 5), ints(0, 1, 2, 4, 3)), PageTableError, "has 4 at index 3"),
    (
        lambda: prefill(ints(-1, 2, 5), ints(0, 1, 2, 3, 0)),
        PageTableError,
        "kv_page_indptr gives request 0 entries -1 to 2, must be 2 or more of the 5",
    ),
    (
        lambda: prefill(ints(0, 2, 6), ints(0, 1, 2, 3, 0)),
        PageTableError,
        "kv_page_indptr gives request 1 entries 2 to 6, must be 3 or more of the 5",
    ),
    (
        lambda: prefill(ints(0, 2, 4), ints(0, 1, 2, 3, 0)),
        PageTableError,
        "kv_page_indptr gives request 1 entries 2 to 4, must be 3 or more of the 5",
    ),
    (
        lambda: append(append_page=ids(4, -1)),
        PageTableError,
        "append_page has 4 at index 0, must be 0 to 3, or negative for no write",
    ),
    (
        lambda: append(append_page=ids(-1, 0), append_offset=ids(99, 16)),
        PageTableError,
        "append_offset has 16 at index 1, must be 0 to 15",
    ),
    (lambda: append(append_offset=ids(-1, 0)), PageTableError, "append_offset has -1 at index 0"),
    (
        lambda: append(positions=ids(0, 9)),
        ShapeError,
        "positions has 9 at index 1, must be 0 to 8",
    ),
    (lambda: append(positions=ids(-1, 0)), ShapeError, "positions has -1 at index 0"),
    (lambda: gather(ids(0, 4)), PageTableError, "source_ids has 4 at index 1, must be 0 to 3"),
    (lambda: scatter(ints(-1, 0)), PageTableError, "target_ids has -1 at index 0, must be 0 to 3"),
    (lambda: scatter(ints(2, 2)), PageTableError, "target_ids has page 2 twice, must be different"),
    (
        lambda: copy_pages(PAGES, ids(0), ids(4)),
        PageTableError,
        "target_ids has 4 at index 0, must be 0 to 3",
    ),
    (
        lambda: copy_pages(PAGES, ids(-2), ids(3)),
        PageTableError,
        "source_ids has -2 at index 0, must be 0 to 3",
    ),
    (
        lambda: copy_pages(PAGES, ids(0, 2), ids(3, 0)),
        PageTableError,
        "target_ids has page 0, as has source_ids, must be different",
    ),
    (lambda: digest(ids(0, 4)), PageTableError, "page_ids has 4 at index 1, must be 0 to 3"),
    (
        lambda: sample(ints(2, -1), ints(0, 0)),
        ShapeError,
        "edits.rows has 2 at index 0, must be 0 to 1, or negative for no entry",
    ),
    (
        lambda: sample(ints(-1, 0), ints(99, 40)),
        ShapeError,
        "edits.tokens has 40 at index 1, must be 0 to 39",
    ),
    (
        lambda: logprobs(ints(0, 40)),
        ShapeError,
        "tokens has 40 at index 1, must be 0 to 39, or negative for no token",
    ),
]


@pytest.mark.parametrize(("action", "error", "message"), REFUSED, ids=[each[2] for each in REFUSED])
def test_the_debug_mode_refuses_what_only_the_device_knows(
    action: Callable[[], None],
    error: type[KernelInputError],
    message: str,
    launches: list[object],
):
    with checking(), pytest.raises(error, match=message):
        action()
    assert not launches

    action()  # off again, nothing is looked at
    assert launches


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("kind", [DecodeAttention, CascadeAttention, PrefillAttention, "append"])
def test_scales_of_the_layer_must_be_positive(kind: Any, value: float, launches: list[object]):
    scale = SCALE.clone()
    scale[1, 0] = value

    def run(layer: int) -> None:
        scales = {"k_scale": SCALE, "v_scale": scale}
        q = torch.zeros(1, 8, 64, dtype=torch.bfloat16)
        if kind == "append":
            new = torch.zeros(1, 2, 64, dtype=torch.bfloat16)
            angles = {"cos": torch.zeros(9, 32), "sin": torch.zeros(9, 32), "positions": ids(0)}
            slot = {"append_page": ids(0), "append_offset": ids(0)}
            rotate_and_append(q, new, new, FP8_PAGES, layer, **angles, **slot, **scales)
        elif kind is PrefillAttention:
            prefill = PrefillAttention(FP8_PAGES, **OPTIONS, **scales)
            prefill.plan([1], [1])
            prefill.run(q, layer, ints(0, 1), ints(0))
        else:
            attention = kind(FP8_PAGES, **OPTIONS, **LIMITS, **scales)
            tables = [np.array([0]), np.array([0])] if kind is CascadeAttention else []
            attention.plan([1], *tables)
            attention.run(q, layer, ints(0))

    message = f"v_scale is {value} for layer 1 and key-value head 0, must be positive and finite"
    with checking():
        with pytest.raises(ScaleError, match=message):
            run(1)
        assert not launches
        run(0)
    assert len(launches) == 1


ACCEPTED: list[Callable[[], None]] = [
    lambda: decode(ints(0, 3, 1, -1)),  # a table may be longer than the plan
    lambda: decode(ints(-1, 3, 9), kv_lens=[16, 0], table_starts=[1, 7]),
    lambda: decode(ints(-1, 3, 0), kv_lens=[40], sliding_window=4),
    lambda: cascade(ints(0, 3, 1)),
    lambda: prefill(ints(0, 2, 5), ints(0, 1, 2, 3, 0)),
    lambda: prefill(ints(0, 2, 5), ints(-1, 1, -1, -1, 0), sliding_window=1),
    lambda: prefill(ints(0, 2, -5), ints(0, 1, 9, 9, 9), qo_lens=(2, 0)),
    append,
    lambda: gather(ids(0, 3)),
    lambda: scatter(ints(3, 0)),
    lambda: copy_pages(PAGES, ids(0), ids(3)),
    lambda: digest(ids(0, 3)),
    lambda: sample(ints(-1, 1), ints(99, 39)),
    lambda: logprobs(ints(-1, 39)),
]


@pytest.mark.parametrize("action", ACCEPTED)
def test_the_debug_mode_accepts_what_kernels_do_not_read(
    action: Callable[[], None], launches: list[object]
):
    with checking():
        action()

    assert launches


class OnDevice(torch.Tensor):
    """A tensor that says it is on a CUDA device."""

    is_cuda = True


def test_nothing_is_read_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, launches: list[object]
):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    page_ids, positions, offsets = (
        values.as_subclass(OnDevice) for values in (ids(9, 9), ids(99, 99), ids(99, 99))
    )

    with checking():
        gather(page_ids)
        append(append_page=page_ids, positions=positions, append_offset=offsets)
    assert len(launches) == 2

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with checking(), pytest.raises(PageTableError, match="source_ids has 9"):
        gather(page_ids)
    assert len(launches) == 2


@pytest.mark.parametrize(("value", "is_on"), [(None, False), ("0", False), ("1", True)])
def test_the_environment_turns_the_debug_mode_on(
    monkeypatch: pytest.MonkeyPatch, value: str | None, is_on: bool
):
    monkeypatch.delenv("PAGEWIRE_KERNEL_CHECKS", raising=False)
    if value is not None:
        monkeypatch.setenv("PAGEWIRE_KERNEL_CHECKS", value)

    imported = runpy.run_path(debug_checks.__file__)

    assert imported["debug"].is_on is is_on
