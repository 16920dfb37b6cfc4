"""Tokenizers of GGUF files give the ids that the models were trained with.

Where transformers reads a GGUF file as the model was published, it is the measure. Where it cuts
texts in another way, it gets the published way first, and with that it is.
"""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from llm_engine.errors import CheckpointCorrupt
from llm_engine.gguf_file import read_gguf_header
from llm_engine.gguf_tokenizer import tokenizer_files
from tests.support.adversarial_texts import adversarial_texts
from tests.support.gguf_files import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, write_file
from tests.support.gguf_reference import transformers_tokenizer

SPACE = "▁"
MARKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = adversarial_texts(2_000, seed=1)


def write_byte_level(path: Path, pre: str, **changes: Any) -> tuple[dict[str, int], list[str]]:
    """Write a file with a vocabulary of its own; returns ids and merges."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, show_progress=False, special_tokens=MARKERS
    )
    learned.train_from_iterator(TEXTS, trainer)
    state = json.loads(learned.to_str())["model"]
    ids = state["vocab"]
    # Some tokens are not the result of any merge.
    merges = [" ".join(pair) for index, pair in enumerate(state["merges"]) if index % 7 != 6]
    tokens = sorted(ids, key=lambda token: ids[token])
    types = [CONTROL if token in MARKERS else NORMAL for token in tokens]
    types[tokens.index("the")] = USER_DEFINED
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": ids["<|im_start|>"],
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
    }
    write_file(path, "llama", keys | changes, {})
    return ids, merges


def our_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files(read_gguf_header(path))["tokenizer.json"])


def ids_of(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]


def assert_equal_ids(ours: Tokenizer, theirs: Tokenizer, texts: Sequence[str] = TEXTS) -> None:
    found, expected = ids_of(ours, texts), ids_of(theirs, texts)
    assert [
        (text, one, other)
        for text, one, other in zip(texts, found, expected, strict=True)
        if one != other
    ] == []


def keep_known_words(theirs: Tokenizer) -> None:
    theirs.model.ignore_merges = True


def cut_digits(theirs: Tokenizer) -> None:
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([digits, theirs.pre_tokenizer])


@pytest.mark.parametrize(
    ("pre", "publish"),
    [
        ("gpt-2", lambda theirs: None),
        ("llama-bpe", keep_known_words),
        ("tekken", keep_known_words),
        ("smollm", cut_digits),
    ],
)
def test_byte_level_ids_equal_those_of_transformers(
    tmp_path: Path, pre: str, publish: Callable[[Tokenizer], None]
) -> None:
    path = tmp_path / "model.gguf"
    write_byte_level(path, pre)
    theirs = transformers_tokenizer(path)
    publish(theirs)

    assert_equal_ids(our_tokenizer(path), theirs)


def test_qwens_ids_equal_those_of_its_tokenizer_in_transformers(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    ids, merges = write_byte_level(path, "qwen2")
    theirs = Qwen2Tokenizer(vocab=ids, merges=[tuple(merge.split(" ")) for merge in merges])
    theirs.add_special_tokens({"additional_special_tokens": MARKERS})
    theirs.add_tokens([AddedToken("the", normalized=False)])

    assert_equal_ids(our_tokenizer(path), theirs.backend_tokenizer)


def test_known_words_are_kept_and_digits_cut_where_the_model_says_so(tmp_path: Path) -> None:
    found = {}
    for pre in ("gpt-2", "llama-bpe", "smollm", "qwen2"):
        write_byte_level(tmp_path / pre, pre)
        found[pre] = ids_of(our_tokenizer(tmp_path / pre), TEXTS)

    for pre, ids in found.items():
        assert all(ids != other for name, other in found.items() if name != pre)


@pytest.mark.parametrize(
    ("pre", "changes", "expected"),
    [
        ("gpt-2", {}, [None, None]),
        ("llama-bpe", {}, ["<|im_start|>", None]),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, [None, None]),
        ("smollm", {"tokenizer.ggml.add_bos_token": True}, ["<|im_start|>", None]),
        ("gpt-2", {"tokenizer.ggml.add_eos_token": True}, [None, "<|im_end|>"]),
    ],
)
def test_the_first_and_last_token_are_those_that_the_file_asks_for(
    tmp_path: Path, pre: str, changes: dict[str, Any], expected: list[str | None]
) -> None:
    path = tmp_path / "model.gguf"
    write_byte_level(path, pre, **changes)
    tokenizer = our_tokenizer(path)

    tokens = tokenizer.encode("x").tokens
    first, last = expected

    assert tokens == [each for each in (first, "x", last) if each]


def test_special_tokens_are_one_token_and_have_no_text(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    ids, _ = write_byte_level(path, "gpt-2")
    tokenizer = our_tokenizer(path)

    found = tokenizer.encode("the<|im_end|>the").ids

    assert found == [ids["the"], ids["<|im_end|>"], ids["the"]]
    assert tokenizer.decode(found) == "thethe"


def test_a_token_with_characters_outside_the_byte_alphabet_is_one(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    ids, _ = write_byte_level(tmp_path / "first", "gpt-2")
    marker = "<\uff5cUser\uff5c>"
    tokens = [*sorted(ids, key=lambda token: ids[token]), marker]
    types = [NORMAL] * len(ids) + [CONTROL]
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    write_byte_level(path, "gpt-2", **keys)

    assert our_tokenizer(path).encode(marker).ids == [len(ids)]


def test_all_tokens_that_end_an_answer_are_end_tokens(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    ids, _ = write_byte_level(path, "gpt-2")
    config = json.loads(tokenizer_files(read_gguf_header(path))["generation_config.json"])
    with_eot = {"tokenizer.ggml.eot_token_id": 300, "tokenizer.ggml.eos_token_id": None}
    write_byte_level(path, "gpt-2", **with_eot)
    other = json.loads(tokenizer_files(read_gguf_header(path))["generation_config.json"])

    ends = sorted([ids["<|im_end|>"], ids["<|endoftext|>"]])
    assert config["eos_token_id"] == ends
    assert config["bos_token_id"] == ids["<|im_start|>"]
    assert other["eos_token_id"] == [*ends, 300]


def test_recommended_sampling_becomes_the_default(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    keys = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    write_byte_level(path, "gpt-2", **keys)
    config = json.loads(tokenizer_files(read_gguf_header(path))["generation_config.json"])

    assert (config["temperature"], config["top_k"]) == (0.5, 20)


def write_sentencepiece(path: Path, **changes: Any) -> tuple[list[str], list[float], list[int]]:
    """Write a file with a vocabulary that has bytes, scores and no merges."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=700, limit_alphabet=90, show_progress=False)
    learned.train_from_iterator([text for text in TEXTS if not has_mark(text)], trainer)
    words = learned.get_vocab()
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    scores = [0.0] * len(tokens)
    for index, word in enumerate(sorted(words, key=lambda word: words[word])):
        tokens.append(word)
        types.append(NORMAL)
        # As in SentencePiece, the later a token was learned, the lower; single characters last.
        scores.append(-1e6 - index if len(word) == 1 else -float(index // 2))
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
    }
    write_file(path, "llama", keys | changes, {})
    return tokens, scores, types


def has_mark(text: str) -> bool:
    return any(each in text for each in ("<unk>", "<s>", "</s>", "<0x"))


class SentencePiece:
    """The algorithm that the scores are meant for: always the pair with the best result, from left.

    Source: SentencePiece's BPE mode, as in llama.cpp's llm_tokenizer_spm.
    """

    def __init__(self, tokens: list[str], scores: list[float], types: list[int]) -> None:
        self._ids = {token: token_id for token_id, token in enumerate(tokens)}
        self._scores = scores
        self._marks = [token for token, each in zip(tokens, types, strict=True) if each in (2, 3)]

    def encode(self, text: str, *, adds_space: bool = True) -> list[int]:
        ids: list[int] = []
        while text:
            at, mark = min((text.find(mark) % (len(text) + 1), mark) for mark in self._marks)
            if at:
                words = (SPACE if adds_space else "") + text[:at].replace(" ", SPACE)
                ids += self._merge(list(words))
            if at < len(text):
                ids.append(self._ids[mark])
            text = text[at + len(mark) :]
        return ids

    def _merge(self, pieces: list[str]) -> list[int]:
        while True:
            known = [
                (-self._scores[self._ids[left + right]], index)
                for index, (left, right) in enumerate(pairwise(pieces))
                if left + right in self._ids
            ]
            if not known:
                break
            _, index = min(known)
            pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]
        ids: list[int] = []
        for piece in pieces:
            spelled = [f"<0x{byte:02X}>" for byte in piece.encode()]
            ids += [self._ids[each] for each in ([piece] if piece in self._ids else spelled)]
        return ids


@pytest.mark.parametrize("adds_space", [True, False])
def test_sentencepiece_ids_equal_those_of_its_algorithm(tmp_path: Path, adds_space: bool) -> None:
    path = tmp_path / "model.gguf"
    changes = {} if adds_space else {"tokenizer.ggml.add_space_prefix": False}
    algorithm = SentencePiece(*write_sentencepiece(path, **changes))
    texts = TEXTS[:500]

    found = ids_of(our_tokenizer(path), texts)

    assert [
        (text, ids)
        for text, ids in zip(texts, found, strict=True)
        if ids != algorithm.encode(text, adds_space=adds_space)
    ] == []


def test_sentencepiece_ids_equal_those_of_transformers(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_sentencepiece(path)
    ours, theirs = our_tokenizer(path), transformers_tokenizer(path)
    # transformers puts the space before the first word only, and not before another space.
    theirs.normalizer, theirs.pre_tokenizer = ours.normalizer, None

    assert_equal_ids(ours, theirs)


def test_sentencepiece_decodes_what_it_encodes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_sentencepiece(path)
    tokenizer = our_tokenizer(path)
    texts = [text for text in TEXTS if not has_mark(text) and SPACE not in text]

    encoded = [each.ids for each in tokenizer.encode_batch(texts)]

    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert {ids[0] for ids in encoded} == {1}


def test_sentencepiece_needs_no_types(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_sentencepiece(path)
    with_types = our_tokenizer(path)
    write_sentencepiece(path, **{"tokenizer.ggml.token_type": None})

    assert ids_of(our_tokenizer(path), ["a <unk> b"]) != ids_of(with_types, ["a <unk> b"])
    assert ids_of(our_tokenizer(path), ["a b</s>"]) == ids_of(with_types, ["a b</s>"])


def test_a_piece_that_would_take_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tokens, scores, types = write_sentencepiece(path)
    keys = {
        "tokenizer.ggml.tokens": [*tokens, "x" * 129],
        "tokenizer.ggml.scores": [*scores, 0.0],
        "tokenizer.ggml.token_type": [*types, NORMAL],
    }
    write_sentencepiece(path, **keys)

    with pytest.raises(CheckpointCorrupt, match=rf"tokens\[{len(tokens)}\] is 129 characters"):
        our_tokenizer(path)


def test_transformers_reads_the_files_alike(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    template = "{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}"
    write_byte_level(path, "llama-bpe", **{"tokenizer.chat_template": template})
    for name, content in tokenizer_files(read_gguf_header(path)).items():
        (tmp_path / name).write_text(content)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)

    ours = our_tokenizer(path)
    assert theirs(TEXTS[1]).input_ids == ours.encode(TEXTS[1]).ids
    chat = [{"role": "user", "content": "hi"}]
    assert theirs.apply_chat_template(chat, tokenize=False) == "hi<|im_end|>"
