"""Mean negative log-likelihood of a fixed text: what a number format costs a trained model.

    python -m benchmarks.nll --model MODEL [--device cuda] [--dtype bfloat16 ...] [--out FILE.json]

For each number format the engine computes the tokens of the text twice: as a prompt, in chunks, and
one by one, as it computes what it has drawn; on GPUs the two take different kernels. transformers
computes them in float32, which is what the others are compared with. `exp` of the mean is the
perplexity.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measured_host import add_commit, conditions
from benchmarks.result_file import ResultFile
from benchmarks.stream_statistics import Row
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
        engine: The engine; its first pages are overwritten.
        token_ids: The tokens of the text, two or more.
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


def reference_nll(model: Path, token_ids: Sequence[int]) -> float:
    """Return the mean that transformers computes in float32, on the CPU."""
    reference = _read_gguf(model) if model.is_file() else _read_folder(model)
    tokens = torch.tensor([token_ids])
    with torch.inference_mode():
        logits = reference(tokens).logits[0].float()
    return float(torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:]))


def _read_folder(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _read_gguf(file: Path) -> Any:
    """Return a model without `from_pretrained`, which would need the package accelerate here."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(weights, strict=not config.tie_word_embeddings)
    return model.eval()


def measure(options: argparse.Namespace, dtype: str, token_ids: Sequence[int]) -> Row:
    """Return the means of one number format."""
    engine = load_engine(
        options.model,
        page_size=PAGE_SIZE,
        num_pages=num_pages_for(len(token_ids), PAGE_SIZE),
        device=options.device,
        dtype=dtype,
    )
    num_drawn = min(DRAWN_TOKENS, len(token_ids) - 1)
    return {
        "case": f"nll/{engine.layout.dtype}",
        "as_prompt": mean_nll(engine, token_ids, num_prompt_tokens=len(token_ids)),
        f"last_{num_drawn}_as_drawn": mean_nll(
            engine, token_ids, num_prompt_tokens=len(token_ids) - num_drawn
        ),
    }


def main() -> None:
    """Print all means and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder or GGUF file")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=["auto"], nargs="+", help="one or more number formats")
    parser.add_argument(
        "--text", type=Path, help="file with the text; default: the demo's document"
    )
    add_commit(parser)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8") if options.text else DOCUMENT
    token_ids = text_tokens(options.model, text)
    head = {
        **conditions("nll", options.commit),
        "configuration": {
            "model": model_name(options.model),
            "device": options.device,
            "num_tokens": len(token_ids),
        },
    }
    result = ResultFile(options.out, head)
    expected = reference_nll(options.model, token_ids)
    result.add({"case": "nll/transformers-float32", "as_prompt": expected})
    for dtype in options.dtype:
        found = measure(options, dtype, token_ids)
        means = [value for key, value in found.items() if key != "case"]
        found["largest_difference_percent"] = max(abs(mean / expected - 1) * 100 for mean in means)
        result.add(found)


if __name__ == "__main__":
    main()
