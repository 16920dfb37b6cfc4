"""The tokens that a model folder adds to its tokenizer.json, and the tokens that it names.

Four files describe them. tokenizer_config.json wins with its `added_tokens_decoder`; without it,
the legacy files special_tokens_map.json and added_tokens.json are read as well. The rules are those
of `PreTrainedTokenizerBase._from_pretrained` and `TokenizersBackend.__init__` in transformers 5.
The order of new tokens determines their ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken

STANDARD_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_EXTRA, _ADDITIONAL = "extra_special_tokens", "additional_special_tokens"
MAX_ID_DIGITS = 10  # of 32 bits
_FLAGS = {"single_word", "lstrip", "rstrip", "normalized", "special"}

Settings = Mapping[str, Any]  # a JSON object


class WrongToken(ValueError):
    """A file describes a token wrongly; the message begins with the key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderTokens:
    """A tokenizer's settings in addition to tokenizer.json."""

    named: Mapping[str, str]  # name, such as bos_token |-> text
    added: tuple[AddedToken, ...]  # in the order of their ids; known tokens get these flags


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFiles:
    """The files beside tokenizer.json; a missing one is empty."""

    config: Settings = field(default_factory=dict)  # tokenizer_config.json
    special_tokens_map: Settings = field(default_factory=dict)
    added_tokens: Mapping[str, int] = field(default_factory=dict)  # text |-> id

    def tokens(self, own: Mapping[int, AddedToken]) -> FolderTokens:
        """Merge the files with the added tokens of tokenizer.json, given by id.

        Raises:
            WrongToken: If a token is neither a text nor an object with content and flags.
        """
        is_legacy = self.config.get("added_tokens_decoder") is None
        settings, own_names = _merged(self.config, self.special_tokens_map if is_legacy else {})
        named = _named_tokens(settings, own_names)
        if is_legacy:
            by_id = _older_tokens(self.added_tokens, settings) | dict(own)
        else:
            by_id = _decoder_tokens(settings)
        added = [by_id[token_id] for token_id in sorted(by_id)]
        known = {token.content for token in (*own.values(), *added)}
        extra = settings[_EXTRA] if _EXTRA in settings else settings.get(_ADDITIONAL)
        for token in (*named.values(), *_token_list(extra)):
            if token.content not in known and token not in added:
                added.append(token)
        texts = {name: token.content for name, token in named.items()}
        for token in added:
            token.special = token.special or token.content in texts.values()
        return FolderTokens(named=texts, added=tuple(added))


def _merged(config: Settings, older: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Merge tokenizer_config.json with special_tokens_map.json, which wins.

    Returns:
        All settings, and the tokens that have a name of the model's own, taken out of them.
    """
    settings = dict(config)
    if not settings.get(_EXTRA) and _ADDITIONAL in settings:
        settings[_EXTRA] = settings.pop(_ADDITIONAL)
    own_names = {
        name: settings.pop(name)
        for name, value in config.items()
        if _is_own_name(name) and isinstance(value, str)
    }
    own_names |= _pop_named(settings)
    for key, value in older.items():
        if key == _EXTRA and isinstance(value, list):
            _token_list(settings.get(key))  # refuses what is not a list
            settings[key] = [*(settings.get(key) or []), *_token_list(value, special=True)]
        elif key != _EXTRA and isinstance(value, dict):
            settings[key] = _token(key, value, special=True)
        else:
            settings[key] = value
    return settings, own_names | _pop_named(settings)


def _pop_named(settings: dict[str, Any]) -> dict[str, Any]:
    """Take the extra tokens out of settings if they have names."""
    return settings.pop(_EXTRA) if isinstance(settings.get(_EXTRA), dict) else {}


def _named_tokens(settings: Settings, own_names: Settings) -> dict[str, AddedToken]:
    """Return the named tokens: standard names first, then the model's own."""
    values = {name: settings[name] for name in STANDARD_NAMES if settings.get(name) is not None}
    values |= {
        name: value
        for name, value in settings.items()
        if _is_own_name(name) and isinstance(value, str | dict | AddedToken)
    }
    return {name: _token(name, value) for name, value in (values | dict(own_names)).items()}


def _is_own_name(name: str) -> bool:
    """Return whether a key may name a token; add_bos_token does not, but has no text either."""
    return name.endswith("_token") and name not in STANDARD_NAMES


def _decoder_tokens(settings: Settings) -> dict[int, AddedToken]:
    key = "added_tokens_decoder"
    values = settings[key]
    if not isinstance(values, dict) or not all(map(_is_id, values)):
        raise WrongToken(f"{key} must be an object of tokens by id")
    return {int(each): _token(f"{key}.{each}", value) for each, value in values.items()}


def _is_id(text: str) -> bool:
    """Return whether a text is a token id; int() refuses thousands of digits."""
    return text.isdecimal() and len(text) <= MAX_ID_DIGITS


def _older_tokens(ids: Mapping[str, int], settings: Settings) -> dict[int, AddedToken]:
    """Return the tokens of added_tokens.json; settings say which of them are special."""
    if not all(isinstance(token_id, int) for token_id in ids.values()):
        raise WrongToken("added_tokens.json must have an integer for each token")
    if len(set(ids.values())) < len(ids):
        raise WrongToken("added_tokens.json must have another id for each token")
    extra = settings.get(_EXTRA)
    values = [settings.get(name) for name in STANDARD_NAMES]
    values += extra if isinstance(extra, list) else []
    special = {value.content if isinstance(value, AddedToken) else str(value) for value in values}
    return {
        token_id: AddedToken(text, normalized=text not in special, special=text in special)
        for text, token_id in ids.items()
    }


def _token_list(values: object, *, special: bool = False) -> list[AddedToken]:
    values = values or []
    key = f"{_EXTRA} or {_ADDITIONAL}"
    if not isinstance(values, list):
        raise WrongToken(f"{key} is a {type(values).__name__}, must be a list of tokens")
    return [_token(f"in {key} a token", value, special=special) for value in values]


def _token(key: str, value: object, *, special: bool = False) -> AddedToken:
    """Return a token given as text or object; `special` applies to objects without that flag."""
    if isinstance(value, AddedToken):
        return value
    if isinstance(value, str):
        return AddedToken(value, special=True)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {name: value[name] for name in _FLAGS & value.keys()}
        if all(isinstance(flag, bool) for flag in flags.values()):
            return AddedToken(value["content"], **{"special": special} | flags)
    raise WrongToken(
        f"{key} is {value!r:.200}, must be a text, or an object with content and flags"
    )
