"""SmolLM2-135M-Instruct: the file that the demo serves, and the model that transformers reads."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from unittest.mock import patch

import gguf
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from cluster.demo_model import INSTALL_TRAINED, trained_model

# All tests with it run in one process: each one reads it for ten seconds, and then holds 540 MB.
GROUP = "trained-model"


def trained_path() -> Path:
    """Return the GGUF file; a test that needs it fails without."""
    path = trained_model()
    assert path, f"run `{INSTALL_TRAINED}`, as `make test` does"
    return path


@cache
def reference_model() -> LlamaForCausalLM:
    """Return the model in float32, as transformers itself reads the file."""
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    with no_init_weights():
        model = LlamaForCausalLM(config)
    model.tie_weights()
    # transformers makes the same map of names for each of 397 modules.
    names = cache(gguf.get_tensor_name_map)
    with patch.object(gguf, "get_tensor_name_map", names):
        read = load_gguf_checkpoint(trained_path(), return_tensors=True, model_to_load=model)
    model.load_state_dict(read["tensors"], strict=False)  # the output is tied
    return model.eval()


class GreedyCheck:
    """Judges greedy answers by one pass over prompt and answer instead of one per token.

    A prompt that begins as the one before it is computed only from where the two part.
    """

    def __init__(self) -> None:
        self._model = reference_model()
        self._computed: list[int] = []
        self._cache = DynamicCache(config=self._model.config)

    @torch.inference_mode()
    def greedy_after(self, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """Return what is most probable after the prompt and after each token of its answer.

        The answer is greedy if this equals it, but for the last one.
        """
        tokens = [*prompt, *answer]
        known = 0  # whose keys are kept
        while known < min(len(self._computed), len(prompt) - 1):
            if self._computed[known] != tokens[known]:
                break
            known += 1
        if known < len(self._computed):
            self._cache.crop(known - len(self._computed))  # below 0: so many fewer
        logits = self._model(
            torch.tensor([tokens[known:]]),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=len(answer) + 1,
        ).logits
        self._computed = tokens
        best: list[int] = logits[0].argmax(-1).tolist()
        return best
