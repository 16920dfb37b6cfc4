"""Small random checkpoints in the folder format of Hugging Face, written by transformers.

Weights are far from their usual initialization, so that logits differ clearly between tokens, and
norms and biases are random too, so that a forgotten one shows.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SMALL = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    max_shard_size: str = "1GB",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> PreTrainedModel:
    """Write a checkpoint to `folder` and return the model, in evaluation mode.

    Args:
        folder: Made if it does not exist.
        family: A key of CLASSES.
        seed: The seed of the weights.
        max_shard_size: As transformers' save_pretrained; small values give several shards.
        dtype: The dtype of the weights.
        changes: Fields of config.json that differ from SMALL.
    """
    config_class, model_class = CLASSES[family]
    model = model_class(config_class(**(SMALL | changes)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(0.15 * noise)
    model.to(dtype).eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def edit_json(path: Path, **changes: object) -> None:
    """Set fields of a JSON object in a file; "-" removes one."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value != "-"}))


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Return the logits after every token, float32 [num_tokens, vocab]."""
    logits: torch.Tensor = model(input_ids=torch.tensor([token_ids])).logits[0].float()
    return logits


def reference_after(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> list[int]:
    """Return what is most probable before each token of an answer, in one pass over all of it.

    The answer is greedy if it equals that.
    """
    logits = reference_logits(model, [*prompt, *answer])
    best: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return best


@torch.inference_mode()
def reference_greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the most probable continuation, end tokens ignored."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
