"""Text to token ids and back, equal to transformers' AutoTokenizer with the same files."""

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer as HuggingFaceTokenizer

from router.added_tokens import TokenFiles


class Tokenizer:
    """A tokenizer.json with the added tokens of the files beside it.

    tokenizer.json alone defines how text is split, and its post-processor defines which special
    tokens a prompt gets. transformers likewise ignores `add_bos_token` and `add_eos_token`, but
    replaces the splitting of two tokenizer classes
    (docs/decisions/0014-what-a-model-folder-may-say.md).

    Args:
        serialized: Content of tokenizer.json.
        files: The files beside it.

    Attributes:
        special_tokens: Name, such as bos_token |-> text.
        own_texts: The texts that tokens have whatever their neighbours are.

    Raises:
        WrongToken: If a file describes a token wrongly.
    """

    def __init__(self, serialized: str, files: TokenFiles | None = None) -> None:
        files = files or TokenFiles()
        self._tokenizer = HuggingFaceTokenizer.from_str(serialized)
        self._tokenizer.no_truncation()  # a prompt that is too long is refused, never cut
        self._tokenizer.no_padding()
        tokens = files.tokens(self._tokenizer.get_added_tokens_decoder())
        self._tokenizer.add_tokens(list(tokens.added))
        self._tokenizer.encode_special_tokens = files.config.get("split_special_tokens") is True
        self.special_tokens = tokens.named
        self._special_ids = frozenset(
            token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        # With this decoder a text is the sum of the tokens' bytes.
        is_contextless = type(self._tokenizer.decoder).__name__ == "ByteLevel"
        self.own_texts = OwnTexts(self._own_text if is_contextless else lambda _: None)

    @property
    def is_bpe(self) -> bool:
        return type(self._tokenizer.model).__name__ == "BPE"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text; special tokens written in it count as such."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_unlocked(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the same in a thread, without the interpreter lock most of the time."""
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, by default without special ones; unknown ones have none."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def decode_unlocked(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the same in a thread, without the interpreter lock most of the time."""
        [text] = self._tokenizer.decode_batch(
            [list(token_ids)], skip_special_tokens=skip_special_tokens
        )
        return str(text)

    def piece(self, token_id: int) -> str:
        """Return the text that a token, special or not, adds within a text.

        It has the leading blank that `decode` drops at the beginning of a text.
        """
        once = self.decode([token_id], skip_special_tokens=False)
        twice = self.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(once) :] if twice.startswith(once) else once

    def is_known(self, token_id: int) -> bool:
        """Whether the vocabulary has a token with this id."""
        return self._tokenizer.id_to_token(token_id) is not None

    def has_text(self, token_id: int) -> bool:
        """Whether `decode` does not skip this token: it is known and not special."""
        return token_id not in self._special_ids and self.is_known(token_id)

    def token_id(self, text: str) -> int | None:
        """Return the id of a token by its text; None: there is no such token."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, special or not."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def _own_text(self, token_id: int) -> str | None:
        text = self.decode([token_id]) if self.has_text(token_id) else ""
        return None if "\ufffd" in text else text or None


class OwnTexts(dict[int, str | None]):
    """Token id |-> the text that it has wherever complete characters precede it, once looked up.

    None: its text may depend on its neighbours, or it has none.
    """

    def __init__(self, find: Callable[[int], str | None]) -> None:
        self._find = find

    def __missing__(self, token_id: int) -> str | None:
        text = self[token_id] = self._find(token_id)
        return text


class WithSpecialTokens:
    """A tokenizer's decoder whose text includes special tokens; see router.detokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.own_texts = tokenizer.own_texts  # of a special one: None
        self._tokenizer = tokenizer

    def has_text(self, token_id: int) -> bool:
        return self._tokenizer.is_known(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
