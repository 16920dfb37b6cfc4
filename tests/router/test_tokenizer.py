import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer
from transformers import AutoTokenizer

from router.errors import ModelFolderError
from router.model_folder import read_model_folder
from router.tokenizer import Tokenizer
from tests.router.tokenizers_for_tests import byte_fallback, byte_level

SAMPLES = (
    "the quick brown fox",
    "  two  spaces\n\nand lines ",
    "日本語 😀 Grüße",
    "<|begin|>written<|end|> special <tool> tokens",
    "<s>the</s>",
    "",
)


def write_folder(
    folder: Path, tokenizer: HuggingFaceTokenizer, config: dict[str, Any], **files: Any
) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


BYTE_LEVEL_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|begin|>",
    "eos_token": "<|end|>",
}


@pytest.mark.parametrize(
    ("tokenizer", "config"),
    [
        (byte_level(), BYTE_LEVEL_CONFIG),
        (byte_level(), BYTE_LEVEL_CONFIG | {"add_bos_token": False}),
        (byte_level(), BYTE_LEVEL_CONFIG | {"add_bos_token": True, "add_eos_token": True}),
        (byte_level(), BYTE_LEVEL_CONFIG | {"pad_token": "<|pad|>"}),
        (
            byte_level(),
            BYTE_LEVEL_CONFIG
            | {
                "eos_token": {"__type": "AddedToken", "content": "<|stop|>", "lstrip": False,
                              "normalized": False, "rstrip": False, "single_word": False},
                "added_tokens_decoder": {
                    "331": {"content": "<|stop|>", "lstrip": False, "normalized": False,
                            "rstrip": False, "single_word": False, "special": True},
                },
            },
        ),
        (
            byte_fallback(),
            {
                "tokenizer_class": "LlamaTokenizer",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "add_bos_token": True,
                "add_eos_token": False,
            },
        ),
        (
            byte_level(),
            {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|end|>", "pad_token": "<|end|>"},
        ),
    ],
)  # fmt: skip
def test_ids_and_text_equal_those_of_transformers(
    tmp_path: Path, tokenizer: HuggingFaceTokenizer, config: dict[str, Any]
) -> None:
    folder = write_folder(tmp_path, tokenizer, config)
    theirs = AutoTokenizer.from_pretrained(folder)

    ours = read_model_folder(folder, max_prompt_chars=1000).tokenizer

    assert ours is not None
    for text in SAMPLES:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == theirs(text, add_special_tokens=add)["input_ids"], (text, add)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def test_settings_that_cut_or_pad_are_ignored() -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)

    ids = Tokenizer(tokenizer.to_str()).encode("the quick fox", add_special_tokens=False)

    assert 3 < len(ids) < 50


def test_a_long_text_is_tokenized_beside_the_event_loop_with_equal_ids() -> None:
    tokenizer = Tokenizer(byte_level().to_str())
    text = "the quick brown fox 😀 " * 4000

    ids = asyncio.run(tokenizer.encode_large(text, add_special_tokens=True))

    assert ids == tokenizer.encode(text, add_special_tokens=True)


def test_defaults_come_from_generation_config(tmp_path: Path) -> None:
    config = {"temperature": 0.6, "top_p": 0.9, "top_k": -1, "max_length": 4096}
    folder = write_folder(tmp_path, byte_level(), {}, generation_config=config)

    defaults = read_model_folder(folder, max_prompt_chars=10).defaults

    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.6, 0.9, 0)


def test_a_model_that_says_do_not_sample_is_greedy(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), {}, generation_config={"do_sample": False})

    assert read_model_folder(folder, max_prompt_chars=10).defaults.temperature == 0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "nonsense"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
        ("chat_template.jinja", "{{ unclosed"),
        ("generation_config.json", '{"temperature": "hot"}'),
        ("generation_config.json", '{"top_p": NaN}'),
        ("generation_config.json", '{"temperature": 0.0005}'),
        ("generation_config.json", '{"top_p": 0}'),
        ("generation_config.json", '{"top_k": -2}'),
        ("generation_config.json", '{"top_k": 1.5}'),
        ("generation_config.json", '{"min_p": true}'),
        ("generation_config.json", '{"repetition_penalty": 0.0}'),
    ],
)
def test_a_broken_folder_is_refused_with_the_name_of_the_file(
    tmp_path: Path, name: str, content: str | None
) -> None:
    folder = write_folder(tmp_path, byte_level(), {})
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)

    with pytest.raises(ModelFolderError, match=name):
        read_model_folder(folder, max_prompt_chars=1000)
