"""Text to token ids and back, equal to transformers' AutoTokenizer with the same files."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as HuggingFaceTokenizer

_ADDED_TOKEN_FIELDS = {"content", "single_word", "lstrip", "rstrip", "normalized", "special"}
_LARGE_TEXT_CHARS = 50_000  # about 50 ms of tokenizing: longer would hold up other streams


class Tokenizer:
    """A tokenizer.json with the added tokens of its tokenizer_config.json.

    Its post-processor alone says which special tokens a prompt gets: where there is a
    tokenizer.json, transformers ignores `add_bos_token` and `add_eos_token` too.

    Args:
        serialized: Content of tokenizer.json.
        special_tokens: Name |-> text, such as bos_token |-> "<s>"; those unknown are added.
        added_tokens: Id |-> AddedToken fields, as in `added_tokens_decoder`.
    """

    def __init__(
        self,
        serialized: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        added_tokens: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        special_tokens = special_tokens or {}
        self._tokenizer = HuggingFaceTokenizer.from_str(serialized)
        self._tokenizer.no_truncation()  # a prompt that is too long is refused, never cut
        self._tokenizer.no_padding()
        self._add_tokens(special_tokens, added_tokens or {})
        self._special_ids = frozenset(
            token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text; special tokens written in it count as such."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    async def encode_large(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the same without holding up the event loop when the text is long."""
        if len(text) <= _LARGE_TEXT_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        # encode_batch releases the interpreter lock, encode does not.
        [encoding] = await asyncio.to_thread(
            self._tokenizer.encode_batch, [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids without special tokens; unknown ids have no text."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def has_text(self, token_id: int) -> bool:
        """Whether `decode` does not skip this token: it is known and not special."""
        return (
            token_id not in self._special_ids and self._tokenizer.id_to_token(token_id) is not None
        )

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, special or not."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def _add_tokens(
        self, special_tokens: Mapping[str, str], added_tokens: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Add what the configuration has and tokenizer.json lacks, as transformers does."""
        known = {repr(token) for token in self._tokenizer.get_added_tokens_decoder().values()}
        for _, fields in sorted(added_tokens.items(), key=lambda item: int(item[0])):
            token = AddedToken(
                **{name: fields[name] for name in _ADDED_TOKEN_FIELDS & fields.keys()}
            )
            if repr(token) not in known:
                add = (
                    self._tokenizer.add_special_tokens
                    if token.special
                    else self._tokenizer.add_tokens
                )
                add([token])
        texts = {t.content for t in self._tokenizer.get_added_tokens_decoder().values()}
        for text in special_tokens.values():
            if text not in texts:
                self._tokenizer.add_special_tokens([AddedToken(text, special=True)])
