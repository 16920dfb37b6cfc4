import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from router.errors import ModelFolderError
from router.model_folder import read_model_folder
from router.request import SamplingDefaults
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
    folder: Path, tokenizer: HuggingFaceTokenizer, settings: dict[str, Any], **files: Any
) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
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


def added(content: str, **fields: Any) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": content} | flags | fields


def serialized(content: str, **fields: Any) -> dict[str, Any]:
    return {"__type": "AddedToken"} | added(content, **fields)


# name |-> what tokenizer_config.json has beside BYTE_LEVEL_CONFIG ("-" is absent), and other files
TOKEN_FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "names of the older map alone": (
        {"bos_token": "-", "eos_token": "-"},
        {"special_tokens_map": {"bos_token": "<|begin|>", "eos_token": added("<|end|>")}},
    ),
    "the older map counts more": ({}, {"special_tokens_map": {"bos_token": "<|end|>"}}),
    "null in the older map": ({}, {"special_tokens_map": {"bos_token": None}}),
    "the older map beside a decoder": (
        {"added_tokens_decoder": {"0": added("<|begin|>", special=True)}},
        {"special_tokens_map": {"bos_token": "<|end|>", "pad_token": "<x>"}},
    ),
    "a new token of the older map": (
        {},
        {"special_tokens_map": {"eos_token": added("<new>", lstrip=True)}},
    ),
    "an end token that is not special": ({"eos_token": "<tool>"}, {}),
    "an end token that is an object": ({"eos_token": serialized("<tool>", lstrip=True)}, {}),
    "an end token that the decoder has": (
        {
            "eos_token": "<tool>",
            "added_tokens_decoder": {"330": added("<tool>", special=False)},
        },
        {},
    ),
    "an end token of the vocabulary": ({"eos_token": "the"}, {}),
    "added_tokens.json": ({}, {"added_tokens": {"<y>": 332, "<x>": 331}}),
    "added_tokens.json with other ids": ({}, {"added_tokens": {"<y>": 400, "the": 5}}),
    "added_tokens.json beside a decoder": (
        {"added_tokens_decoder": {}},
        {"added_tokens": {"<x>": 331}},
    ),
    "added_tokens.json with names": (
        {"pad_token": "<y>", "additional_special_tokens": ["<x>"]},
        {"added_tokens": {"<z>": 340, "<x>": 338, "<y>": 339}},
    ),
    "additional tokens": ({"additional_special_tokens": ["<x>", "<y>"]}, {}),
    "additional tokens as objects": (
        {"additional_special_tokens": [serialized("<x>", lstrip=True, special=True)]},
        {},
    ),
    "additional tokens that are not special": (
        {"additional_special_tokens": [serialized("<x>"), "<tool>"]},
        {},
    ),
    "additional tokens of the older map": (
        {},
        {"special_tokens_map": {"additional_special_tokens": ["<x>", "<y>"]}},
    ),
    "additional tokens of both": (
        {"additional_special_tokens": ["<x>"]},
        {"special_tokens_map": {"additional_special_tokens": ["<y>"]}},
    ),
    "extra tokens": ({"extra_special_tokens": ["<x>"]}, {}),
    "extra and additional tokens": (
        {"extra_special_tokens": ["<x>"], "additional_special_tokens": ["<y>"]},
        {},
    ),
    "extra tokens of both": (
        {"extra_special_tokens": ["<x>"]},
        {"special_tokens_map": {"extra_special_tokens": [added("<y>")]}},
    ),
    "extra tokens with names": ({"extra_special_tokens": {"image_token": "<x>"}}, {}),
    "extra tokens with names beside additional ones": (
        {
            "extra_special_tokens": {"image_token": "<x>"},
            "additional_special_tokens": ["<y>"],
        },
        {},
    ),
    "a name of the model's own in both files": (
        {"image_token": serialized("<x>"), "video_token": "<y>"},
        {"special_tokens_map": {"image_token": added("<z>"), "video_token": "<new>"}},
    ),
    "one token with two names and flags": (
        {"pad_token": "<x>", "unk_token": serialized("<x>", lstrip=True)},
        {},
    ),
    "a name of the model's own": ({"image_token": "<x>", "pad_token": "<y>"}, {}),
    "special tokens written in texts are texts": ({"split_special_tokens": True}, {}),
    "a decoder with new tokens": (
        {
            "pad_token": "<z>",
            "added_tokens_decoder": {
                "400": added("<x>", special=False),
                "399": added("<y>", special=True),
                "330": added("<tool>", special=True, lstrip=True),
            },
        },
        {},
    ),
    "switches that tokenizer.json decides": (
        {"add_bos_token": False, "add_eos_token": True, "add_prefix_space": True},
        {},
    ),
    "clean-up of BPE": ({"clean_up_tokenization_spaces": True}, {}),
}
TOKEN_SAMPLES = (
    "the quick brown fox",
    "<|begin|>written<|end|> <tool>, <x> and <y><z> and <new>  tokens .",
)


@pytest.mark.parametrize("name", TOKEN_FILES)
def test_tokens_of_all_files_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    changes, files = TOKEN_FILES[name]
    config = {key: value for key, value in (BYTE_LEVEL_CONFIG | changes).items() if value != "-"}
    folder = write_folder(tmp_path, byte_level(), config, **files)
    theirs = AutoTokenizer.from_pretrained(folder)

    ours = read_model_folder(folder, max_prompt_chars=1000).tokenizer

    assert ours is not None
    assert ours.special_tokens == theirs.special_tokens_map
    for text in TOKEN_SAMPLES:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == theirs(text, add_special_tokens=add)["input_ids"], (text, add)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def llama2() -> HuggingFaceTokenizer:
    """Published tokenizer.json of Llama 2 in small: a mark before the text, none before words."""
    tokenizer = byte_fallback()
    state = json.loads(tokenizer.to_str())
    state["pre_tokenizer"] = None
    tokenizer = HuggingFaceTokenizer.from_str(json.dumps(state))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


def test_texts_are_split_as_tokenizer_json_says_also_where_a_class_says_otherwise(
    tmp_path: Path,
) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    folder = write_folder(tmp_path, llama2(), names | {"tokenizer_class": "LlamaTokenizer"})
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))

    ours = read_model_folder(folder, max_prompt_chars=1000).tokenizer

    assert ours is not None
    for text in (*SAMPLES, " the", "<s>[INST] the [/INST]"):
        assert ours.encode(text, add_special_tokens=True) == theirs(text)["input_ids"], text


def test_settings_that_cut_or_pad_are_ignored() -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)

    ids = Tokenizer(tokenizer.to_str()).encode("the quick fox", add_special_tokens=False)

    assert 3 < len(ids) < 50


def test_without_the_interpreter_lock_ids_are_the_same() -> None:
    tokenizer = Tokenizer(byte_level().to_str())
    text = "the quick brown fox 😀 " * 400

    for add in (True, False):
        ids = tokenizer.encode_unlocked(text, add_special_tokens=add)
        assert ids == tokenizer.encode(text, add_special_tokens=add)


def test_defaults_come_from_generation_config(tmp_path: Path) -> None:
    config = {"temperature": 0.6, "top_p": 0.9, "top_k": -1, "max_length": 4096}
    folder = write_folder(tmp_path, byte_level(), {}, generation_config=config)

    defaults = read_model_folder(folder, max_prompt_chars=10).defaults

    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.6, 0.9, 0)


def test_defaults_come_from_config_json_where_there_is_no_generation_config(
    tmp_path: Path,
) -> None:
    settings = {"temperature": 0.6, "top_k": 7, "repetition_penalty": 1.2, "hidden_size": 4}
    folder = write_folder(tmp_path, byte_level(), {}, config=settings)
    defaults = read_model_folder(folder, max_prompt_chars=10).defaults
    assert (defaults.temperature, defaults.top_k, defaults.repetition_penalty) == (0.6, 7, 1.2)

    write_folder(tmp_path, byte_level(), {}, generation_config={})
    assert read_model_folder(folder, max_prompt_chars=10).defaults == SamplingDefaults()


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
        ("tokenizer_config.json", '{"chat_template": [3]}'),
        ("tokenizer_config.json", '{"chat_template": ' + "[" * 100_000),
        ("special_tokens_map.json", "{" * 100_000),
        ("added_tokens.json", '["<x>"]'),
        ("chat_template.jinja", "\udcff"),
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
        (folder / name).write_text(content, errors="surrogateescape")

    with pytest.raises(ModelFolderError, match=name):
        read_model_folder(folder, max_prompt_chars=1000)


@pytest.mark.parametrize(
    ("config", "files", "key"),
    [
        ({"bos_token": False}, {}, "bos_token"),
        ({"eos_token": {"text": "<x>"}}, {}, "eos_token"),
        ({"eos_token": {"content": "<x>", "lstrip": "yes"}}, {}, "eos_token"),
        ({"additional_special_tokens": "<x>"}, {}, "additional_special_tokens"),
        ({"additional_special_tokens": [3]}, {}, "additional_special_tokens"),
        ({"added_tokens_decoder": {"one": added("<x>")}}, {}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"9" * 5000: added("<x>")}}, {}, "added_tokens_decoder"),
        ({"bos_token": "\ud83d"}, {}, "tokenizer_config.json is not JSON"),
        ({}, {"added_tokens": {"\ud83d": 331}}, "added_tokens.json"),
        ({"chat_template": [{"name": "default", "template": 5}]}, {}, "chat_template"),
        ({"added_tokens_decoder": {"331": 3}}, {}, "added_tokens_decoder.331"),
        ({"added_tokens_decoder": ["<x>"]}, {}, "added_tokens_decoder"),
        ({}, {"added_tokens": {"<x>": "331"}}, "added_tokens.json"),
        ({}, {"added_tokens": {"<x>": 331, "<y>": 331}}, "added_tokens.json"),
        ({}, {"special_tokens_map": {"pad_token": 3}}, "pad_token"),
        ({"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}, {}, "auto_map"),
        ({"fast_tokenizer_files": ["tokenizer.4.0.json"]}, {}, "fast_tokenizer_files"),
        ({"fix_mistral_regex": True}, {}, "fix_mistral_regex"),
    ],
)
def test_a_setting_that_cannot_be_followed_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any], key: str
) -> None:
    folder = write_folder(tmp_path, byte_level(), config, **files)

    with pytest.raises(ModelFolderError, match=re.escape(key)):
        read_model_folder(folder, max_prompt_chars=1000)


def test_a_tokenizer_that_lets_its_library_panic_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), {})
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["continuing_subword_prefix"] = "longer than the first token of a merge"
    path.write_text(json.dumps(content))

    with pytest.raises(ModelFolderError, match=r"tokenizer\.json cannot be read: range end index"):
        read_model_folder(folder, max_prompt_chars=1000)


def test_names_of_other_templates_may_be_anything(tmp_path: Path) -> None:
    templates = [{"name": {}, "template": "x"}, {"name": "default", "template": "hello"}]
    folder = write_folder(tmp_path, byte_level(), {"chat_template": templates})

    assert read_model_folder(folder, max_prompt_chars=1000).chat_template is not None


def test_a_default_is_refused_with_only_the_beginning_of_a_long_value(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), {}, generation_config={"top_p": "x" * 10_000})

    with pytest.raises(ModelFolderError, match=r"top_p in .{0,1000}$"):
        read_model_folder(folder, max_prompt_chars=1000)


def test_clean_up_of_texts_is_refused_but_for_bpe(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(models.Unigram([("<unk>", 0.0), ("the", -1.0)], unk_id=0))
    folder = write_folder(tmp_path, tokenizer, {"clean_up_tokenization_spaces": True})

    with pytest.raises(ModelFolderError, match=r"clean_up_tokenization_spaces in .* is True"):
        read_model_folder(folder, max_prompt_chars=1000)
