"""Turns a stream of token ids into text, never splitting a character.

Tokens that arrive together make one piece, unless it would end with half a character.

The text of all pieces equals `decode` of all ids. Decoding depends on neighbours (a leading space
is dropped, bytes join to characters), so each piece is decoded together with the previous piece's
tokens, whose text is then cut off. Text that ends in U+FFFD may be half a character and waits for
more tokens. Where the decoder knows a token's text whatever its neighbours are, and nothing waits,
nothing is decoded.

One difference remains, for tokenizers with byte-fallback tokens: if a malformed byte follows
complete characters of the same run, `decode` replaces the whole run; the stream keeps the
characters that it has sent. Whatever tokens come together, the text is the same, so that another
router can go on with it.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

_INCOMPLETE = "\ufffd"
_MAX_WAITING = 32  # tokens without a complete character; then the waiting ones are cut down
_MAX_CHARACTER_TOKENS = 3  # an incomplete character has at most three bytes, each one token


class Decoder(Protocol):
    """The interface that the detokenizer needs of a tokenizer."""

    @property
    def own_texts(self) -> Mapping[int, str | None]: ...

    def has_text(self, token_id: int) -> bool: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class Detokenizer:
    """State of one choice's text."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._own_texts = decoder.own_texts
        self._window: list[int] = []  # tokens of the last piece, then those that wait
        self._num_sent = 0  # tokens of the window whose text was returned
        self._sent_text = ""  # text of the window that was returned

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that became complete with these tokens."""
        if len(token_ids) == 1 and self._num_sent == len(self._window):
            text = self._own_texts[token_ids[0]]
            if text is not None:
                self._window, self._num_sent, self._sent_text = [*token_ids], 1, text
                return text
        new_ids = [token_id for token_id in token_ids if self._decoder.has_text(token_id)]
        if not new_ids:
            return ""
        window = self._window + new_ids
        text = self._decoder.decode(window)
        is_complete = text != self._sent_text and not text.endswith(_INCOMPLETE)
        # Of malformed bytes, the text depends on what was sent before them: always the same.
        if len(new_ids) > 1 and (not is_complete or _INCOMPLETE in text):
            return "".join([self.push([token_id]) for token_id in new_ids])
        self._window = window
        if is_complete:
            return self._send(text, len(window))
        if len(window) - self._num_sent > _MAX_WAITING:
            return self._send_oldest(text)
        return ""

    def finish(self) -> str:
        """Return the waiting text as it is."""
        if self._num_sent == len(self._window):
            return ""
        return self._send(self._decoder.decode(self._window), len(self._window))

    def _send(self, text: str, num_tokens: int) -> str:
        """Return the unsent part of `text`, the text of the window's first tokens."""
        # Decoding drops a leading blank: any text would begin with what is left of it.
        has_turned = not self._sent_text and text.startswith(_INCOMPLETE)
        if not has_turned and text.startswith(self._sent_text):
            new_text = text[len(self._sent_text) :]
        else:  # sent characters turned malformed; see the module's docstring
            new_text = self._decoder.decode(self._window[self._num_sent : num_tokens])
        self._window = self._window[self._num_sent :]
        self._num_sent = num_tokens - self._num_sent
        self._sent_text = self._decoder.decode(self._window[: self._num_sent])
        return new_text

    def _send_oldest(self, text: str) -> str:
        """Send waiting garbage up to a token where the text can be cut without changing it."""
        for end in range(len(self._window) - _MAX_CHARACTER_TOKENS - 1, self._num_sent, -1):
            head = self._decoder.decode(self._window[:end])
            if head + self._decoder.decode(self._window[end:]) == text:
                return self._send(head, end)
        return ""
