"""Launches prefill attention for Hopper GPUs: tensor copy engine and specialized warps."""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_kernels.checks import HALF_DTYPES, check_aligned, hopper_refusal
from attn_kernels.errors import ShapeError
from attn_kernels.prefill.bodies_hopper import paged_prefill_hopper_kernel
from attn_kernels.prefill.plan import UNIT_FIELDS, PrefillBatch, PrefillCapacity, plan_units
from attn_kernels.tiles import LOG2_E, PlanBuffer, on_hopper, padded, programs_for, to_device

HEAD_DIMS = (64, 128)
PAGE_SIZES = (16, 32, 64, 128)
BLOCK_M = 128  # two warpgroups of 64 rows
COLUMN_BLOCK = 64  # elements of a row that the copy engine puts side by side: 128 bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class HopperTile:
    """How the kernel is compiled; one choice for all chunks, or their bits would differ."""

    block_n: int = 128  # keys, a multiple of the page size
    k_stages: int = 2  # key tiles in shared memory
    v_stages: int = 2


def is_for(pages: Tensor) -> bool:
    """Return whether the kernel supports a pool and its device."""
    return on_hopper(pages) and _refusal(pages) is None


class HopperPrefill:
    """Implements `attn_kernels.prefill.launch.PrefillKernel`."""

    def __init__(
        self,
        pages: Tensor,
        *,
        group: int,
        scale: float,
        sliding_window: int | None,
        capacity: PrefillCapacity | None,
        tile: HopperTile,
    ) -> None:
        refusal = _refusal(pages)
        if refusal is not None:
            raise ShapeError(f"the Hopper kernel does not take {refusal}")
        self._pages = pages
        self._group = group
        self._scale_log2 = scale * LOG2_E
        self._sliding_window = sliding_window
        self._tile = tile
        self._num_programs = programs_for(pages.device, 1)  # at most, or always in fixed buffers
        self._buffer: PlanBuffer | None = None
        self._has_work = False
        if capacity is None:
            self._unit_indptr = torch.zeros(1, dtype=torch.int32, device=pages.device)
            self._units = torch.empty((0, UNIT_FIELDS), dtype=torch.int32, device=pages.device)
        else:
            max_items = capacity.max_items(group=group, block_m=BLOCK_M)
            max_units = max_items * pages.shape[3] + self._num_programs
            self._first_unit = padded(self._num_programs + 1)  # in the buffer; aligned
            self._buffer = PlanBuffer(self._first_unit + max_units * UNIT_FIELDS, pages.device)
            table = self._buffer.device_buffer
            self._unit_indptr = table[: self._num_programs + 1]
            self._units = table[self._first_unit :].view(max_units, UNIT_FIELDS)
        # For the copy engine the pool is a matrix: a box is a page's tokens and some columns.
        _, _, _, _, page_size, head_dim = pages.shape
        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        box = [page_size, COLUMN_BLOCK]
        self._pages_desc = TensorDescriptor.from_tensor(pages.view(-1, head_dim), box, layout)

    def plan(self, batch: PrefillBatch) -> None:
        """Distribute the query tiles of a batch to programs and copy the table to the device."""
        _, _, _, num_kv_heads, _, head_dim = self._pages.shape
        table = plan_units(
            batch,
            group=self._group,
            num_kv_heads=num_kv_heads,
            block_m=BLOCK_M,
            block_n=self._tile.block_n,
            sliding_window=self._sliding_window,
            token_bytes=2 * head_dim * self._pages.element_size(),
            max_programs=self._num_programs,
        )
        self._has_work = len(table.units) > 0
        if not self._has_work:
            return
        if self._buffer is None:
            unit_indptr = to_device(table.unit_indptr, self._pages.device)
            units = to_device(table.units, self._pages.device)
            self._unit_indptr, self._units = unit_indptr, units
            return
        table = table.with_programs(self._num_programs)
        used = self._first_unit + table.units.size
        sent = self._buffer.host()
        sent[: len(table.unit_indptr)] = table.unit_indptr
        sent[self._first_unit : used] = table.units.reshape(-1)
        self._buffer.send(used)

    def check(self, out: Tensor, q: Tensor) -> None:
        """Check requirements of this kernel alone on a run's tensors."""
        check_aligned("q", q)
        check_aligned("out", out)

    def launch(
        self,
        out: Tensor,
        lse: Tensor | None,
        q: Tensor,
        layer: int,
        kv_page_indptr: Tensor,
        kv_page_indices: Tensor,
    ) -> None:
        """Attend in one layer; the arguments are checked."""
        _, num_layers, _, num_kv_heads, page_size, head_dim = self._pages.shape
        if not self._has_work:
            return
        num_programs = self._unit_indptr.shape[0] - 1
        paged_prefill_hopper_kernel[(num_programs,)](
            out,
            lse if lse is not None else out,
            q,
            self._pages_desc,
            kv_page_indptr,
            kv_page_indices,
            self._unit_indptr,
            self._units,
            layer,
            num_layers,
            self._scale_log2,
            self._sliding_window or 0,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=self._group,
            HEAD_DIM=head_dim,
            PAGE_SIZE=page_size,
            BLOCK_M=BLOCK_M,
            BLOCK_N=self._tile.block_n,
            K_STAGES=self._tile.k_stages,
            V_STAGES=self._tile.v_stages,
            UNIT_FIELDS=UNIT_FIELDS,
            HAS_WINDOW=self._sliding_window is not None,
            HAS_LSE=lse is not None,
            num_warps=4,
        )


def _refusal(pages: Tensor) -> str | None:
    """Return what the kernel does not support in a pool, and what it supports."""
    if pages.dtype not in HALF_DTYPES:
        return f"{pages.dtype}, only 16-bit floats"
    return hopper_refusal(pages, head_dims=HEAD_DIMS, page_sizes=PAGE_SIZES)
