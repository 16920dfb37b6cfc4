"""What transformers reads from GGUF files."""

from pathlib import Path

from tokenizers import Tokenizer


def transformers_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer that transformers makes of a GGUF file."""
    # Older versions, which serve as the oracle of other tests, do not have the second one.
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, content, _ = get_gguf_tokenizer(str(path))
    tokenizer: Tokenizer = convert_gguf_tokenizer(architecture, content)[0]
    return tokenizer
