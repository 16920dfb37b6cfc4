"""Reads what the router needs from a model folder: tokenizer, special tokens, template, defaults.

No weights and no config.json: what the model can do comes from the workers.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.chat_template import ChatTemplate
from router.errors import ChatTemplateError, ModelFolderError
from router.request import SamplingDefaults
from router.tokenizer import Tokenizer
from router.validation import RANGES, Range

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# What generation_config.json may hold of it
_DEFAULTS = {
    **{name: RANGES[name] for name in ("temperature", "top_p", "min_p", "repetition_penalty")},
    "top_k": Range(
        lambda value: isinstance(value, int) and -1 <= value < 2**32, "an integer, -1 or 0 for off"
    ),
}


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
    tokenizer_file = folder / "tokenizer.json"
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(config)
    try:
        tokenizer = Tokenizer(
            tokenizer_file.read_text(encoding="utf-8"),
            special_tokens=special_tokens,
            added_tokens=config.get("added_tokens_decoder") or {},
        )
    except FileNotFoundError:
        raise ModelFolderError(
            f"{tokenizer_file} is missing; the model folder must hold a tokenizer.json"
        ) from None
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelFolderError(f"{tokenizer_file} cannot be read: {error}") from error
    return ModelFolder(
        tokenizer=tokenizer,
        chat_template=_read_chat_template(folder, config, special_tokens, max_prompt_chars),
        defaults=_read_defaults(folder / "generation_config.json"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelFolderError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} holds a {type(value).__name__}, must be an object")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):  # a serialized AddedToken
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _read_chat_template(
    folder: Path, config: dict[str, Any], special_tokens: dict[str, str], max_chars: int
) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        source: object = path.read_text(encoding="utf-8")
    else:
        path = folder / "tokenizer_config.json"
        source = config.get("chat_template")
    if isinstance(source, list):  # [{"name": ..., "template": ...}, ...]
        named = {each.get("name"): each.get("template") for each in source}
        source = named.get("default")
    if not source:
        return None
    if not isinstance(source, str):
        raise ModelFolderError(f"chat_template in {path} is a {type(source).__name__}")
    try:
        return ChatTemplate(source, special_tokens=special_tokens, max_chars=max_chars)
    except ChatTemplateError as error:
        raise ModelFolderError(f"chat template in {path}: {error}") from error


def _read_defaults(path: Path) -> SamplingDefaults:
    config = _read_json(path)
    asked = {name: config[name] for name in _DEFAULTS if config.get(name) is not None}
    if config.get("do_sample") is False:
        asked["temperature"] = 0.0  # the model's authors mean greedy
    for name, value in asked.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not _DEFAULTS[name].holds(value):
            allowed = _DEFAULTS[name].allowed
            raise ModelFolderError(f"{name} in {path} is {value!r}; allowed: {allowed}")
    if "top_k" in asked:
        asked["top_k"] = max(0, asked["top_k"])
    return SamplingDefaults(**asked)
