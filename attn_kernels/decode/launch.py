"""Paged decode attention: one query token per request over its pages, plan once, run per layer."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_kernels.chain import chained
from attn_kernels.checks import (
    FLOAT_DTYPES,
    Integers,
    as_column,
    check_at_least_one,
    check_attention_inputs,
    check_attention_outputs,
    check_entries,
    check_heads,
    check_kv_scales,
    check_own_memory,
    check_pages,
    check_rows,
    check_scores,
    hopper_refusal,
    used_entries,
)
from attn_kernels.debug_checks import check_page_table, check_scales, debug
from attn_kernels.decode.bodies import paged_decode_kernel
from attn_kernels.decode.bodies_hopper import paged_decode_hopper_kernel
from attn_kernels.decode.plan import (
    ITEM_FIELDS,
    DecodeBatch,
    DecodeItems,
    SplitRule,
    check_batch,
    max_slots,
    plan_decode,
)
from attn_kernels.errors import CapacityError, PlanError, ShapeError
from attn_kernels.tiles import PlanBuffer, on_hopper, padded, programs_for, score_factors

DEFAULT_RULE = SplitRule()
BLOCK_M = 16  # query heads of a tile: the least columns that wgmma takes, the largest group
HOPPER_HEAD_DIMS = (64, 128)
HOPPER_PAGE_SIZES = (64, 128)  # multiples of a tile
COLUMN_BLOCK_BYTES = 128  # of a row, that the copy engine puts side by side


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeTile:
    """How the kernel is compiled; in half precision only `block_n` is part of the bits."""

    block_n: int  # keys of a tile, divides the split length
    num_warps: int
    num_stages: int  # tiles in flight
    programs_per_sm: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HopperDecodeTile:
    """How the Hopper kernel is compiled; its bits are those of `DecodeTile(block_n=64, ...)`."""

    stages: int  # tiles in shared memory
    programs_per_sm: int
    block_n: ClassVar[int] = 64  # the kernel is written for it


def decode_tile(
    pages: Tensor, *, is_hopper: bool | None = None, beside_shared: bool = False
) -> DecodeTile | HopperDecodeTile:
    """Return the shipped tile: all programs' tiles must fit a multiprocessor's 227 KB.

    Keys are the rows of products: 64 of them make wgmma.

    Args:
        pages: The pool.
        is_hopper: Whether the device is a Hopper GPU; None looks.
        beside_shared: Whether the kernel reads only the parts that requests do not share, and folds
            them with the results of another launch for the shared part.
    """
    head_dim = pages.shape[-1]
    element_bytes = pages.element_size()
    if element_bytes == 4:  # no tensor cores in full float32: for tests, not for speed
        return DecodeTile(block_n=16, num_warps=8, num_stages=2, programs_per_sm=1)
    if padded(head_dim) > 128:
        # Tiles converted from fp8 lie in registers, and do not fit those of four warps.
        num_warps = 8 if element_bytes == 1 else 4
        return DecodeTile(block_n=64, num_warps=num_warps, num_stages=3, programs_per_sm=1)
    if is_hopper is None:
        is_hopper = on_hopper(pages)
    if is_hopper and _hopper_refusal(pages) is None:
        if element_bytes == 2 and head_dim == 128 and not beside_shared:
            return HopperDecodeTile(stages=4, programs_per_sm=1)
        # Two programs hide what one would wait for: conversions, smaller tiles, many short items
        # and folds. In half precision a deeper ring takes more of L1 than it gives.
        stages = 4 * 128 // head_dim if element_bytes == 1 else 4 if head_dim == 64 else 3
        return HopperDecodeTile(stages=stages, programs_per_sm=2)
    return DecodeTile(block_n=64, num_warps=4, num_stages=3, programs_per_sm=2)


class DecodeAttention:
    """Attention of one new token per request, with fixed device buffers.

    `plan` cuts requests into work items on the host and copies them once; `run` launches for one
    layer and may be captured in a CUDA graph, which then replays for any later plan. A request's
    result does not depend on its batch mates, its position among them or its physical pages.

    Args:
        pages: The pool, [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim], contiguous.
        num_qo_heads: Query heads, 1 to 16 for each key-value head.
        scale: Factor of the scores, usually head_dim ** -0.5.
        max_requests: Most requests of a plan.
        max_kv_tokens: Most tokens of a plan, summed over its requests.
        sliding_window: Number of last tokens that a query sees, itself included; None is all.
        soft_cap: If given, a score s becomes soft_cap * tanh(s / soft_cap).
        k_scale, v_scale: What keys and values of a pool of fp8 (e4m3) are multiplied by,
            [num_layers, num_kv_heads], float32, positive; None for any other pool.
        rule: Where keys are cut.
        tile: How the kernel is compiled; None takes the shipped choice.
        num_programs: Programs of a launch; None takes what the device holds at once.
        max_shared_slots: Most slots of a plan that another kernel fills.
        memory_of: Whose memory of partial results to share, which must suffice; of the two one
            runs at a time. None allocates.

    Attributes:
        partial_acc: Unnormalized partial results, [max_slots, num_qo_heads, head_dim], float32.
        partial_stats: Their base-2 maximum, sum of weights, and 1 if a segment ends with the slot,
            else 0, [max_slots, num_qo_heads, 3], float32.
    """

    partial_acc: Tensor
    partial_stats: Tensor
    _arrivals: Tensor

    def __init__(
        self,
        pages: Tensor,
        *,
        num_qo_heads: int,
        scale: float,
        max_requests: int,
        max_kv_tokens: int,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        rule: SplitRule = DEFAULT_RULE,
        tile: DecodeTile | HopperDecodeTile | None = None,
        num_programs: int | None = None,
        max_shared_slots: int = 0,
        memory_of: "DecodeAttention | None" = None,
    ) -> None:
        check_pages(pages)
        check_kv_scales(pages, k_scale, v_scale)
        _, _, _, num_kv_heads, _, head_dim = pages.shape
        self.group = check_heads(num_qo_heads, num_kv_heads, head_dim)
        check_at_least_one("max_requests", max_requests)
        check_at_least_one("max_kv_tokens", max_kv_tokens)
        if num_programs is not None:
            check_at_least_one("num_programs", num_programs)
        self.tile = tile or decode_tile(pages)
        if isinstance(self.tile, HopperDecodeTile):
            refusal = _hopper_refusal(pages)
            if refusal is not None:
                raise ShapeError(f"the Hopper kernel of decode does not take {refusal}")
        if rule.split_len % self.tile.block_n:
            raise ShapeError(
                f"split_len {rule.split_len} must be a multiple of the {self.tile.block_n} keys "
                "of a tile"
            )
        check_scores(scale, sliding_window, soft_cap)
        device = pages.device
        self.pages = pages
        self.num_qo_heads = num_qo_heads
        self.soft_cap = soft_cap
        self.k_scale = k_scale
        self.v_scale = v_scale
        self.scale_log2, self.soft_cap_log2 = score_factors(scale, soft_cap)
        self.sliding_window = sliding_window
        self.rule = rule
        self.max_requests = max_requests
        self.max_kv_tokens = max_kv_tokens
        # Programs of a lane take the same items, each for one key-value head.
        num_programs = num_programs or programs_for(device, self.tile.programs_per_sm)
        self.num_lanes = max(num_programs // num_kv_heads, 1)
        self.num_programs = self.num_lanes * num_kv_heads
        self.max_items = max_requests + 2 * self.num_lanes
        self.max_slots = max_shared_slots + max_slots(
            max_requests,
            max_kv_tokens,
            self.num_lanes,
            rule,
            begins_within=max_shared_slots > 0 or sliding_window is not None,
        )
        # Kernels read the next item's fields ahead, also after the last one: one item, or one for
        # each tile that the copy engine is ahead.
        ahead = 2 + self.tile.stages if isinstance(self.tile, HopperDecodeTile) else 1
        size = (self.num_lanes + self.max_items + ahead) * ITEM_FIELDS
        self._plan = PlanBuffer(size, device)
        if memory_of is not None:
            shape = memory_of.partial_acc.shape
            if shape[0] < self.max_slots or shape[1:] != (num_qo_heads, head_dim):
                raise CapacityError(
                    f"memory_of has partial results {tuple(shape)}, must have at least "
                    f"{self.max_slots} slots of {num_qo_heads} heads of {head_dim}"
                )
            self.partial_acc = memory_of.partial_acc
            self.partial_stats = memory_of.partial_stats
            self._arrivals = memory_of._arrivals
        else:
            self.partial_acc = torch.empty(
                (self.max_slots, num_qo_heads, head_dim), dtype=torch.float32, device=device
            )
            self.partial_stats = torch.empty(
                (self.max_slots, num_qo_heads, 3), dtype=torch.float32, device=device
            )
            self._arrivals = torch.zeros(
                (self.max_slots, num_kv_heads), dtype=torch.int32, device=device
            )
        self._pages_desc = None
        if isinstance(self.tile, HopperDecodeTile):
            self._pages_desc = _tiles_of(pages)
        self._batch: DecodeBatch | None = None

    def plan(
        self,
        kv_lens: Integers,
        *,
        rows: Integers | None = None,
        table_starts: Integers | None = None,
        first_private: Integers | None = None,
        num_shared_slots: Integers | None = None,
    ) -> DecodeItems:
        """Make the work items of a batch; one copy to the device on the current stream.

        Args:
            kv_lens: Tokens of each request, the new one included; 0 gives a row of zeros.
            rows: Row of each request in q and out, each once; None is 0, 1, 2, ...
            table_starts: Index of each request's first page in the page table, on the host; None
                is a table without gaps, ceil(kv_len / page_size) pages for each request.
            first_private: For each request, the first token that this kernel reads, a multiple of
                the split length and below its kv_len; None is 0.
            num_shared_slots: For each request, the number of slots that another kernel fills
                before each run, for the tokens before first_private; None is 0.

        Returns:
            The items; `first_slots` tells that other kernel where to write.

        Raises:
            CapacityError: If the batch is larger than the buffers.
            PageTableError: If a request begins before the page table.
            ShapeError: If arguments differ in length, a length is negative, a row is negative or
                given twice, or first_private is not a place to cut.
        """
        batch = self.check_plan(kv_lens, rows=rows, table_starts=table_starts)
        if first_private is not None:
            first_private = as_column("first_private", first_private, len(batch.kv_lens))
        if num_shared_slots is not None:
            num_shared_slots = as_column("num_shared_slots", num_shared_slots, len(batch.kv_lens))
            if np.minimum.reduce(num_shared_slots, initial=0) < 0:
                raise ShapeError(
                    f"num_shared_slots has {num_shared_slots.min()}, must be 0 or more"
                )
        return self.plan_batch(
            batch, first_private=first_private, num_shared_slots=num_shared_slots
        )

    def check_plan(
        self, kv_lens: Integers, *, rows: Integers | None, table_starts: Integers | None
    ) -> DecodeBatch:
        """Check the arguments of `plan` that describe the batch."""
        return check_batch(
            kv_lens,
            rows=rows,
            table_starts=table_starts,
            page_size=self.pages.shape[4],
            max_requests=self.max_requests,
            max_kv_tokens=self.max_kv_tokens,
        )

    def plan_batch(
        self,
        batch: DecodeBatch,
        *,
        num_busy_lanes: int | None = None,
        first_private: npt.NDArray[np.int64] | None = None,
        num_shared_slots: npt.NDArray[np.int64] | None = None,
    ) -> DecodeItems:
        """Do what `plan` does, for a batch that is checked, and columns of its length.

        Only the first `num_busy_lanes` get work; None is all.
        """
        if first_private is not None:
            self._check_first_private(first_private, batch.kv_lens)
        items = plan_decode(
            batch.kv_lens,
            rows=batch.rows,
            table_starts=batch.table_starts,
            rule=self.rule,
            sliding_window=self.sliding_window,
            num_lanes=self.num_lanes,
            keeps_whole=isinstance(self.tile, HopperDecodeTile),
            num_busy_lanes=num_busy_lanes,
            first_private=first_private,
            num_shared_slots=num_shared_slots,
        )
        if items.num_slots > self.max_slots:
            raise CapacityError(f"{items.num_slots} slots, at most {self.max_slots} are planned")
        used = items.table.size
        self._plan.host()[:used] = items.table.ravel()
        self._plan.send(used)
        self._batch = batch
        return items

    def run(
        self,
        q: Tensor,
        layer: int,
        kv_page_indices: Tensor,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend in one layer.

        Args:
            q: Rotated queries, [num_rows, num_qo_heads, head_dim], contiguous, dtype of the pool,
                or bfloat16 or float16 for one of fp8.
            layer: Layer of the pool.
            kv_page_indices: Page ids of all requests, int32.
            out: Shaped as q, of any float dtype, not in q's memory; None makes a new one with
                q's. Written at the planned rows, other rows are left as they are.
            lse: If given, [num_rows, num_qo_heads], float32, receives the log-sum-exp of the
                scores (natural log).

        Returns:
            The output, shaped as q.
        """
        self.check_run(q, layer, kv_page_indices, out, lse)
        if out is None:
            out = torch.empty_like(q)
        self.launch(q, layer, kv_page_indices, out, lse)
        return out

    def check_run(
        self,
        q: Tensor,
        layer: int,
        kv_page_indices: Tensor,
        out: Tensor | None,
        lse: Tensor | None,
    ) -> None:
        """Check the arguments of `run`."""
        check_attention_inputs(
            q, layer, kv_page_indices, pages=self.pages, num_qo_heads=self.num_qo_heads
        )
        check_attention_outputs(out, lse, q, dtype=FLOAT_DTYPES)
        if out is not None:
            check_own_memory("out", out, "q", q)
        batch = self._batch
        if batch is None:
            raise PlanError("nothing is planned, plan must come before run")
        check_rows(q, batch.num_rows)
        check_entries("kv_page_indices", kv_page_indices, batch.num_entries)
        if debug.is_on:
            check_scales(self.k_scale, self.v_scale, layer)
            entries = used_entries(
                batch.table_starts, batch.kv_lens, self.pages.shape[4], self._first_tokens(batch)
            )
            check_page_table(kv_page_indices, entries, self.pages.shape[0])

    def launch(
        self,
        q: Tensor,
        layer: int,
        kv_page_indices: Tensor,
        out: Tensor,
        lse: Tensor | None,
        *,
        overlaps: bool = False,
    ) -> None:
        """Launch what `run` does, without checks.

        Args:
            q, layer, kv_page_indices, out, lse: As those of `run`.
            overlaps: Whether to start while the launch before this one, which fills shared slots,
                still runs, and to wait for it only before the fold (CUDA devices).
        """
        _, num_layers, _, num_kv_heads, page_size, head_dim = self.pages.shape
        tile = self.tile
        kernel: Any
        strides: tuple[int, ...]
        if isinstance(tile, HopperDecodeTile):
            kernel, pool = paged_decode_hopper_kernel, self._pages_desc
            strides = (num_layers,)
            compiled = {"STAGES": tile.stages, "num_warps": 4}
        else:
            kernel, pool = paged_decode_kernel, self.pages
            strides = self.pages.stride()[:2]
            compiled = {
                "BLOCK_M": BLOCK_M,
                "BLOCK_N": tile.block_n,
                "BLOCK_D": padded(head_dim),
                "num_stages": tile.num_stages,
                "num_warps": tile.num_warps,
            }
        chain_options = chained(q)
        if overlaps:
            chain_options["IS_CHAINED"] = False  # it waits later
        kernel[(self.num_programs,)](
            out,
            lse if lse is not None else self.partial_stats,
            q,
            pool,
            kv_page_indices,
            self._plan.device_buffer,
            self.partial_acc,
            self.partial_stats,
            self._arrivals,
            self.k_scale,
            self.v_scale,
            layer,
            *strides,
            self.scale_log2,
            self.soft_cap_log2,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=self.group,
            HEAD_DIM=head_dim,
            PAGE_SIZE=page_size,
            SPLIT_LEN=self.rule.split_len,
            SEGMENT_LEN=self.rule.segment_len,
            BLOCK_GROUP=padded(self.group),
            ITEM_FIELDS=ITEM_FIELDS,
            HAS_WINDOW=self.sliding_window is not None,
            HAS_SOFT_CAP=self.soft_cap is not None,
            HAS_LSE=lse is not None,
            OVERLAPS=overlaps,
            **compiled,
            **chain_options,
        )

    def _first_tokens(self, batch: DecodeBatch) -> npt.NDArray[np.int64]:
        """Return the first token read of each request: its tile is read whole."""
        if self.sliding_window is None:
            return np.zeros_like(batch.kv_lens)
        first_tokens = np.maximum(batch.kv_lens - self.sliding_window, 0)
        return first_tokens // self.tile.block_n * self.tile.block_n

    def _check_first_private(
        self, first_private: npt.NDArray[np.int64], lens: npt.NDArray[np.int64]
    ) -> None:
        split_len = self.rule.split_len
        fits = (first_private % split_len == 0) & (first_private >= 0)
        fits &= first_private < np.maximum(lens, 1)
        if not fits.all():
            wrong = int(np.argmin(fits))
            raise ShapeError(
                f"first_private is {first_private[wrong]}, must be a multiple of split_len "
                f"{split_len} and below kv_len {lens[wrong]}"
            )


def _hopper_refusal(pages: Tensor) -> str | None:
    """Return what the Hopper kernel does not support in a pool, and what it supports."""
    if pages.element_size() > 2:
        return f"{pages.dtype}, only floats of 8 and 16 bits"
    return hopper_refusal(pages, head_dims=HOPPER_HEAD_DIMS, page_sizes=HOPPER_PAGE_SIZES)


def _tiles_of(pages: Tensor) -> TensorDescriptor:
    """Describe the pool so that one box is a tile's keys and its values, in blocks of columns."""
    _, _, _, num_kv_heads, page_size, head_dim = pages.shape
    element_bytes = pages.element_size()
    columns = min(head_dim, COLUMN_BLOCK_BYTES // element_bytes)
    return TensorDescriptor(
        pages,
        shape=[2, head_dim // columns, pages.numel() // head_dim, columns],
        strides=[num_kv_heads * page_size * head_dim, columns, head_dim, 1],
        block_shape=[2, head_dim // columns, 64, columns],
        layout=NVMMASharedLayout(
            swizzle_byte_width=columns * element_bytes,
            element_bitwidth=8 * element_bytes,
            rank=4,
        ),
    )
