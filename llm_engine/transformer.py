"""One decoder for all supported families, driven by ModelConfig; K and V live in pages.

Legend: T tokens of all slices, D hidden, N query heads, K key-value heads, H head dim, V vocab.
"""

import torch
from torch import Tensor
from torch.nn.functional import embedding

from llm_engine.attention import AttentionBackend
from llm_engine.forward_batch import ForwardBatch
from llm_engine.kv_reads import KVReads
from llm_engine.model_config import ModelConfig
from llm_engine.operations import Operations
from llm_engine.recordings import needs_results
from llm_engine.weights import DecoderWeights, LayerWeights, LinearWeights


class Decoder:
    """Stateless except for the pages that its attention back end writes."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        attention: AttentionBackend,
        operations: Operations,
    ) -> None:
        self._config = config
        self._weights = weights
        self._attention = attention
        self._operations = operations

    def take_reads(self) -> KVReads:
        """Return what attention has read since the last call; see `llm_engine.attention`."""
        return self._attention.take_reads()

    def hidden_states(self, batch: ForwardBatch) -> Tensor:
        """Compute all tokens of a batch, append their K and V to the pages; return [T, D]."""
        self._attention.plan(batch)
        return self.run_layers(batch.token_ids_T)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return the scores of the next token, [T, V], in the dtype of the weights."""
        normed_TD = self._norm(hidden_TD, self._weights.final_norm)
        return self._operations.linear(normed_TD, self._weights.lm_head, None)

    def run_layers(self, token_ids_T: Tensor) -> Tensor:
        """Compute the tokens of the pass that attention has planned; return [T, D]."""
        layers = self._weights.layers
        if not needs_results():  # all layers launch the same kernels
            layers = layers[:1]
        residual_TD = embedding(token_ids_T, self._weights.embedding)
        normed_TD = self._norm(residual_TD, layers[0].input_norm)
        for layer, weights in enumerate(layers):
            out_TD = self._attend(layer, weights, normed_TD)
            normed_TD = self._add_norm(out_TD, residual_TD, weights.mlp_norm)
            out_TD = self._feed_forward(weights, normed_TD)
            if layer + 1 < len(layers):
                normed_TD = self._add_norm(out_TD, residual_TD, layers[layer + 1].input_norm)
        return residual_TD.add_(out_TD)

    def _attend(self, layer: int, weights: LayerWeights, normed_TD: Tensor) -> Tensor:
        config = self._config
        qkv = self._linear(normed_TD, weights.qkv)
        num_heads = [config.num_qo_heads, config.num_kv_heads, config.num_kv_heads]
        q_TNH, k_TKH, v_TKH = torch.split(qkv.view(len(qkv), -1, config.head_dim), num_heads, dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q_TNH, k_TKH = self._norm(q_TNH, weights.q_norm), self._norm(k_TKH, weights.k_norm)
        q_TNH = self._attention.rotate_and_append(layer, q_TNH, k_TKH, v_TKH)
        out_TNH = self._attention.attend(layer, q_TNH)
        return self._linear(out_TNH.flatten(1), weights.output)

    def _feed_forward(self, weights: LayerWeights, normed_TD: Tensor) -> Tensor:
        gate_up = weights.gate_up
        gated = self._operations.gated_linear(normed_TD, gate_up.weight, gate_up.bias)
        return self._linear(gated, weights.down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._operations.rms_norm(x, weight, self._config.rms_norm_eps)

    def _add_norm(self, x_TD: Tensor, residual_TD: Tensor, weight: Tensor) -> Tensor:
        return self._operations.add_rms_norm(x_TD, residual_TD, weight, self._config.rms_norm_eps)

    def _linear(self, x: Tensor, weights: LinearWeights) -> Tensor:
        return self._operations.linear(x, weights.weight, weights.bias)
