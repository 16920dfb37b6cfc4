"""Mean negative log-likelihood of a fixed text: what a number format costs a trained model.

    python -m benchmarks.nll --model MODEL [--device cuda] [--dtype bfloat16] [--out FILE.json]

The text is given, and the engine computes its tokens twice: as a prompt, in chunks, and one by one,
as it computes what it has drawn; on GPUs the two take different kernels. `exp` of the mean is the
perplexity.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from cli.demo_text import DOCUMENT
from kv_cache.layout import num_pages_for
from llm_engine.engine import Engine
from llm_engine.forward_batch import build_forward_batch
from llm_engine.load_engine import load_engine
from llm_engine.model_files import model_name, text_folder
from llm_engine.sampling import SequenceSlice
from router.model_folder import read_model_folder

PAGE_SIZE = 64
CHUNK_TOKENS = 256
DRAWN_TOKENS = 256  # of the text's end, in the second case


def mean_nll(engine: Engine, token_ids: Sequence[int], *, num_prompt_tokens: int) -> float:
    """Return the mean over all tokens but the first, in nats.

    Args:
        engine: Whose first pages are overwritten.
        token_ids: Of the text, two or more.
        num_prompt_tokens: Computed as a prompt; those after them one by one, as drawn ones are.
    """
    total = 0.0
    with torch.inference_mode():
        for first, logits in _logits(engine, token_ids[:-1], num_prompt_tokens):
            following = token_ids[first + 1 : first + 1 + len(logits)]
            targets = torch.tensor(following, device=logits.device)
            losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum")
            total += float(losses)
    return total / (len(token_ids) - 1)


def _logits(
    engine: Engine, token_ids: Sequence[int], num_prompt_tokens: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield the position of a chunk's first token, and the scores after each of them, [T, V]."""
    page_size = engine.layout.page_size
    page_ids = range(num_pages_for(len(token_ids), page_size))
    start = 0
    while start < len(token_ids):
        end = min(start + CHUNK_TOKENS, num_prompt_tokens, len(token_ids))
        if start >= num_prompt_tokens:
            end = start + 1
        chunk = SequenceSlice(
            token_ids=token_ids[start:end],
            start=start,
            page_ids=page_ids,
            num_prompt_tokens=num_prompt_tokens,
        )
        batch = build_forward_batch([chunk], page_size, engine.storage.device)
        yield start, engine.decoder.logits(engine.decoder.hidden_states(batch))
        start = end


def text_tokens(model: Path, text: str) -> list[int]:
    """Return a text's token ids, with the special tokens that the model wants."""
    tokenizer = read_model_folder(text_folder(model), max_prompt_chars=len(text)).tokenizer
    assert tokenizer, "a model's folder has a tokenizer"
    return tokenizer.encode(text, add_special_tokens=True)


def main() -> None:
    """Print both numbers and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Folder or GGUF file.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--text", type=Path, help="Default: the demo's document.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8") if options.text else DOCUMENT
    token_ids = text_tokens(options.model, text)
    engine = load_engine(
        options.model,
        page_size=PAGE_SIZE,
        num_pages=num_pages_for(len(token_ids), PAGE_SIZE),
        device=options.device,
        dtype=options.dtype,
    )
    num_drawn = min(DRAWN_TOKENS, len(token_ids) - 1)
    result = {
        "command": " ".join(sys.argv),
        "model": model_name(options.model),
        "device": torch.cuda.get_device_name() if options.device != "cpu" else "cpu",
        "dtype": engine.layout.dtype,
        "num_tokens": len(token_ids),
        "as_prompt": mean_nll(engine, token_ids, num_prompt_tokens=len(token_ids)),
        f"last_{num_drawn}_as_drawn": mean_nll(
            engine, token_ids, num_prompt_tokens=len(token_ids) - num_drawn
        ),
    }
    for name, value in result.items():
        perplexity = f" nats, perplexity {math.exp(value):.4f}" if isinstance(value, float) else ""
        print(f"{name:>20}  {value}{perplexity}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
