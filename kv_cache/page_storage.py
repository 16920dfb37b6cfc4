"""Page contents as the transfer layer sees them: opaque bytes by page id.

`kv_cache.torch_storage.TorchPageStorage` keeps them in a tensor, on a CPU or a GPU. This file is
free of torch.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

PageBytes = npt.NDArray[np.uint8]  # [num_pages, page_bytes]


class PageStorage(Protocol):
    """Pages by id. Ids must be valid; only its owner writes a page (see kv_cache.page_pool)."""

    @property
    def num_pages(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    def export_pages(self, page_ids: Sequence[int]) -> PageBytes:
        """Copy pages out, in the order given: a new array in host memory."""
        ...

    def import_pages(self, page_ids: Sequence[int], contents: PageBytes) -> None:
        """Overwrite pages; returns when the contents are visible to the engine."""
        ...

    def digest_pages(self, page_ids: Sequence[int]) -> list[bytes]:
        """Return a 16-byte digest of each page; equal contents give equal digests on any device."""
        ...
