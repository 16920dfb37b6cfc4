"""Greedy tokens as transformers computes them, for prompts of token ids."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class GreedyOracle:
    """Continues prompts one by one in float32, without batching and without pages."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def tokens(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return the next `num_tokens` tokens; end tokens do not end it."""
        new: list[int] = []
        fed = torch.tensor([prompt])
        cache = None
        with torch.inference_mode():
            while len(new) < num_tokens:
                output = self._model(fed, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                new.append(int(output.logits[0, -1].argmax()))
                fed = torch.tensor([[new[-1]]])
        return new
