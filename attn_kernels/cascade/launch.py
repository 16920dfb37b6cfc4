"""Cascade attention: reads a prefix that requests of a batch share once for all of them.

Two launches per layer. The first one processes the shared prefixes, tile by tile of query rows, and
stores partial results. The second one is paged decode attention, which processes the rest of each
request and folds everything in key order. It starts while the first one still runs and waits for it
only before it folds.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_kernels.cascade.bodies import shared_prefix_kernel
from attn_kernels.cascade.bodies_hopper import shared_prefix_hopper_kernel
from attn_kernels.cascade.items import FIELDS, ITEM_FIELDS
from attn_kernels.cascade.model import FP8_FIT, CascadeModel
from attn_kernels.cascade.plan import CascadeEstimate, CascadePlan, plan_cascade
from attn_kernels.cascade.prefix_tree import prefix_tree, within_window
from attn_kernels.chain import chained, may_chain
from attn_kernels.checks import (
    HALF_DTYPES,
    Integers,
    as_column,
    check_aligned,
    check_at_least_one,
    check_page_ids,
    check_pages,
    hopper_refusal,
)
from attn_kernels.decode.launch import DEFAULT_RULE, DecodeAttention, DecodeTile, HopperDecodeTile
from attn_kernels.decode.launch import decode_tile as shipped_decode_tile
from attn_kernels.decode.plan import DecodeBatch, DecodeItems, SplitRule
from attn_kernels.errors import DtypeError, PlanError, ShapeError
from attn_kernels.tiles import PlanBuffer, on_hopper, padded, programs_for

# Of the shared part's tiles, per us and multiprocessor, measured on one H200
TRITON_FLOPS, TRITON_FP8_FLOPS, HOPPER_FLOPS = 3.0e6, 1.3e6, 3.8e6
# The shape that the model is fitted to; smaller ones are not faster for it.
FITTED_GROUP, FITTED_HEAD_DIM = 4, 128
# Query rows of a key-value head, at most, for which narrow tiles are chosen
MAX_NARROW_ROWS = 128
HOPPER_HEAD_DIMS = (64, 128)
HOPPER_PAGE_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTile:
    """How the kernel of the shared part is compiled; its bits are the same for any choice."""

    block_m: int  # query rows (request, head)
    num_warps: int
    num_stages: int  # key tiles in flight
    programs_per_sm: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HopperSharedTile:
    """How the Hopper kernel of the shared part is compiled: two warpgroups of 64 query rows."""

    block_m: ClassVar[int] = 128  # the kernel is written for it
    stages: int = 4  # key tiles in flight
    programs_per_sm: int = 1


def shared_tile(
    pages: Tensor, max_rows: int, *, is_hopper: bool | None = None
) -> SharedTile | HopperSharedTile:
    """Return the shipped tile.

    Args:
        pages: The pool.
        max_rows: Most query rows of one key-value head: requests times query heads of it.
        is_hopper: Whether the device is a Hopper GPU; None looks.
    """
    head_dim = pages.shape[-1]
    if pages.element_size() == 4:  # no tensor cores in full float32: for tests, not for speed
        return SharedTile(block_m=16, num_warps=4, num_stages=2, programs_per_sm=1)
    if is_hopper is None:
        is_hopper = on_hopper(pages)
    is_taken = pages.dtype in HALF_DTYPES and _hopper_refusal(pages) is None
    if is_hopper and is_taken and max_rows > MAX_NARROW_ROWS:
        return HopperSharedTile()
    if head_dim > 128:  # two states of 256 columns fill the registers of eight warps
        return SharedTile(block_m=64, num_warps=8, num_stages=2, programs_per_sm=1)
    # One program, so that programs of decode fit beside it.
    return SharedTile(block_m=64, num_warps=4, num_stages=3, programs_per_sm=1)


class CascadeAttention:
    """Attention of one new token per request, over the prefix tree of the batch.

    Like `DecodeAttention`, but `plan` gets the page tables. With a sliding window, only requests
    that lie within it share: the others each begin at a different token. `run` launches for one
    layer: only flat decode if the plan shares nothing (see `num_shared_items`). A CUDA graph serves
    later plans of its kind, sharing or flat.

    Args:
        pages: The pool, [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim], contiguous.
        num_qo_heads: Query heads, 1 to 16 for each key-value head.
        scale: Factor of the scores, usually head_dim ** -0.5.
        max_requests: Most requests of a plan.
        max_kv_tokens: Most tokens of a plan, summed over its requests, shared ones for each.
        sliding_window: Number of last tokens that a query sees, itself included; None: all.
        soft_cap: If given, a score s becomes soft_cap * tanh(s / soft_cap).
        k_scale, v_scale: Factors of keys and values of an fp8 (e4m3) pool, [num_layers,
            num_kv_heads], float32, positive; None for any other pool.
        is_exact: Whether results are bit-identical to flat decode (in half precision), whatever the
            batch shares. False takes up to 19 % less time, and differs in the last float32 bits.
        rule: Where keys are cut.
        decode_tile: How the decode kernel is compiled, for flat plans, too; None: the shipped
            choice for each.
        tile: How the shared part's kernel is compiled; None: the shipped choice.
        num_programs: Programs of the shared part's launch; None: as many as run at once.
        memory_of: Whose memory of partial results to share, which must suffice; of the two one runs
            at a time. None allocates.

    Attributes:
        decode: Reads the parts that requests do not share, and folds.
        flat: Reads everything if nothing is shared.
        model: Fitted costs; may be replaced between plans.
        num_early_lanes: Lanes of decode whose programs start while a shared part occupies every
            multiprocessor. Only these get work if there are no more requests than they are, and
            the shared part has one item for each of its programs, all of one length.
    """

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
        is_exact: bool = True,
        rule: SplitRule = DEFAULT_RULE,
        decode_tile: DecodeTile | HopperDecodeTile | None = None,
        tile: SharedTile | HopperSharedTile | None = None,
        num_programs: int | None = None,
        memory_of: "CascadeAttention | None" = None,
    ) -> None:
        check_pages(pages)
        check_at_least_one("max_requests", max_requests)
        check_at_least_one("max_kv_tokens", max_kv_tokens)
        if num_programs is not None:
            check_at_least_one("num_programs", num_programs)
        # Segments of all tokens, and the splits of a few requests or of the ends of all.
        self.max_shared_slots = max_kv_tokens // rule.segment_len + max(
            max_requests * rule.splits_per_segment, 2048
        )
        make_decode = partial(
            DecodeAttention,
            pages,
            num_qo_heads=num_qo_heads,
            scale=scale,
            max_requests=max_requests,
            max_kv_tokens=max_kv_tokens,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
            rule=rule,
        )
        own_tile = decode_tile or shipped_decode_tile(pages, beside_shared=True)
        self.decode: DecodeAttention = make_decode(
            tile=own_tile,
            max_shared_slots=self.max_shared_slots,
            memory_of=memory_of.decode if memory_of else None,
        )
        self.flat = self.decode
        if decode_tile is None and shipped_decode_tile(pages) != own_tile:
            self.flat = make_decode(memory_of=self.decode)
        _, _, _, num_kv_heads, page_size, head_dim = pages.shape
        device = pages.device
        group = self.decode.group
        self.tile = tile or shared_tile(pages, max_requests * group)
        self.num_programs = num_programs or programs_for(device, self.tile.programs_per_sm)
        # Where the shared part is on every multiprocessor, one program of decode starts beside each
        # of its narrow tiles, and the others would start late. Conversions from fp8 want them all.
        is_narrow = isinstance(self.tile, SharedTile) and isinstance(own_tile, HopperDecodeTile)
        some_are_late = is_narrow and pages.dtype in HALF_DTYPES
        num_turns = own_tile.programs_per_sm if some_are_late else 1
        self.num_early_lanes = self.decode.num_lanes // num_turns
        self.unit_len = math.lcm(rule.split_len, page_size)
        is_fp8 = pages.element_size() == 1
        flops = HOPPER_FLOPS if isinstance(self.tile, HopperSharedTile) else TRITON_FLOPS
        flops_per_token = 4 * self.tile.block_m * padded(head_dim) * self.tile.programs_per_sm
        self.model = CascadeModel(
            num_kv_heads=num_kv_heads,
            members_per_tile=self.tile.block_m // group,
            token_bytes=2 * num_kv_heads * head_dim * pages.element_size(),
            num_programs=self.num_programs,
            num_decode_programs=self.decode.num_programs,
            num_flat_lanes=self.flat.num_lanes,
            tile_token_us=flops_per_token / (TRITON_FP8_FLOPS if is_fp8 else flops),
            fold_weight=max(group / FITTED_GROUP * max(head_dim / FITTED_HEAD_DIM, 1.0), 1.0),
        )
        if is_fp8:
            self.model = replace(self.model, **FP8_FIT)
        elif self.flat is self.decode:
            # With two programs on a multiprocessor flat decode, too, gains more from reading again.
            rate = self.model.repeated_bytes_per_us
            self.model = replace(self.model, flat_repeated_bytes_per_us=rate)
        if not is_fp8 and isinstance(own_tile, DecodeTile):
            # The fit is that of the Hopper kernel: estimates must differ more.
            self.model = replace(self.model, margin=0.85)
        self._pages_desc = None
        if isinstance(self.tile, HopperSharedTile):
            if pages.dtype not in HALF_DTYPES:
                raise DtypeError(
                    f"pages is {pages.dtype}, the Hopper kernel of the shared part takes only "
                    f"{' or '.join(map(str, HALF_DTYPES))}"
                )
            refusal = _hopper_refusal(pages)
            if refusal is not None:
                raise ShapeError(f"the Hopper kernel of the shared part does not take {refusal}")
            layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
            box = [min(page_size, self.decode.tile.block_n), 64]
            self._pages_desc = TensorDescriptor.from_tensor(pages.view(-1, head_dim), box, layout)
        self.is_exact = is_exact
        self.overlaps = may_chain(pages)  # of both launches
        self._plan = PlanBuffer(1 + self.max_shared_slots * (ITEM_FIELDS + 2 * group), device)
        self._shared: CascadePlan | None = None
        self._batch: DecodeBatch

    @property
    def num_shared_items(self) -> int:
        """Work items of the shared part; 0 if the plan is flat."""
        return 0 if self._shared is None else self._shared.num_items

    @property
    def shared(self) -> CascadePlan:
        """What the last plan shares; raises PlanError before the first."""
        if self._shared is None:
            raise PlanError("nothing is planned, plan must come before shared")
        return self._shared

    def plan(
        self,
        kv_lens: Integers,
        table_starts: npt.NDArray[np.integer],
        page_indices: npt.NDArray[np.integer],
        *,
        rows: Integers | None = None,
    ) -> CascadeEstimate:
        """Make the work items of a batch; two copies to the device on the current stream, one if
        nothing is shared.

        Args:
            kv_lens: Tokens of each request, the new one included; 0 gives a row of zeros.
            table_starts: Index of each request's first page in `page_indices`.
            page_indices: Page ids of all requests, on the host.
            rows: Row of each request in q and out, each once; None: 0, 1, 2, ...

        Raises:
            CapacityError: If the batch is larger than the buffers.
            PageTableError: If a request has a page outside the pool, or begins before the table.
            ShapeError: If arguments differ in length, a length is negative, or a row is negative or
                given twice.
        """
        batch = self.decode.check_plan(kv_lens, rows=rows, table_starts=table_starts)
        lens, starts = batch.kv_lens, batch.table_starts
        page_indices = np.asarray(page_indices)
        check_page_ids(
            page_indices,
            self.decode.pages.shape[0],
            table_starts=starts,
            kv_lens=lens,
            num_entries=batch.num_entries,
            page_size=self.decode.pages.shape[4],
        )
        visible, shareable = within_window(lens, self.decode.sliding_window)
        nodes = prefix_tree(
            starts,
            page_indices,
            shareable,
            page_size=self.decode.pages.shape[4],
            unit_len=self.unit_len,
        )
        shared = plan_cascade(
            nodes,
            visible,
            table_starts=starts,
            rule=self.decode.rule,
            model=self.model,
            max_slots=self.max_shared_slots,
            is_exact=self.is_exact,
        )
        items = self._plan_own(shared, batch)
        # Only now: a refused batch leaves the last plan unchanged.
        self._shared, self._batch = shared, batch
        if shared.num_items > 0:
            self._copy(shared, items)
        return shared.estimate

    def plan_next_step(self, kv_lens: Integers) -> None:
        """Plan the next step of the same batch: each request keeps its pages and may have more.

        Shared parts stay the same; only requests' own parts are planned again.

        Raises:
            CapacityError: If the batch is larger than the buffers.
            PlanError: If nothing is planned.
            ShapeError: If the number of requests differs, or a request has become shorter than its
                shared part, or shares and has become longer than the sliding window.
        """
        shared = self._shared
        if shared is None:
            raise PlanError("nothing is planned, plan must come before plan_next_step")
        rows, starts = self._batch.rows, self._batch.table_starts
        kv_lens = as_column("kv_lens", kv_lens, len(rows))
        batch = self.decode.check_plan(kv_lens, rows=rows, table_starts=starts)
        self._check_window(shared, batch.kv_lens)
        items = self._plan_own(shared, batch)
        self._batch = batch
        if shared.num_items > 0 and not np.array_equal(items.first_slots, self._first_slots):
            self._copy(shared, items)

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
                or bfloat16 or float16 for an fp8 pool.
            layer: Layer of the pool.
            kv_page_indices: Page ids of all requests as planned, int32, on the device.
            out: Shaped as q, of any float dtype, not in q's memory; None: a new one with q's
                dtype. Only the planned rows are written.
            lse: If given, [num_rows, num_qo_heads], float32, receives the log-sum-exp of the
                scores (natural log).

        Returns:
            The output, shaped as q.
        """
        if self.num_shared_items == 0:
            return self.flat.run(q, layer, kv_page_indices, out=out, lse=lse)
        self.decode.check_run(q, layer, kv_page_indices, out, lse)
        if isinstance(self.tile, HopperSharedTile):
            check_aligned("q", q)
        if out is None:
            out = torch.empty_like(q)
        self._launch_shared(q, layer, kv_page_indices)
        self.decode.launch(q, layer, kv_page_indices, out, lse, overlaps=self.overlaps)
        return out

    def _launch_shared(self, q: Tensor, layer: int, kv_page_indices: Tensor) -> None:
        decode, tile = self.decode, self.tile
        _, num_layers, _, num_kv_heads, page_size, head_dim = decode.pages.shape
        kernel: Any
        geometry: tuple[Any, ...]
        if isinstance(tile, HopperSharedTile):
            kernel, pool = shared_prefix_hopper_kernel, self._pages_desc
            geometry = (layer, num_layers)
            compiled = {"STAGES": tile.stages, "num_warps": 4}
        else:
            kernel, pool = shared_prefix_kernel, decode.pages
            geometry = (decode.k_scale, layer, *decode.pages.stride()[:2])
            compiled = {
                "BLOCK_M": tile.block_m,
                "BLOCK_D": padded(head_dim),
                "num_stages": tile.num_stages,
                "num_warps": tile.num_warps,
            }
        kernel[(self.num_programs,)](
            q,
            pool,
            kv_page_indices,
            self._plan.device_buffer,
            decode.partial_acc,
            decode.partial_stats,
            *geometry,
            decode.scale_log2,
            decode.soft_cap_log2,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=decode.group,
            HEAD_DIM=head_dim,
            PAGE_SIZE=page_size,
            SPLIT_LEN=decode.rule.split_len,
            SEGMENT_LEN=decode.rule.segment_len,
            BLOCK_N=decode.tile.block_n,
            ITEM_FIELDS=ITEM_FIELDS,
            HAS_SOFT_CAP=decode.soft_cap is not None,
            IS_EXACT=self.is_exact,
            OVERLAPS=self.overlaps,
            **compiled,
            **chained(q),
        )

    def _plan_own(self, shared: CascadePlan, batch: DecodeBatch) -> DecodeItems:
        """Plan the parts that requests do not share."""
        if shared.num_items == 0:
            return self.flat.plan_batch(batch)
        # One item for each program, all equal: they end together. Where they end one after the
        # other, all lanes take the multiprocessors that they leave.
        begin, end = shared.fields[:, FIELDS.index("begin")], shared.fields[:, FIELDS.index("end")]
        item_lens = end - begin  # longest first
        num_items = self.num_programs // self.model.num_kv_heads
        end_together = shared.num_items == num_items and item_lens[0] == item_lens[-1]
        starts_early = end_together and len(batch.rows) <= self.num_early_lanes
        return self.decode.plan_batch(
            batch,
            num_busy_lanes=self.num_early_lanes if starts_early else None,
            first_private=shared.first_private,
            num_shared_slots=shared.num_shared_slots,
        )

    def _check_window(self, shared: CascadePlan, kv_lens: npt.NDArray[np.int64]) -> None:
        window = self.decode.sliding_window
        if window is None or shared.num_items == 0:
            return
        longest = kv_lens[shared.members].max()
        if longest > window:
            raise ShapeError(
                f"kv_lens has {longest} for a request that shares a prefix, must be at most "
                f"sliding_window {window}; plan looks for prefixes again"
            )

    def _copy(self, shared: CascadePlan, items: DecodeItems) -> None:
        """Copy the items, followed by their query rows, to the device."""
        self._first_slots = items.first_slots
        first_row = 1 + shared.num_items * ITEM_FIELDS
        num_heads, group = self.decode.num_qo_heads, self.decode.group
        used = first_row + 2 * group * len(shared.members)
        host = self._plan.host()
        host[0] = shared.num_items
        fields = host[1:first_row].reshape(-1, ITEM_FIELDS)
        fields[:] = shared.fields
        fields[:, 0] = first_row + 2 * group * shared.fields[:, 0]
        fields[:, 1] *= group
        # Rows are query heads: in q, and in the partial results of a request's first slot.
        rows = host[first_row:used].reshape(-1, group, 2)
        heads = np.arange(group)
        rows[:, :, 0] = self._batch.rows[shared.members, None] * num_heads + heads
        rows[:, :, 1] = items.first_slots[shared.members, None] * num_heads + heads
        self._plan.send(used)


def _hopper_refusal(pages: Tensor) -> str | None:
    """Return what the Hopper kernel does not support in a pool's shape."""
    return hopper_refusal(pages, head_dims=HOPPER_HEAD_DIMS, page_sizes=HOPPER_PAGE_SIZES)
