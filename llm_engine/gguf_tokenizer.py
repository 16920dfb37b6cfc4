"""Converts the tokenizer of a GGUF file to Hugging Face's files, which the router reads.

A GGUF file has a vocabulary, merges or scores, and the name of the rule that splits a text into
words before the merges (`tokenizer.ggml.pre`); programs that read the file implement the rule. The
rules here are those of the models' published tokenizers. docs/decisions/0013 lists where llama.cpp
or transformers are less exact.
"""

import json
import reprlib
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from llm_engine.config_fields import ConfigFields
from llm_engine.errors import CheckpointCorrupt
from llm_engine.gguf_file import GGUFHeader
from llm_engine.gguf_vocabulary import (
    CONTROL,
    NORMAL,
    UNDEFINED,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    generation_config,
    read_texts,
    read_vocabulary,
)

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space
# Defaults of fields that files of SentencePiece models may omit
SENTENCEPIECE_NAMES = {"bos_token": 1, "eos_token": 2, "unk_token": 0}
MAX_PIECE_CHARS = 128  # SentencePiece's own limit is 16, unless a model is trained with another


@dataclass(frozen=True, kw_only=True, slots=True)
class _WordRule:
    """How a byte-level tokenizer splits a text into words, within which it merges."""

    split: str = ""  # regular expression of a word; empty: GPT-2's
    single_digits: bool = False  # each digit is a word, before anything else is cut
    composes: bool = False  # to Unicode's NFC, first
    keeps_known_words: bool = False  # a word that is a token is that token, whatever the merges
    adds_bos: bool = False  # unless the file says otherwise


_LLAMA3 = _WordRule(
    split=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    keeps_known_words=True,
    adds_bos=True,
)
_QWEN2 = _WordRule(
    split=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    composes=True,
)
_TEKKEN = _WordRule(
    split=r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    keeps_known_words=True,
    adds_bos=True,
)
_STARCODER = _WordRule(single_digits=True)
# tokenizer.ggml.pre |-> rule
_WORD_RULES = {
    "gpt-2": _WordRule(),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "refact": _STARCODER,
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "tekken": _TEKKEN,
}


def tokenizer_files(header: GGUFHeader) -> dict[str, str]:
    """Return name |-> content of all text-side files.

    Raises:
        UnsupportedModel: If the kind of tokenizer is not implemented.
        CheckpointCorrupt: If vocabulary and merges contradict each other.
    """
    fields = ConfigFields(header.metadata, str(header.path))
    kind = fields.string("tokenizer.ggml.model")
    if kind == "gpt2":
        vocabulary = read_vocabulary(header, {})
        tokenizer, adds_bos = _byte_level(fields, vocabulary)
    elif kind == "llama":
        vocabulary = read_vocabulary(header, SENTENCEPIECE_NAMES)
        tokenizer, adds_bos = _sentencepiece(fields, vocabulary), True
    else:
        raise fields.unsupported("tokenizer.ggml.model", kind, "'gpt2' or 'llama'")
    _add_special_tokens(tokenizer, vocabulary)
    _add_post_processor(tokenizer, fields, vocabulary, adds_bos)
    names = {name: vocabulary.tokens[token_id] for name, token_id in vocabulary.named.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **names,
    }
    if fields.has("tokenizer.chat_template"):
        config["chat_template"] = fields.string("tokenizer.chat_template")
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config),
        "generation_config.json": json.dumps(generation_config(header, vocabulary)),
    }


def _byte_level(fields: ConfigFields, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """Return the tokenizer, and whether it prepends the beginning-of-text token."""
    name = fields.string("tokenizer.ggml.pre")
    if name not in _WORD_RULES:
        allowed = f"one of {', '.join(sorted(_WORD_RULES))}"
        raise fields.unsupported("tokenizer.ggml.pre", name, allowed)
    if fields.boolean("tokenizer.ggml.add_space_prefix", False):
        raise fields.unsupported("tokenizer.ggml.add_space_prefix", True, "false for 'gpt2'")
    rule = _WORD_RULES[name]
    merges = _merges_of_texts(fields)
    tokenizer = _bpe(fields, vocabulary, merges, ignore_merges=rule.keeps_known_words)
    steps: list[Any] = []
    if rule.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.split:
        steps.append(pre_tokenizers.Split(Regex(rule.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rule.split))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if rule.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.adds_bos


def _sentencepiece(fields: ConfigFields, vocabulary: Vocabulary) -> Tokenizer:
    if not vocabulary.scores:
        problem = "has no tokenizer.ggml.scores, which tokenizer.ggml.model 'llama' needs"
        raise CheckpointCorrupt(f"{fields.source}: {problem}")
    if fields.boolean("tokenizer.ggml.remove_extra_whitespaces", False):
        raise fields.unsupported("tokenizer.ggml.remove_extra_whitespaces", True, "false")
    if fields.has("tokenizer.ggml.precompiled_charsmap"):
        raise fields.unsupported("tokenizer.ggml.precompiled_charsmap", "present", "absent")
    unknown = vocabulary.named.get("unk_token")
    tokenizer = _bpe(
        fields,
        vocabulary,
        _merges_of_scores(fields, vocabulary),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    adds_space = fields.boolean("tokenizer.ggml.add_space_prefix", True)
    escape = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), escape]) if adds_space else escape
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_of_texts(fields: ConfigFields) -> list[tuple[str, str]]:
    merges = []
    for index, merge in enumerate(read_texts(fields, "tokenizer.ggml.merges")):
        pair = merge.split(" ")
        if len(pair) != 2:
            raise CheckpointCorrupt(
                f"{fields.source}: tokenizer.ggml.merges[{index}] is {reprlib.repr(merge)}, "
                "must be two tokens"
            )
        merges.append((pair[0], pair[1]))
    return merges


def _merges_of_scores(fields: ConfigFields, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return the merges that SentencePiece's scores imply, the pair with the best result first.

    Pairs with the same result keep the order of Hugging Face's conversion of SentencePiece models.
    """
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    found = []
    for token_id in vocabulary.ids_of(UNDEFINED, NORMAL, USER_DEFINED):
        token = vocabulary.tokens[token_id]
        if len(token) > MAX_PIECE_CHARS:
            raise CheckpointCorrupt(
                f"{fields.source}: tokenizer.ggml.tokens[{token_id}] is {len(token)} characters "
                f"long, must be at most {MAX_PIECE_CHARS} for 'llama'"
            )
        pairs = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in ids and token[cut:] in ids
        ]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(vocabulary.scores[token_id], *pair) for pair in pairs]
    found.sort(key=lambda each: (each[0], len(each[1]), len(each[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _bpe(
    fields: ConfigFields, vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: Any
) -> Tokenizer:
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    try:
        return Tokenizer(models.BPE(vocab=ids, merges=merges, **options))
    except Exception as error:  # the tokenizers library raises plain Exception
        problem = f"tokenizer.ggml.merges: {str(error)[:200]}"
        raise CheckpointCorrupt(f"{fields.source}: {problem}") from error


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    special_ids = {*vocabulary.ids_of(CONTROL, UNKNOWN), *vocabulary.named.values()}
    tokenizer.add_special_tokens(
        [
            AddedToken(vocabulary.tokens[token_id], normalized=False, special=True)
            for token_id in sorted(special_ids)
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(vocabulary.tokens[token_id], normalized=False, special=False)
            for token_id in vocabulary.ids_of(USER_DEFINED)
            if token_id not in special_ids
        ]
    )


def _add_post_processor(
    tokenizer: Tokenizer, fields: ConfigFields, vocabulary: Vocabulary, adds_bos: bool
) -> None:
    named = vocabulary.named
    if fields.boolean("tokenizer.ggml.add_sep_token", False):
        raise fields.unsupported("tokenizer.ggml.add_sep_token", True, "false")
    adds = {
        "bos_token": fields.boolean("tokenizer.ggml.add_bos_token", adds_bos),
        "eos_token": fields.boolean("tokenizer.ggml.add_eos_token", False),
    }
    for name, is_added in adds.items():
        if is_added and name not in named:
            raise fields.unsupported(f"tokenizer.ggml.add_{name}", True, f"false without {name}_id")
    if not any(adds.values()):
        return
    added = {
        name: tokenizer.id_to_token(named[name]) for name, is_added in adds.items() if is_added
    }
    template = [added.get("bos_token"), "$A", added.get("eos_token")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[piece for piece in template if piece],
        special_tokens=[(text, named[name]) for name, text in added.items()],
    )
