"""Reference of copies and digests of pages."""

import torch
from torch import Tensor


def gather_pages(pages: Tensor, page_ids: Tensor, staging: Tensor) -> None:
    """Copy pages by id into staging."""
    source = pages.reshape(pages.shape[0], -1).view(torch.uint8)
    target = staging.reshape(staging.shape[0], -1).view(torch.uint8)
    target[: len(page_ids)] = source[page_ids.long()]


def scatter_pages(staging: Tensor, page_ids: Tensor, pages: Tensor) -> None:
    """Copy staging to pages by id."""
    source = staging.reshape(staging.shape[0], -1).view(torch.uint8)
    target = pages.reshape(pages.shape[0], -1).view(torch.uint8)
    target[page_ids.long()] = source[: len(page_ids)].to(target.device)


def copy_pages(pages: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Copy pages within a pool."""
    flat = pages.reshape(pages.shape[0], -1).view(torch.uint8)
    flat[target_ids.long()] = flat[source_ids.long()]


def copy_between(source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor) -> None:
    """Copy pages by id into pages of another pool."""
    from_flat = source.reshape(source.shape[0], -1).view(torch.uint8)
    to_flat = target.reshape(target.shape[0], -1).view(torch.uint8)
    to_flat[target_ids.long()] = from_flat[source_ids.long()]


def digest_pages(words: Tensor, page_ids: Tensor, multipliers: Tensor) -> Tensor:
    """Return the two wrap-around sums of words times multipliers, int64 [n, 2]."""
    chosen = words[page_ids].long()
    return (chosen[:, None] * multipliers[None]).sum(-1)
