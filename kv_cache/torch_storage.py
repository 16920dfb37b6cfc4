"""Page contents in one torch tensor, on the CPU or a CUDA device.

Digest of a page with words w[0..n), 32 bits sign-extended, and fixed odd multipliers m[2][0..n):

    lane l = sum(w[i] * m[l][i]) mod 2**64        digest = lane 0, lane 1, little-endian

Every multiplier is odd and a word differs by less than 2**32, so a change within one word always
changes both lanes; another change goes unnoticed with a probability of at most 2**-64 (its lowest
bit at most 2**31). It is integer arithmetic on bits: equal on all devices, in any order of
summation, also for NaN and -0.0. It finds damage and mix-ups; it does not authenticate.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kv_cache.layout import KVLayout
from kv_cache.page_storage import PageBytes

# (words int32 [num_pages, page_words], page_ids int64 [n], multipliers int64 [2, page_words])
# -> lanes int64 [n, 2]; all on the storage's device.
DigestKernel = Callable[[Tensor, Tensor, Tensor], Tensor]
# (words, pairs of source and target page); waits for nothing
CopyKernel = Callable[[Tensor, Sequence[tuple[int, int]]], None]

# Words that torch_digest turns into int64 at a time: 24 MiB of temporary memory.
_BLOCK_WORDS = 1 << 20


class TorchPageStorage:
    """Implements `kv_cache.page_storage.PageStorage` in memory of a torch device.

    Pages start as zeros, so that unwritten slots are finite. Work on a CUDA device runs on the
    calling thread's current stream, but digests on one of their own: they wait for no step of the
    engine. Export, import and digest return when it is done.

    Attributes:
        pages: [num_pages, *layout.page_shape], of the layout's dtype.
        words: The same memory as [num_pages, page_bytes / 4], int32; copies need no other type.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        device: torch.device | str,
        *,
        digest_kernel: DigestKernel | None = None,
        copy_kernel: CopyKernel | None = None,
    ) -> None:
        """Allocate the pool; kernels replace torch_digest and torch_copy where they are faster."""
        self.layout = layout
        self.device = torch.device(device)
        dtype: torch.dtype = getattr(torch, layout.dtype)
        self.pages: Tensor = torch.zeros(
            (num_pages, *layout.page_shape), dtype=dtype, device=self.device
        )
        self.words = self.pages.view(num_pages, -1).view(torch.int32)
        self._multipliers = digest_multipliers(self.words.shape[1]).to(self.device)
        self._digest_kernel = digest_kernel or torch_digest
        self._copy_kernel = copy_kernel or torch_copy
        self._digest_stream: Any = None
        if self.device.type == "cuda":
            # They are short, and transfers wait for them: their blocks go before a step's.
            self._digest_stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]

    @property
    def num_pages(self) -> int:
        return self.pages.shape[0]

    @property
    def page_bytes(self) -> int:
        return self.layout.page_bytes

    def export_pages(self, page_ids: Sequence[int]) -> PageBytes:
        """Copy pages out, in the order given: a new array [len(page_ids), page_bytes]."""
        words = self.words.index_select(0, self._index(page_ids))
        exported: PageBytes = words.cpu().numpy().view(np.uint8)
        return exported

    def import_pages(self, page_ids: Sequence[int], contents: PageBytes) -> None:
        """Overwrite distinct pages; raises ValueError if `contents` is not one row per page."""
        expected = (len(page_ids), self.page_bytes)
        if contents.shape != expected or contents.dtype != np.uint8:
            raise ValueError(
                f"contents are {contents.dtype} {contents.shape}, must be uint8 {expected}"
            )
        writable = np.require(contents, requirements=["C", "W", "A"])
        words = torch.from_numpy(writable.view(np.int32)).to(self.device)
        self.words.index_copy_(0, self._index(page_ids), words)
        self.synchronize()

    def digest_pages(self, page_ids: Sequence[int]) -> list[bytes]:
        """Return the 16-byte digest of each page, in the order given.

        The host must know that the work which wrote them has ended.
        """
        with self._on_digest_stream():
            lanes = self._digest_kernel(self.words, self._index(page_ids), self._multipliers)
            return [row.tobytes() for row in lanes.cpu().numpy().astype("<i8")]

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Overwrite the second page of each pair with the first; no page stands on both sides.

        In the order of the current stream; does not wait for it.
        """
        for pair in copies:
            self._check_ids(pair)
        if copies:
            self._copy_kernel(self.words, copies)

    def synchronize(self) -> None:
        """Return when all work on the current stream has ended; CPUs have none that has not."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _index(self, page_ids: Sequence[int]) -> Tensor:
        """Return ids on the device; waits for it."""
        self._check_ids(page_ids)
        return torch.tensor(list(page_ids), dtype=torch.int64, device=self.device)

    def _check_ids(self, page_ids: Sequence[int]) -> None:
        for page_id in page_ids:
            # A negative index would silently address from the end.
            if not 0 <= page_id < self.num_pages:
                raise IndexError(f"page id {page_id} is not in [0, {self.num_pages})")

    def _on_digest_stream(self) -> AbstractContextManager[object]:
        if self._digest_stream is None:  # torch.cuda.stream(None) would initialize CUDA
            return nullcontext()
        return torch.cuda.stream(self._digest_stream)


def digest_multipliers(page_words: int) -> Tensor:
    """Return the odd multipliers of both lanes, [2, page_words], int64, on the CPU.

    SplitMix64 of the position, so that no library version can change them.
    """
    value = np.arange(1, 2 * page_words + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value = (value ^ (value >> np.uint64(31))) | np.uint64(1)
    # Interleaved, so that a multiplier does not depend on the length of the page.
    lanes = np.ascontiguousarray(value.reshape(page_words, 2).T)
    return torch.from_numpy(lanes.view(np.int64))


def torch_copy(words: Tensor, copies: Sequence[tuple[int, int]]) -> None:
    """Copy pages, one launch for each; a CopyKernel for any device."""
    for source, target in copies:
        words[target].copy_(words[source])


def torch_digest(words: Tensor, page_ids: Tensor, multipliers: Tensor) -> Tensor:
    """Return the digest lanes of pages, int64 [n, 2]; a DigestKernel for any device."""
    page_words = words.shape[1]
    lanes = torch.zeros((len(page_ids), 2), dtype=torch.int64, device=words.device)
    pages_at_once = max(1, _BLOCK_WORDS // page_words)
    for first in range(0, len(page_ids), pages_at_once):
        some = slice(first, first + pages_at_once)
        for start in range(0, page_words, _BLOCK_WORDS):
            part = slice(start, start + _BLOCK_WORDS)
            block = words[:, part].index_select(0, page_ids[some]).to(torch.int64)
            # NOTE: int64 wraps around on overflow on every device.
            lanes[some, 0] += (block * multipliers[0, part]).sum(1)
            lanes[some, 1] += block.mul_(multipliers[1, part]).sum(1)
    return lanes
