"""Greedy tokens for prompts of token ids: as transformers computes them, or one engine alone."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from llm_engine.drawing import next_draw
from llm_engine.load_engine import load_engine
from llm_engine.sampling import SamplingParams, SequenceSlice


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


class EngineOracle:
    """Continues prompts one by one on a single engine: no cluster, no batch, no transfer."""

    def __init__(self, folder: Path, device: str) -> None:
        self._engine = load_engine(folder, page_size=16, num_pages=512, device=device)

    def tokens(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return the next `num_tokens` tokens; end tokens do not end it."""
        new: list[int] = []
        start, fed = 0, prompt
        while len(new) < num_tokens:
            draw = next_draw(
                SamplingParams(temperature=0.0, ignore_eos=True),
                choice=0,
                prompt_token_ids=prompt,
                output_token_ids=new,
                eos_token_ids=(),
            )
            piece = SequenceSlice(
                token_ids=fed,
                start=start,
                page_ids=range(512),
                num_prompt_tokens=len(prompt),
                draws=(draw,),
            )
            token_id = self._engine.forward([piece])[0][0].token_id
            start, fed = start + len(fed), [token_id]
            new = [*new, token_id]
        return new
