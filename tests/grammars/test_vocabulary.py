"""The bytes of tokens are those that they add to a text, for each kind of tokenizer."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from grammars.errors import NoVocabulary
from grammars.vocabulary import read_vocabulary
from llm_engine.model_files import text_folder
from tests.router.tokenizers_for_tests import TEXTS, byte_fallback, byte_level
from tests.support.gguf_files import tokenizer_keys, write_file
from tests.support.trained_model import trained_path

PADDING = 7


def vocabulary_of(tokenizer: Tokenizer, folder: Path, vocab_size: int | None = None) -> list[bytes]:
    tokenizer.save(str(folder / "tokenizer.json"))
    return read_vocabulary(folder, vocab_size or tokenizer.get_vocab_size() + PADDING).texts


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_bytes_of_a_text_are_those_of_its_tokens(make, tmp_path: Path) -> None:
    tokenizer = make()
    vocabulary = vocabulary_of(tokenizer, tmp_path)

    for text in [*TEXTS, '{"a": [1, "\\n"]}', "\x00\x7f\n\t é"]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        joined = b"".join(vocabulary[each] for each in ids)
        assert joined.decode().removeprefix(" ") == text  # Metaspace puts one before a text
        assert all(vocabulary[each] for each in ids)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_each_byte_has_a_token_and_added_ones_and_padding_have_none(make, tmp_path: Path) -> None:
    tokenizer = make()
    vocabulary = vocabulary_of(tokenizer, tmp_path)

    assert {bytes([byte]) for byte in range(256)} <= set(vocabulary)
    added = tokenizer.get_added_tokens_decoder()
    assert added
    assert {vocabulary[each] for each in added} == {b""}
    assert vocabulary[-PADDING:] == [b""] * PADDING


def test_tokens_beyond_those_of_the_model_are_left_out(tmp_path: Path) -> None:
    assert len(vocabulary_of(byte_level(), tmp_path, 100)) == 100


@pytest.mark.xdist_group("trained-model")
def test_a_gguf_file_has_the_bytes_of_its_own_tokenizer() -> None:
    folder = text_folder(trained_path())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary, added = read_vocabulary(folder, 49_152)

    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(vocabulary[each] for each in ids).decode() == text
    end = tokenizer.token_to_id("<|im_end|>")
    assert vocabulary[end] == b""
    assert added["<|im_end|>"] == end


def test_a_gguf_file_of_sentencepiece_has_bytes_of_byte_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE_DIR", str(tmp_path / "cache"))
    keys = tokenizer_keys(300)
    write_file(tmp_path / "m.gguf", "llama", keys, {})
    from llm_engine.gguf_file import read_gguf_header
    from llm_engine.gguf_tokenizer import tokenizer_files

    content = tokenizer_files(read_gguf_header(tmp_path / "m.gguf"))["tokenizer.json"]
    (tmp_path / "tokenizer.json").write_text(content)

    vocabulary, added = read_vocabulary(tmp_path, 310)

    tokens = keys["tokenizer.ggml.tokens"]
    for token_id, token in enumerate(tokens):
        if token.startswith("<0x"):
            assert vocabulary[token_id] == bytes.fromhex(token[3:5])
    assert vocabulary[300:] == [b""] * 10
    assert added["<s>"] == tokens.index("<s>")


def test_what_is_no_tokenizer_or_of_an_unknown_kind_is_told(tmp_path: Path) -> None:
    with pytest.raises(NoVocabulary, match="cannot be read"):
        read_vocabulary(tmp_path, 10)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "##b": 1}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer.json").read_text())["decoder"]["type"] == "WordPiece"
    with pytest.raises(NoVocabulary, match="WordPiece"):
        read_vocabulary(tmp_path, 10)
