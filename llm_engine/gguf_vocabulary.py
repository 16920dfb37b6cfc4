"""The vocabulary of a GGUF file: its tokens, which of them are special, and which end an answer."""

import reprlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm_engine.config_fields import ConfigFields
from llm_engine.errors import CheckpointCorrupt
from llm_engine.gguf_file import GGUFHeader

# Values of tokenizer.ggml.token_type
UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)
MAX_TOKEN_CHARS = 1024  # real ones have up to 512, of blanks

# Special tokens that end an answer, besides the file's end token: a file names only one, but chat
# models end a turn and a text differently. llama.cpp uses the same texts.
END_TEXTS = frozenset({
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>",
    "<end_of_turn>", "</s>", "<EOT>", "_<EOT>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
})  # fmt: skip
END_KEYS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)

# Recommended sampling setting of a file |-> field of generation_config.json
SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """All lists are by token id."""

    tokens: Sequence[str]  # all different
    types: Sequence[int]
    scores: Sequence[float]  # empty where there are none
    named: Mapping[str, int]  # "bos_token", "eos_token", "unk_token", "pad_token" |-> id

    def ids_of(self, *types: int) -> list[int]:
        """Return the tokens of some types."""
        return [token_id for token_id, each in enumerate(self.types) if each in types]


def read_vocabulary(header: GGUFHeader, named_by_default: Mapping[str, int]) -> Vocabulary:
    """Read and check tokens, types and scores.

    Args:
        header: The header of the file.
        named_by_default: Names of special tokens that a file may omit |-> id.

    Raises:
        UnsupportedModel: If a key has a value that it must not have.
        CheckpointCorrupt: If tokens, types and scores contradict each other.
    """
    fields = ConfigFields(header.metadata, str(header.path))
    tokens = read_texts(fields, "tokenizer.ggml.tokens")
    # The format allows empty tokens; this is llama.cpp's name for them.
    tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    for token_id, token in enumerate(tokens):
        if len(token) > MAX_TOKEN_CHARS or ids[token] != token_id:
            allowed = f"different tokens of up to {MAX_TOKEN_CHARS} characters"
            found = "there twice" if ids[token] != token_id else f"{len(token)} characters long"
            raise CheckpointCorrupt(
                f"{fields.source}: tokenizer.ggml.tokens[{token_id}], {reprlib.repr(token)}, is "
                f"{found}; must be {allowed}"
            )
    types = _numbers(header, "tokenizer.ggml.token_type", len(tokens)) or [NORMAL] * len(tokens)
    if wrong := set(types) - set(range(BYTE + 1)):
        raise fields.unsupported("tokenizer.ggml.token_type", min(wrong), f"0 to {BYTE}")
    return Vocabulary(
        tokens=tokens,
        types=types,
        scores=_numbers(header, "tokenizer.ggml.scores", len(tokens)),
        named=_named_tokens(fields, types, named_by_default),
    )


def generation_config(header: GGUFHeader, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the content of generation_config.json: end tokens and defaults for sampling."""
    fields = ConfigFields(header.metadata, str(header.path))
    num_tokens = len(vocabulary.tokens)
    ends = {_token_id(fields, key, num_tokens) for key in END_KEYS if fields.has(key)}
    if "eos_token" in vocabulary.named:
        ends.add(vocabulary.named["eos_token"])
    ends.update(
        token_id
        for token_id in vocabulary.ids_of(CONTROL)
        if vocabulary.tokens[token_id] in END_TEXTS
    )
    config: dict[str, Any] = {"eos_token_id": sorted(ends)}
    if "bos_token" in vocabulary.named:
        config["bos_token_id"] = vocabulary.named["bos_token"]
    for key, name in SAMPLING_KEYS.items():
        if fields.has(key):
            value = fields.value(key)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise fields.unsupported(key, value, "a number")
            config[name] = value  # the router checks its range, as for any other folder
    return config


def read_texts(fields: ConfigFields, key: str) -> list[str]:
    """Return a list of strings that must not be empty."""
    texts = fields.strings(key)
    if not texts:
        raise fields.unsupported(key, "empty or missing", "a list of strings")
    return texts


def _named_tokens(
    fields: ConfigFields, types: Sequence[int], by_default: Mapping[str, int]
) -> dict[str, int]:
    keys = {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
    }
    named = {
        name: _token_id(fields, key, len(types), by_default.get(name))
        for name, key in keys.items()
        if fields.has(key) or name in by_default
    }
    special = {UNKNOWN, CONTROL, USER_DEFINED}
    # If the padding token is an ordinary word, that word must not be hidden.
    return {
        name: token_id
        for name, token_id in named.items()
        if name in ("bos_token", "eos_token") or types[token_id] in special
    }


def _token_id(fields: ConfigFields, key: str, num_tokens: int, default: int | None = None) -> int:
    token_id = fields.integer(key, default, at_least=0)
    if token_id >= num_tokens:
        raise fields.unsupported(key, token_id, f"within 0..{num_tokens - 1}")
    return token_id


def _numbers(header: GGUFHeader, key: str, count: int) -> Sequence[Any]:
    """Return an array with a number for each token; empty if there is none."""
    numbers = header.metadata.get(key, ())
    if not isinstance(numbers, array | tuple) or len(numbers) not in (0, count):
        found = f"{len(numbers)} numbers" if isinstance(numbers, array) else reprlib.repr(numbers)
        raise CheckpointCorrupt(
            f"{header.path}: {key} is {found}, must be one for each of the {count} tokens"
        )
    return numbers
