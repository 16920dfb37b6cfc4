"""One forward pass as tensors: slices on the device.

Legend: B slices, T new tokens of all slices, P page-table entries of all slices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_kernels.tiles import to_device
from kv_cache.layout import num_pages_for
from llm_engine.sampling import SequenceSlice

ALIGNMENT_BYTES = 16  # on which Triton specializes kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class PassInputs:
    """The inputs of a pass on the device, where page offsets must be computed in int64."""

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64, position of each token in its sequence
    append_page_T: Tensor  # int64, page that receives the token's K and V; -1: none
    append_offset_T: Tensor  # int64, its slot within that page
    kv_page_indices: Tensor  # int32 [P]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch(PassInputs):
    """Ragged batch over paged K and V."""

    kv_page_indptr: Tensor  # int32 [B + 1]
    qo_lens: tuple[int, ...]  # on the host: new tokens of each slice
    page_table: npt.NDArray[np.int64]  # host copy of kv_page_indices
    table_starts: npt.NDArray[np.int64]  # [B], on the host: where slices begin in page_table
    kv_lens: tuple[int, ...]  # host copy: tokens in each sequence after the append
    prompt_lens: tuple[int, ...]  # on the host: leading tokens of each slice that are prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBatch:
    """The same batch before it is on the device."""

    of_tokens: npt.NDArray[np.int64]  # [4, T]: ids, positions, pages and slots of the append
    page_indptr: npt.NDArray[np.int64]  # [B + 1]
    page_table: npt.NDArray[np.int64]  # [P]
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    prompt_lens: tuple[int, ...]

    def on_device(
        self, of_tokens: Tensor, kv_page_indptr: Tensor, kv_page_indices: Tensor
    ) -> ForwardBatch:
        """Return the batch with the device's copies of the first three, or longer ones."""
        token_ids_T, positions_T, append_page_T, append_offset_T = of_tokens
        return ForwardBatch(
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            append_page_T=append_page_T,
            append_offset_T=append_offset_T,
            kv_page_indptr=kv_page_indptr,
            kv_page_indices=kv_page_indices,
            qo_lens=self.qo_lens,
            page_table=self.page_table,
            table_starts=self.page_indptr[:-1],
            kv_lens=self.kv_lens,
            prompt_lens=self.prompt_lens,
        )


def build_forward_batch(
    slices: Sequence[SequenceSlice], page_size: int, device: torch.device
) -> ForwardBatch:
    """Flatten slices into device tensors."""
    return send_batch(build_host_batch(slices, page_size), device)


def send_batch(batch: HostBatch, device: torch.device) -> ForwardBatch:
    """Send a batch to the device, in two asynchronous copies.

    All tensors are aligned, whatever the numbers of tokens and slices. For others Triton would use
    kernels that `Engine.warm_up` has not loaded.
    """
    num_fields, num_tokens = batch.of_tokens.shape
    of_tokens = np.zeros((num_fields, _aligned(num_tokens, 8)), dtype=np.int64)
    of_tokens[:, :num_tokens] = batch.of_tokens
    num_borders = len(batch.page_indptr)
    first_page = _aligned(num_borders, 4)
    of_slices = np.zeros(first_page + len(batch.page_table), dtype=np.int32)
    of_slices[:num_borders] = batch.page_indptr
    of_slices[first_page:] = batch.page_table
    sent = to_device(of_slices, device)
    return batch.on_device(
        to_device(of_tokens, device)[:, :num_tokens], sent[:num_borders], sent[first_page:]
    )


def _aligned(size: int, item_bytes: int) -> int:
    """Return the least number of items, from `size` on, that ends at an aligned address."""
    step = ALIGNMENT_BYTES // item_bytes
    return -(-size // step) * step


def build_host_batch(slices: Sequence[SequenceSlice], page_size: int) -> HostBatch:
    """Flatten slices."""
    qo_lens = tuple(len(each.token_ids) for each in slices)
    kv_lens = tuple(each.start + length for each, length in zip(slices, qo_lens, strict=True))
    num_pages = [num_pages_for(kv_len, page_size) for kv_len in kv_lens]
    for each in slices:
        each.check(page_size)
    positions = np.concatenate(
        [np.arange(kv - qo, kv, dtype=np.int64) for qo, kv in zip(qo_lens, kv_lens, strict=True)]
    )
    tables = [
        np.asarray(each.page_ids[:count], dtype=np.int64)
        for each, count in zip(slices, num_pages, strict=True)
    ]
    owner = np.repeat(np.arange(len(slices)), qo_lens)
    page_indptr = np.concatenate([[0], np.cumsum(num_pages)])
    all_pages = np.concatenate(tables)
    append_page = all_pages[page_indptr[owner] + positions // page_size]

    token_ids = np.concatenate([np.asarray(each.token_ids, dtype=np.int64) for each in slices])
    return HostBatch(
        of_tokens=np.stack((token_ids, positions, append_page, positions % page_size)),
        page_indptr=page_indptr,
        page_table=all_pages,
        qo_lens=qo_lens,
        kv_lens=kv_lens,
        prompt_lens=tuple(each.prompt_len for each in slices),
    )
