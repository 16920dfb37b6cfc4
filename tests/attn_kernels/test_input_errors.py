import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from attn_kernels.append.launch import rotate_and_append
from attn_kernels.cascade.launch import CascadeAttention, HopperSharedTile
from attn_kernels.decode.launch import DecodeAttention, HopperDecodeTile
from attn_kernels.decode.plan import SplitRule
from attn_kernels.elementwise.launch import rms_norm
from attn_kernels.errors import (
    DeviceError,
    DtypeError,
    KernelInputError,
    PlanError,
    ScaleError,
    ShapeError,
    StrideError,
)
from attn_kernels.linear.launch import linear
from attn_kernels.pages.launch import copy_pages, gather_pages, scatter_pages
from attn_kernels.prefill.launch import PrefillAttention
from attn_kernels.prefill.launch_hopper import HopperTile
from tests.support.triton_interpreter import patched

# Checks come before any launch, so these tests need neither a GPU nor the interpreter.


@pytest.fixture(autouse=True)
def _no_launch():
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("launched")

    with patched(run=fail, call=fail):
        yield


def append(*, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rotate_and_append(
        torch.zeros(2, 4, 16),
        torch.zeros(2, 2, 16),
        torch.zeros(2, 2, 16),
        torch.zeros(3, 1, 2, 2, 4, 16),
        0,
        cos=cos,
        sin=sin,
        positions=torch.zeros(2, dtype=torch.int64),
        append_page=torch.zeros(2, dtype=torch.int64),
        append_offset=torch.zeros(2, dtype=torch.int64),
    )


def odd(*shape: int) -> torch.Tensor:
    """Zeros that begin 4 bytes behind a multiple of 16."""
    size = math.prod(shape)
    return torch.zeros(size + 4)[1 : size + 1].view(shape)


def decode(**changes: object) -> torch.Tensor:
    pages = changes.pop("pages", torch.zeros(4, 2, 2, 2, 16, 64))
    num_qo_heads = changes.pop("num_qo_heads", 8)
    attention = DecodeAttention(
        pages,
        num_qo_heads=num_qo_heads,
        **{
            name: changes.pop(name, default)
            for name, default in {
                "scale": 1.0,
                "max_requests": 4,
                "max_kv_tokens": 64,
                "sliding_window": None,
                "soft_cap": None,
                "rule": SplitRule(),
                "tile": None,
            }.items()
        },
    )
    arguments = {
        "q": torch.zeros(2, 8, 64),
        "layer": 0,
        "kv_page_indices": torch.zeros(2, dtype=torch.int32),
    }
    return attention.run(**(arguments | changes))


CASES: list[tuple[dict[str, object], type[KernelInputError], str]] = [
    ({"q": torch.zeros(2, 8, 64, dtype=torch.float16)}, DtypeError, "q is torch.float16"),
    ({"q": torch.zeros(2, 4, 64)}, ShapeError, r"q has shape \[2, 4, 64\], must be \[any, 8, 64\]"),
    ({"q": torch.zeros(2, 64, 8).transpose(1, 2)}, StrideError, "q has strides"),
    ({"q": torch.zeros(2, 8, 64, device="meta")}, DeviceError, "q is on meta, must be on cpu"),
    ({"layer": 2}, ShapeError, "layer is 2, must be 0 to 1"),
    ({"layer": 0.5}, DtypeError, "layer is 0.5, must be an int"),
    ({"layer": True}, DtypeError, "layer is True, must be an int"),
    ({"q": None}, DtypeError, "q is of type NoneType, must be a torch.Tensor"),
    ({"q": np.zeros((2, 8, 64))}, DtypeError, "q is of type ndarray, must be a torch.Tensor"),
    ({"out": [0.0]}, DtypeError, "out is of type list, must be a torch.Tensor"),
    ({"kv_page_indices": None}, DtypeError, "kv_page_indices is of type NoneType, must be a torch"),
    ({"kv_page_indices": torch.zeros(2)}, DtypeError, "kv_page_indices is torch.float32"),
    ({"lse": torch.zeros(2, 4)}, ShapeError, "lse has shape"),
    ({"num_qo_heads": 7}, ShapeError, "num_qo_heads 7 must be a multiple of num_kv_heads 2"),
    ({"num_qo_heads": 34}, ShapeError, "17 query heads per key-value head, must be 1 to 16"),
    ({"pages": torch.zeros(4, 2, 2, 2, 16, 40)}, ShapeError, "head_dim is 40"),
    ({"pages": torch.zeros(4, 2, 2, 2, 16, 512)}, ShapeError, "head_dim is 512"),
    ({"pages": torch.zeros(4, 2, 3, 2, 16, 64)}, ShapeError, "pages has shape"),
    ({"pages": torch.zeros(4, 2, 2, 2, 16, 64).double()}, DtypeError, "pages is torch.float64"),
    ({"sliding_window": 0}, ShapeError, "sliding_window is 0"),
    ({"soft_cap": -1.0}, ShapeError, "soft_cap is -1.0, must be positive"),
    ({"soft_cap": math.inf}, ShapeError, "soft_cap is inf, must be positive and finite"),
    ({"soft_cap": "x"}, DtypeError, "soft_cap is 'x', must be a number or None"),
    ({"scale": math.nan}, ShapeError, "scale is nan, must be finite"),
    ({"scale": None}, DtypeError, "scale is None, must be a number"),
    ({"pages": odd(4, 2, 2, 2, 16, 64)}, StrideError, r"pages begins at .*, must be a multiple"),
    ({"max_requests": 0}, ShapeError, "max_requests is 0, must be at least 1"),
    ({"max_kv_tokens": 0}, ShapeError, "max_kv_tokens is 0, must be at least 1"),
    (
        {"tile": HopperDecodeTile(stages=4, programs_per_sm=1)},
        ShapeError,
        r"kernel of decode does not take torch.float32, only floats of 8 and 16 bits",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), CASES, ids=[case[2] for case in CASES])
def test_bad_arguments_of_decode_name_what_was_found_and_what_is_allowed(
    changes: dict[str, object], error: type[KernelInputError], message: str
):
    with pytest.raises(error, match=message):
        decode(**dict(changes))


ROWS = torch.zeros(6, 8, 64)  # queries are the two in the middle


@pytest.mark.parametrize("kind", [DecodeAttention, CascadeAttention])
@pytest.mark.parametrize(
    "out",
    [
        ROWS[2:4],
        ROWS[1:3],
        ROWS[3:5],
        ROWS.view(-1)[3 * 512 + 508 : 5 * 512 + 508].view(2, 8, 64),
        ROWS[1:3].view(torch.bfloat16).view(4, 8, 64)[2:],
        ROWS[3:5].view(torch.bfloat16).view(4, 8, 64)[:2],
    ],
    ids=["same", "first row", "last row", "last elements", "bfloat16 first", "bfloat16 last"],
)
def test_an_output_in_the_memory_of_the_queries_is_refused(kind: type, out: torch.Tensor):
    attention = fp8_attention(kind, torch.zeros(4, 2, 2, 2, 16, 64))
    indices = torch.zeros(2, dtype=torch.int32)

    with pytest.raises(KernelInputError, match="out lies in the memory of q, must have its own"):
        attention.run(ROWS[2:4], 0, indices, out=out)


@pytest.mark.parametrize(
    ("out", "q"),
    [
        (ROWS[0:2], ROWS[2:4]),
        (ROWS[4:6], ROWS[2:4]),
        (ROWS[3:3], ROWS[3:3]),
        (ROWS[3:3], torch.zeros(0, 8, 64)),
    ],
    ids=["before", "behind", "both empty", "empty"],
)
def test_an_output_beside_the_queries_is_accepted(out: torch.Tensor, q: torch.Tensor):
    with pytest.raises(PlanError, match="nothing is planned"):
        decode(q=q, out=out)


@pytest.mark.parametrize("value", [2.5, 8.0, True, "8", np.int64(8)], ids=repr)
@pytest.mark.parametrize(
    ("kind", "name", "otherwise"),
    [
        *[
            (kind, name, "")
            for kind in (DecodeAttention, CascadeAttention)
            for name in ("num_qo_heads", "max_requests", "max_kv_tokens", "num_programs")
        ],
        (PrefillAttention, "num_qo_heads", ""),
        (DecodeAttention, "sliding_window", " or None"),
        (PrefillAttention, "sliding_window", " or None"),
    ],
)
def test_what_counts_is_an_int(kind: type, name: str, otherwise: str, value: object):
    message = f"{name} is {value!r}, must be an int{otherwise}"
    with pytest.raises(DtypeError, match=f"^{re.escape(message)}$"):
        fp8_attention(kind, torch.zeros(4, 2, 2, 2, 16, 64), **{name: value})


@pytest.mark.parametrize("kind", [DecodeAttention, PrefillAttention, CascadeAttention, "append"])
def test_a_pool_that_is_no_tensor_is_refused(kind: type | str):
    with pytest.raises(DtypeError, match=r"pages is of type NoneType, must be a torch\.Tensor"):
        fp8_append(None) if kind == "append" else fp8_attention(kind, None)


@pytest.mark.parametrize("kind", [PrefillAttention, CascadeAttention])
def test_queries_that_are_no_tensor_are_refused(kind: type):
    attention = fp8_attention(kind, torch.zeros(4, 2, 2, 2, 16, 64))
    tables = [torch.zeros(3, dtype=torch.int32)] * (2 if kind is PrefillAttention else 1)

    with pytest.raises(DtypeError, match=r"q is of type NoneType, must be a torch\.Tensor"):
        attention.run(None, 0, *tables)


@pytest.mark.parametrize(
    ("action", "name"),
    [
        (lambda: rms_norm(None, torch.zeros(8), 1e-5), "x"),
        (lambda: rms_norm(torch.zeros(2, 8), None, 1e-5), "weight"),
        (lambda: linear(None, torch.zeros(2, 8)), "x"),
    ],
)
def test_other_launchers_refuse_what_is_no_tensor(action: Callable[[], object], name: str):
    message = rf"^{name} is of type NoneType, must be a torch\.Tensor$"
    with pytest.raises(DtypeError, match=message):
        action()


PAGE_BUFFER = torch.zeros(8, 16)  # the pool is pages 2 to 5


@pytest.mark.parametrize(
    "staging",
    [
        PAGE_BUFFER[2:6],
        PAGE_BUFFER[4:6],
        PAGE_BUFFER[1:3],
        PAGE_BUFFER[5:8],
        PAGE_BUFFER[4:6].view(torch.uint8),
    ],
    ids=["the pool", "within", "first page", "last page", "bytes"],
)
def test_staging_in_the_memory_of_the_pool_is_refused(staging: torch.Tensor):
    pages, ids = PAGE_BUFFER[2:6], torch.tensor([0, 1])
    message = "staging lies in the memory of pages, must have its own"

    with pytest.raises(KernelInputError, match=message):
        gather_pages(pages, ids, staging)
    with pytest.raises(KernelInputError, match=message):
        scatter_pages(staging, ids, pages)


@pytest.mark.parametrize("staging", [PAGE_BUFFER[:2], PAGE_BUFFER[6:]], ids=["before", "behind"])
def test_staging_beside_the_pool_and_copies_within_it_are_launched(staging: torch.Tensor):
    pages, ids = PAGE_BUFFER[2:6], torch.tensor([0, 1])

    with pytest.raises(AssertionError, match="launched"):
        gather_pages(pages, ids, staging)
    with pytest.raises(AssertionError, match="launched"):
        scatter_pages(staging, ids, pages)
    with pytest.raises(AssertionError, match="launched"):
        copy_pages(pages, ids, ids + 2)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-5), "weight has shape"),
        (
            lambda: PrefillAttention(torch.zeros(1, 1, 2, 1, 4, 16), num_qo_heads=32, scale=1.0),
            "32 query heads per key-value head",
        ),
        (
            lambda: append(cos=torch.zeros(9, 16), sin=torch.zeros(9, 8)),
            r"cos has 16 columns, must be 1 to 8, half of head_dim 16",
        ),
        (
            lambda: append(cos=torch.zeros(9, 8), sin=torch.zeros(7, 8)),
            r"sin has shape \[7, 8\], must be \[9, 8\]",
        ),
    ],
)
def test_bad_arguments_of_other_launchers(action: Callable[[], object], message: str):
    with pytest.raises(ShapeError, match=message):
        action()


@pytest.mark.parametrize("kind", [DecodeAttention, PrefillAttention, CascadeAttention, "append"])
@pytest.mark.parametrize("dim", [0, 1, 3, 4, 5])
def test_a_pool_without_elements_is_refused(kind: type | str, dim: int):
    shape = [4, 2, 2, 2, 16, 64]
    shape[dim] = 0
    pages = torch.zeros(shape)

    message = re.escape(f"pages has shape {shape}, must have no dimension of size 0")
    with pytest.raises(ShapeError, match=message):
        fp8_append(pages) if kind == "append" else fp8_attention(kind, pages)


@pytest.mark.parametrize("kind", [DecodeAttention, PrefillAttention, CascadeAttention])
@pytest.mark.parametrize("shape", [[], [4, 2, 2, 16, 64]])
def test_a_pool_of_other_dimensions_is_refused(kind: type, shape: list[int]):
    message = f"pages has shape {shape}, must be [any, any, 2, any, any, any]"
    with pytest.raises(ShapeError, match=re.escape(message)):
        fp8_attention(kind, torch.zeros(shape))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_requests": 0}, "max_requests is 0, must be at least 1"),
        ({"max_kv_tokens": 0}, "max_kv_tokens is 0, must be at least 1"),
        ({"num_programs": 0}, "num_programs is 0, must be at least 1"),
    ],
)
def test_cascade_refuses_sizes_below_one(options: dict[str, object], message: str):
    with pytest.raises(ShapeError, match=message):
        CascadeAttention(
            torch.zeros(4, 2, 2, 2, 16, 64),
            **({"num_qo_heads": 8, "scale": 1.0, "max_requests": 4, "max_kv_tokens": 64} | options),
        )


@pytest.mark.parametrize("field", ["split_len", "splits_per_segment"])
def test_a_split_rule_refuses_sizes_that_are_no_int_of_at_least_one(field: str):
    with pytest.raises(ShapeError, match=f"^{field} is 0, must be at least 1"):
        SplitRule(**{field: 0})
    with pytest.raises(DtypeError, match=f"^{field} is 2.5, must be an int"):
        SplitRule(**{field: 2.5})


@pytest.mark.parametrize(
    ("page_size", "head_dim", "message"),
    [
        (24, 128, r"page_size 24, only \(16, 32, 64, 128\)"),
        (64, 96, r"head_dim 96, only \(64, 128\)"),
    ],
)
def test_hopper_kernels_of_decode_refuse_pools_that_they_are_not_written_for(
    page_size: int, head_dim: int, message: str
):
    pages = torch.zeros(4, 2, 2, 2, page_size, head_dim, dtype=torch.bfloat16)
    tile = HopperDecodeTile(stages=4, programs_per_sm=1)

    with pytest.raises(ShapeError, match="decode does not take " + message.replace("16, 32, ", "")):
        fp8_attention(DecodeAttention, pages, tile=tile)
    with pytest.raises(ShapeError, match="the shared part does not take " + message):
        fp8_attention(CascadeAttention, pages, tile=HopperSharedTile())


@pytest.mark.parametrize("eps", [math.nan, math.inf, -1e-5])
def test_rms_norm_refuses_what_is_no_epsilon(eps: float):
    with pytest.raises(ShapeError, match=f"^eps is {eps}, must be at least 0 and finite$"):
        rms_norm(torch.zeros(2, 8), torch.zeros(8), eps)


def test_rms_norm_refuses_what_is_no_number():
    with pytest.raises(DtypeError, match=r"^eps is 'x', must be a number$"):
        rms_norm(torch.zeros(2, 8), torch.zeros(8), "x")


def test_a_cpu_tensor_is_refused_outside_the_interpreter():
    import triton

    triton.knobs.runtime.interpret = False

    with pytest.raises(DeviceError, match="x is on cpu, must be on a CUDA device"):
        rms_norm(torch.zeros(2, 8), torch.zeros(8), 1e-5)


FP8_PAGES = torch.zeros(4, 2, 2, 2, 16, 64, dtype=torch.float8_e4m3fn)
SCALE = torch.ones(2, 2)


def fp8_append(pages: torch.Tensor, **scales: torch.Tensor | None) -> torch.Tensor:
    ids = torch.zeros(2, dtype=torch.int64)
    return rotate_and_append(
        torch.zeros(2, 8, 64, dtype=torch.bfloat16),
        torch.zeros(2, 2, 64, dtype=torch.bfloat16),
        torch.zeros(2, 2, 64, dtype=torch.bfloat16),
        pages,
        0,
        cos=torch.zeros(9, 32),
        sin=torch.zeros(9, 32),
        positions=ids,
        append_page=ids,
        append_offset=ids,
        **scales,
    )


def fp8_attention(kind: type, pages: torch.Tensor, **options: object) -> object:
    defaults: dict[str, object] = {"num_qo_heads": 8, "scale": 1.0}
    if kind is not PrefillAttention:
        defaults |= {"max_requests": 4, "max_kv_tokens": 64}
    return kind(pages, **(defaults | options))


@pytest.mark.parametrize("kind", [DecodeAttention, PrefillAttention, CascadeAttention, "append"])
@pytest.mark.parametrize(
    ("pages", "scales", "error", "message"),
    [
        (FP8_PAGES, {}, ScaleError, "k_scale is None, must be given for pages of torch.float8_e4m"),
        (FP8_PAGES, {"k_scale": SCALE}, ScaleError, "v_scale is None, must be given"),
        (
            FP8_PAGES.bfloat16(),
            {"k_scale": None, "v_scale": SCALE},
            ScaleError,
            "v_scale is given, must be None for pages of torch.bfloat16",
        ),
        (
            FP8_PAGES,
            {"k_scale": SCALE.bfloat16(), "v_scale": SCALE},
            DtypeError,
            "k_scale is torch.bfloat16, must be torch.float32",
        ),
        (
            FP8_PAGES,
            {"k_scale": SCALE, "v_scale": torch.ones(2)},
            ShapeError,
            r"v_scale has shape \[2\], must be \[2, 2\]",
        ),
        (
            FP8_PAGES,
            {"k_scale": SCALE, "v_scale": torch.ones(2, 2, device="meta")},
            DeviceError,
            "v_scale is on meta, must be on cpu",
        ),
        (
            FP8_PAGES,
            {"k_scale": torch.ones(2, 4)[:, ::2], "v_scale": SCALE},
            StrideError,
            "k_scale has strides",
        ),
    ],
)
def test_every_launcher_demands_scales_for_fp8_pages_and_only_for_them(
    kind: type | str,
    pages: torch.Tensor,
    scales: dict[str, torch.Tensor],
    error: type[KernelInputError],
    message: str,
):
    with pytest.raises(error, match=message):
        fp8_append(pages, **scales) if kind == "append" else fp8_attention(kind, pages, **scales)


def test_queries_over_fp8_pages_are_of_half_precision():
    scales = {"k_scale": SCALE, "v_scale": SCALE}
    indices = torch.zeros(2, dtype=torch.int32)

    for q in (torch.zeros(2, 8, 64), torch.zeros(2, 8, 64, dtype=torch.float8_e4m3fn)):
        message = f"q is {q.dtype}, must be torch.bfloat16 or torch.float16"
        with pytest.raises(DtypeError, match=message):
            fp8_attention(DecodeAttention, FP8_PAGES, **scales).run(q, 0, indices)
        with pytest.raises(DtypeError, match=message):
            fp8_attention(PrefillAttention, FP8_PAGES, **scales).run(q, 0, indices, indices)


def test_the_hopper_kernels_refuse_fp8_pages():
    scales = {"k_scale": SCALE, "v_scale": SCALE}

    with pytest.raises(ShapeError, match=r"does not take torch\.float8_e4m3fn, only 16-bit floats"):
        fp8_attention(PrefillAttention, FP8_PAGES, tile=HopperTile(), **scales)
    with pytest.raises(DtypeError, match=r"pages is torch\.float8_e4m3fn, the Hopper kernel"):
        fp8_attention(CascadeAttention, FP8_PAGES, tile=HopperSharedTile(), **scales)
