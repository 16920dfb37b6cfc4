"""One forward pass as tensors: what slices become on the device.

Legend: B slices, T new tokens of all slices, P page-table entries of all slices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kv_cache.layout import num_pages_for
from llm_engine.sampling import SequenceSlice


@dataclass(frozen=True, kw_only=True, slots=True)
class PassInputs:
    """What a pass needs on the device. Page offsets must be computed in int64 there."""

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64, position of each token in its sequence
    append_page_T: Tensor  # int64, page that receives the token's K and V; -1: none does
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


def build_forward_batch(
    slices: Sequence[SequenceSlice], page_size: int, device: torch.device
) -> ForwardBatch:
    """Flatten slices into device tensors, in two copies that wait for nothing."""
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
    of_tokens = np.stack((token_ids, positions, append_page, positions % page_size))
    token_ids_T, positions_T, append_page_T, append_offset_T = upload(of_tokens, device)
    of_slices = upload(np.concatenate((page_indptr, all_pages)).astype(np.int32), device)

    return ForwardBatch(
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        append_page_T=append_page_T,
        append_offset_T=append_offset_T,
        kv_page_indptr=of_slices[: len(page_indptr)],
        kv_page_indices=of_slices[len(page_indptr) :],
        qo_lens=qo_lens,
        page_table=all_pages,
        table_starts=page_indptr[:-1],
        kv_lens=kv_lens,
        prompt_lens=tuple(each.prompt_len for each in slices),
    )


def upload(values: npt.NDArray[np.integer], device: torch.device) -> Tensor:
    """Copy integers to a device without waiting for what runs there."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":  # a copy from other memory waits for all that runs on the device
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
