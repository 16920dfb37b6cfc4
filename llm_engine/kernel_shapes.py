"""Refuses models whose heads or vocabulary no kernel supports, before weights are read."""

from pathlib import Path

from attn_kernels.limits import MAX_VOCAB_SIZE, group_refusal, head_dim_refusal
from llm_engine.errors import UnsupportedModel
from llm_engine.model_config import ModelConfig


def check_kernel_shapes(source: Path, config: ModelConfig) -> None:
    """Check that kernels support a model's heads and vocabulary.

    Args:
        source: File of the configuration, for errors.
        config: The configuration of the model.

    Raises:
        UnsupportedModel: Names the key of config.json, what was found and what is allowed.
    """
    if allowed := head_dim_refusal(config.head_dim):
        raise UnsupportedModel(
            f"{source}: head_dim is {config.head_dim}, must be {allowed} on GPUs"
        )
    if allowed := group_refusal(config.num_qo_heads // config.num_kv_heads):
        raise UnsupportedModel(
            f"{source}: num_attention_heads is {config.num_qo_heads}, must be {allowed} times "
            f"num_key_value_heads ({config.num_kv_heads}) on GPUs"
        )
    if config.vocab_size > MAX_VOCAB_SIZE:
        raise UnsupportedModel(
            f"{source}: vocab_size is {config.vocab_size}, must be at most {MAX_VOCAB_SIZE} on GPUs"
        )
