"""Reference of rotating and appending."""

import torch
from torch import Tensor


def rotate_and_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    layer: int,
    *,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    append_page: Tensor,
    append_offset: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Rotate in halves, write k and v to their slots of `pages`, return the rotated q.

    Dimensions after those that cos and sin (half as many columns) rotate are copied. With scales,
    [num_layers, num_kv_heads], slots receive k and v divided by them, at most +-448.
    """
    half = cos.shape[1]

    def rotate(x: Tensor) -> Tensor:
        low, high, rest = x.float().tensor_split((half, 2 * half), dim=-1)
        c, s = cos[positions][:, None], sin[positions][:, None]
        return torch.cat((low * c - high * s, high * c + low * s, rest), dim=-1)

    def to_page(x: Tensor, scale: Tensor | None) -> Tensor:
        if scale is not None:
            x = (x.float() / scale[layer][:, None]).clamp(-448, 448)
        return x.to(pages.dtype)

    written = append_page >= 0
    page, offset = append_page[written], append_offset[written]
    pages[page, layer, 0, :, offset] = to_page(rotate(k)[written], k_scale)
    pages[page, layer, 1, :, offset] = to_page(v[written], v_scale)
    return rotate(q).to(q.dtype)
