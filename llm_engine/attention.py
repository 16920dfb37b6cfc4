"""The attention back end as the model sees it: plan once per pass, then run once per layer.

Implementations: `attention_torch.TorchAttention` (any device, the reference) and
`attention_triton.TritonAttention` (CUDA, or Triton's interpreter in tests). Each is made for one
pool tensor [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim] and one rotary table.
Sequences of a pass may share pages; an implementation may read these once for all of them if
results stay bit-identical (docs/decisions/0009-cascade-in-the-engine.md).

Legend: T tokens, N query heads, K key-value heads, H head dim.
"""

from typing import Protocol

from torch import Tensor

from llm_engine.forward_batch import ForwardBatch
from llm_engine.kv_reads import KVReads


class AttentionBackend(Protocol):
    """Made for one pool and one model; holds the plan of one pass at a time."""

    def plan(self, batch: ForwardBatch) -> None:
        """Prepare for one pass; the calls below refer to this batch."""
        ...

    def rotate_and_append(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """Rotate queries and keys by position, write K and V to the pages; return queries."""
        ...

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Causal attention of rotated queries over all tokens in their pages, [T, N, H]."""
        ...

    def take_reads(self) -> KVReads:
        """Return what passes of drawn tokens have read since the last call, as planned."""
        ...
