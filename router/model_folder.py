"""Reads what the router needs from a model folder: tokenizer, special tokens, template, defaults.

No weights: what the model can do comes from the workers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protos.sampling_limits import DEFAULT_RANGES, is_default
from router.added_tokens import TokenFiles, WrongToken
from router.chat_template import ChatTemplate
from router.errors import ChatTemplateError, ModelFolderError
from router.request import SamplingDefaults
from router.tokenizer import Tokenizer

_REFUSED_SETTINGS = (
    "auto_map",
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
    "fast_tokenizer_files",
    "fix_mistral_regex",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """The text side of a model. Without a folder there is no tokenizer, only token ids."""

    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)


def read_model_folder(folder: Path, *, max_prompt_chars: int) -> ModelFolder:
    """Read a Hugging Face model folder.

    Raises:
        ModelFolderError: A file is missing or broken; the message names it.
    """
    files = TokenFiles(
        config=_read_json(folder / "tokenizer_config.json"),
        special_tokens_map=_read_json(folder / "special_tokens_map.json"),
        added_tokens=_read_json(folder / "added_tokens.json"),
    )
    tokenizer = _read_tokenizer(folder / "tokenizer.json", files)
    _check_settings(folder / "tokenizer_config.json", files.config, tokenizer)
    return ModelFolder(
        tokenizer=tokenizer,
        chat_template=_read_chat_template(
            folder, files.config, tokenizer.special_tokens, max_prompt_chars
        ),
        defaults=_read_defaults(folder),
    )


def _read_text(path: Path) -> str | None:
    """Return what a file holds; None if there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFolderError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is no file."""
    text = _read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # the libraries take no halves of characters
    except RecursionError:
        raise ModelFolderError(f"{path} is not JSON: nested too deeply") from None
    except ValueError as error:
        raise ModelFolderError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} holds a {type(value).__name__}, must be an object")
    return value


def _check_settings(path: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Refuse settings that change ids or text in transformers."""
    # transformers ignores this one for BPE.
    cleans_up = () if tokenizer.is_bpe else ("clean_up_tokenization_spaces",)
    for name in (*_REFUSED_SETTINGS, *cleans_up):
        if config.get(name):
            raise ModelFolderError(
                f"{name} in {path} is {config[name]!r:.200}, must be absent: tokenizer.json alone "
                "defines how text is tokenized"
            )


def _read_tokenizer(path: Path, files: TokenFiles) -> Tokenizer:
    text = _read_text(path)
    if text is None:
        raise ModelFolderError(f"{path} is missing; the model folder must hold a tokenizer.json")
    try:
        return Tokenizer(text, files)
    except WrongToken as error:
        raise ModelFolderError(f"{path.parent}: {error}") from error
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # plain Exception; a panic of the tokenizers library is none
        raise ModelFolderError(f"{path} cannot be read: {error!s:.300}") from error


def _read_chat_template(
    folder: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str], max_chars: int
) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    source: object = _read_text(path)
    if source is None:
        path = folder / "tokenizer_config.json"
        source = config.get("chat_template")
    if isinstance(source, list) and all(isinstance(each, dict) for each in source):
        named = [each.get("template") for each in source if each.get("name") == "default"]
        source = named[-1] if named else None
    if isinstance(source, dict):
        source = source.get("default")
    if not source:
        return None
    if not isinstance(source, str):
        raise ModelFolderError(f"chat_template in {path} is a {type(source).__name__}")
    try:
        return ChatTemplate(source, special_tokens=special_tokens, max_chars=max_chars)
    except ChatTemplateError as error:
        raise ModelFolderError(f"chat template in {path}: {error}") from error


def _read_defaults(folder: Path) -> SamplingDefaults:
    path = folder / "generation_config.json"
    if not path.exists():  # as in transformers
        path = folder / "config.json"
    config = _read_json(path)
    # llm_engine/generation_config.py lists all settings of that file.
    asked = {name: config[name] for name in DEFAULT_RANGES if config.get(name) is not None}
    if config.get("do_sample") is False:
        asked["temperature"] = 0.0  # the model's authors mean greedy
    for name, value in asked.items():
        if not is_default(name, value):
            allowed = DEFAULT_RANGES[name].allowed
            raise ModelFolderError(f"{name} in {path} is {value!r:.200}; allowed: {allowed}")
    return SamplingDefaults().replaced(asked)
