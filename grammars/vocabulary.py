"""The bytes of each token of a model, from the model's own tokenizer.

Tokens without bytes are never drawn under a constraint: special and other added tokens, ids that
the tokenizer does not know, and ids that only pad the model's logits.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from grammars.errors import NoVocabulary

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Decoders that change tokens only where words begin, or not at all
_PLAIN_DECODERS = {"Fuse", "Strip"}


class ModelTokens(NamedTuple):
    """The tokens of a model's tokenizer."""

    texts: list[bytes]  # of each token id; of special and other added tokens, b""
    added: Mapping[str, int]  # text of each added token |-> its id


def read_vocabulary(folder: Path, vocab_size: int) -> ModelTokens:
    """Return the tokens whose ids are below `vocab_size`.

    Args:
        folder: With the model's tokenizer.json.
        vocab_size: The number of the model's logits; the tokenizer may know fewer tokens, or more.

    Raises:
        NoVocabulary: The file cannot be read, or its kind is unknown.
    """
    path = folder / "tokenizer.json"
    try:
        serialized = path.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(serialized)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise NoVocabulary(f"{path} cannot be read: {error}") from error
    decoders = list(_flat(json.loads(serialized).get("decoder")))
    added = tokenizer.get_added_tokens_decoder()
    tokens = [b""] * vocab_size
    for text, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
        if token_id < vocab_size and token_id not in added:
            tokens[token_id] = _bytes_of(text, decoders)
    known = {each.content: token_id for token_id, each in added.items() if token_id < vocab_size}
    return ModelTokens(tokens, known)


def _flat(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for each in decoder["decoders"]:
        yield from _flat(each)


def _bytes_of(text: str, decoders: list[Mapping[str, Any]]) -> bytes:
    for decoder in decoders:
        match decoder["type"]:
            case "ByteLevel":
                return _byte_level(text)
            case "ByteFallback":
                if found := _BYTE_TOKEN.fullmatch(text):
                    return bytes.fromhex(found[1])
            case "Replace" if "String" in decoder["pattern"]:
                text = text.replace(decoder["pattern"]["String"], decoder["content"])
            case "Metaspace":
                text = text.replace(decoder["replacement"], " ")
            case kind if kind not in _PLAIN_DECODERS:
                raise NoVocabulary(f"the decoder {kind} of tokenizer.json is not known")
    return text.encode()


def _byte_level(text: str) -> bytes:
    try:
        return bytes(_BYTES[each] for each in text)
    except KeyError:  # no text of this tokenizer has it
        return b""


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's character for each byte: printable ones stay, others move up."""
    alphabet = sorted(ByteLevel.alphabet())
    stay = {each: ord(each) for each in alphabet if ord(each) < 256}
    moved = [each for each in alphabet if ord(each) >= 256]
    others = (byte for byte in range(256) if byte not in stay.values())
    return stay | dict(zip(moved, others, strict=True))


_BYTES = _byte_of_character()
