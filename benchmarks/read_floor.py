"""Reads the keys and values of a decode case and computes nothing.

A decode kernel has to bring the same bytes to its multiprocessors, so this is about the least that
it can show by the method of benchmarks.kernels. It is not a strict bound, but the fastest read that
was found: the tensor copy engine fills shared memory, as far ahead as fits, with no boundaries
between requests. It copies whole boxes of up to 64 tokens, which is up to 2 % more than the cases
of lognormal lengths hold, and exactly what all others hold.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_kernels.tiles import programs_for

MAX_BOX_ROWS = 64  # tokens
BOX_COLUMNS = 64  # 16-bit elements: the 128 bytes that the copy engine puts side by side
STAGES_BYTES = 192 << 10  # of the 227 KB of shared memory


def box_rows(page_size: int) -> int:
    """Return the tokens of a box: a page, or a part of a large one."""
    return min(page_size, MAX_BOX_ROWS)


def box_table(
    kv_lens: Sequence[int], kv_page_indices: npt.NDArray[np.int32], page_size: int
) -> npt.NDArray[np.int32]:
    """List the boxes that hold a token of a case, in token order.

    Args:
        kv_lens: Tokens of each request.
        kv_page_indices: Page ids of all requests, ceil(kv_len / page_size) for each.
        page_size: Tokens, 16, 32, 64 or 128.

    Returns:
        For each box its page id times the boxes of a page, plus its place in the page.
    """
    rows = box_rows(page_size)
    boxes_per_page = page_size // rows
    first, boxes = 0, []
    for kv_len in kv_lens:
        num_pages = -(-kv_len // page_size)
        page_ids = kv_page_indices[first : first + num_pages, None]
        of_pages = (page_ids * boxes_per_page + np.arange(boxes_per_page)).ravel()
        boxes.append(of_pages[: -(-kv_len // rows)])
        first += num_pages
    return np.concatenate(boxes).astype(np.int32)


class ReadFloor:
    """Reads the boxes of one batch; a run may be captured in a CUDA graph.

    Args:
        pages: The pool, [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim], contiguous,
            with rows of 128 or 256 bytes and fewer than 2**31 of them.
        kv_lens: Tokens of each request.
        kv_page_indices: Page ids of all requests, int32, without gaps.

    Attributes:
        num_bytes: Read by a run: those of the batch, and the rest of each request's last box.
    """

    def __init__(self, pages: Tensor, kv_lens: Sequence[int], kv_page_indices: Tensor) -> None:
        words = pages.view(torch.bfloat16)  # a copy takes no notice of what bits mean
        _, self._num_layers, _, self._num_kv_heads, self._page_size, self._columns = words.shape
        self._box_rows = box_rows(self._page_size)
        table = box_table(kv_lens, kv_page_indices.cpu().numpy(), self._page_size)
        self._boxes = torch.from_numpy(table).to(pages.device)
        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        rows = words.view(-1, self._columns)
        self._pages_desc = TensorDescriptor.from_tensor(rows, [self._box_rows, BOX_COLUMNS], layout)
        stage_bytes = 2 * self._box_rows * self._columns * words.element_size()
        self._num_stages = STAGES_BYTES // stage_bytes
        self._num_lanes = max(programs_for(pages.device, 1) // self._num_kv_heads, 1)
        self.num_bytes = len(table) * stage_bytes * self._num_kv_heads

    def run(self, layer: int) -> None:
        """Read the keys and values of one layer."""
        read_boxes_kernel[(self._num_lanes * self._num_kv_heads,)](
            self._pages_desc,
            self._boxes,
            self._boxes.numel(),
            layer,
            self._num_layers,
            NUM_KV_HEADS=self._num_kv_heads,
            PAGE_SIZE=self._page_size,
            COLUMNS=self._columns,
            BOX_ROWS=self._box_rows,
            BOX_COLUMNS=BOX_COLUMNS,
            STAGES=self._num_stages,
            num_warps=1,
        )


# Not specialized: a case must not cost a compilation. Names of a kernel have no types.
@gluon.jit(do_not_specialize=["num_boxes", "layer", "num_layers"])  # type: ignore[untyped-decorator]
def read_boxes_kernel(  # type: ignore[no-untyped-def]
    pages_desc,  # [num_pages * num_layers * 2 * num_kv_heads * page_size, columns]
    boxes_ptr,  # [num_boxes], int32, see box_table
    num_boxes,
    layer,
    num_layers,
    NUM_KV_HEADS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    COLUMNS: gl.constexpr,
    BOX_ROWS: gl.constexpr,
    BOX_COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,  # boxes in flight
):
    """Copy each box of keys, and the one of values beside it, to shared memory."""
    # Grid: (num_lanes * num_kv_heads,); a lane has an equal run of boxes.
    PARTS: gl.constexpr = COLUMNS // BOX_COLUMNS
    BOXES_PER_PAGE: gl.constexpr = PAGE_SIZE // BOX_ROWS
    STAGE_BYTES: gl.constexpr = 2 * BOX_ROWS * COLUMNS * 2
    shape: gl.constexpr = [STAGES * 2 * PARTS, BOX_ROWS, BOX_COLUMNS]
    buffers = gl.allocate_shared_memory(pages_desc.dtype, shape, pages_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for barrier in gl.static_range(STAGES):
        mbarrier.init(full.index(barrier), count=1)

    my_head = gl.program_id(0) % NUM_KV_HEADS
    my_lane = gl.program_id(0) // NUM_KV_HEADS
    num_lanes = gl.num_programs(0) // NUM_KV_HEADS
    my_first = my_lane * num_boxes // num_lanes
    my_count = (my_lane + 1) * num_boxes // num_lanes - my_first
    for index in range(my_count + STAGES - 1):
        if index < my_count:
            stage = index % STAGES
            box = gl.load(boxes_ptr + my_first + index)
            keys = ((box // BOXES_PER_PAGE * num_layers + layer) * 2) * NUM_KV_HEADS + my_head
            key_row = keys * PAGE_SIZE + box % BOXES_PER_PAGE * BOX_ROWS
            value_row = key_row + NUM_KV_HEADS * PAGE_SIZE
            mbarrier.expect(full.index(stage), STAGE_BYTES)
            for part in gl.static_range(PARTS):
                column = part * BOX_COLUMNS
                buffer = (stage * PARTS + part) * 2
                tma.async_copy_global_to_shared(
                    pages_desc, [key_row, column], full.index(stage), buffers.index(buffer)
                )
                tma.async_copy_global_to_shared(
                    pages_desc, [value_row, column], full.index(stage), buffers.index(buffer + 1)
                )
        done = index - (STAGES - 1)
        if done >= 0:
            mbarrier.wait(full.index(done % STAGES), (done // STAGES) & 1)
