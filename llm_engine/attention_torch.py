"""Attention over paged K and V in plain torch: for hosts without a GPU, and as the reference.

Each slice is computed separately, so that its result does not depend on the rest of the batch.

Legend: T new tokens, N query heads, K key-value heads, G query heads per key-value head,
H head dim, S tokens of one sequence.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from llm_engine.decode_rows import decode_rows
from llm_engine.forward_batch import ForwardBatch
from llm_engine.kv_reads import NO_READS, KVReads, flat_reads


class TorchAttention:
    """Implements attention.AttentionBackend in float32 arithmetic on any device."""

    def __init__(
        self,
        pages: Tensor,  # the pool, [num_pages, num_layers, 2, K, page_size, H]
        cos: Tensor,  # float32 [max_positions, H / 2]
        sin: Tensor,
        *,
        num_qo_heads: int,  # of TritonAttention; here q itself tells
        scale: float,
        sliding_window: int | None,
    ) -> None:
        self._pages = pages
        self._cos = cos
        self._sin = sin
        self._scale = scale
        self._sliding_window = sliding_window
        self._token_bytes = pages.stride(0) * pages.element_size() // pages.shape[4]
        self._batch: ForwardBatch | None = None
        self._reads = NO_READS

    def plan(self, batch: ForwardBatch) -> None:
        self._batch = batch
        kv_lens = decode_rows(batch).kv_lens
        if self._sliding_window is not None:
            kv_lens = np.minimum(kv_lens, self._sliding_window)
        self._reads += flat_reads(int(kv_lens.sum()), self._token_bytes)

    def take_reads(self) -> KVReads:
        # As if a resumed sequence had its drawn tokens read one by one, as they were drawn.
        reads, self._reads = self._reads, NO_READS
        return reads

    def rotate_and_append(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        batch = self._batch
        assert batch is not None, "plan() comes first"
        cos = self._cos[batch.positions_T].unsqueeze(1)  # [T, 1, H / 2]
        sin = self._sin[batch.positions_T].unsqueeze(1)
        where = (batch.append_page_T, slice(None), batch.append_offset_T)
        layer_pages = self._pages[:, layer]
        layer_pages[:, 0][where] = _rotate(k_TKH, cos, sin)
        layer_pages[:, 1][where] = v_TKH
        return _rotate(q_TNH, cos, sin)

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        batch = self._batch
        assert batch is not None, "plan() comes first"
        page_size = self._pages.shape[4]
        outs = []
        first_page = 0
        for q, kv_len in zip(torch.split(q_TNH, list(batch.qo_lens)), batch.kv_lens, strict=True):
            num_pages = -(-kv_len // page_size)
            page_ids = batch.kv_page_indices[first_page : first_page + num_pages]
            first_page += num_pages
            outs.append(self._attend_one(layer, q, page_ids, kv_len))
        return torch.cat(outs)

    def _attend_one(self, layer: int, q_TNH: Tensor, page_ids: Tensor, kv_len: int) -> Tensor:
        contents = self._pages[page_ids, layer]  # [P, 2, K, page_size, H]
        kv = contents.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :kv_len].float()
        k_KSH, v_KSH = kv.unbind()
        num_tokens, _, head_dim = q_TNH.shape
        num_kv_heads = k_KSH.shape[0]
        q_KGTH = q_TNH.float().view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        out_KGTH = functional.scaled_dot_product_attention(
            q_KGTH,
            k_KSH.unsqueeze(1).expand(-1, q_KGTH.shape[1], -1, -1),
            v_KSH.unsqueeze(1).expand(-1, q_KGTH.shape[1], -1, -1),
            attn_mask=self._mask(num_tokens, kv_len, q_TNH.device),
            scale=self._scale,
        )
        return out_KGTH.permute(2, 0, 1, 3).reshape(num_tokens, -1, head_dim).to(q_TNH.dtype)

    def _mask(self, num_tokens: int, kv_len: int, device: torch.device) -> Tensor | None:
        """Return which keys each new token sees, bool [T, S]; None if one token sees all."""
        if num_tokens == 1 and (self._sliding_window is None or self._sliding_window >= kv_len):
            return None
        query = torch.arange(kv_len - num_tokens, kv_len, device=device).unsqueeze(1)
        key = torch.arange(kv_len, device=device)
        mask = key <= query
        if self._sliding_window is not None:
            mask &= key > query - self._sliding_window
        return mask


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
