"""Texts of single tokens, for log probabilities; the router is asked once for each token."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from http_gateway.wire import RouterLink
from pagewire import Model, OverloadedError
from pagewire.protos import common_pb2, inference_pb2
from pagewire.protos.token_ids import unpack_token_ids

FULL_S, PAUSE_S = 30.0, 0.5  # for a full router; between two calls if it advises nothing
LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have
Drawn = tuple[int, common_pb2.TokenLogprobs]  # token id, its log probabilities


class TokenTexts:
    """A cache of the vocabulary's texts, at most one per token."""

    def __init__(self, link: RouterLink) -> None:
        self._link = link
        self._model = ""
        self._texts: dict[int, str] = {}  # token id |-> text, "" where it has none

    def __getitem__(self, token_id: int) -> str:
        return self._texts[token_id]

    async def load(
        self, authorization: str, model: Model, responses: Iterable[inference_pb2.GenerateResponse]
    ) -> None:
        """Fetch the texts of all tokens that responses name, on behalf of their caller."""
        if model.name != self._model:
            self._model, self._texts = model.name, {}
        wanted: set[int] = set()
        for response in responses:
            wanted.update(unpack_token_ids(response.token_ids))
            for entry in response.logprobs:
                wanted.update(unpack_token_ids(entry.top_token_ids))
        if missing := sorted(wanted - self._texts.keys()):
            pieces = await self._pieces(authorization, model, missing)
            self._texts.update(zip(missing, pieces, strict=True))

    async def _pieces(
        self, authorization: str, model: Model, token_ids: Sequence[int]
    ) -> list[str]:
        """Ask the router, again and again while it is full: an answer that runs must not end so."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + FULL_S
        while True:
            try:
                return await self._link.pieces(authorization, model, token_ids)
            except OverloadedError as error:
                pause_s = error.retry_after_s or PAUSE_S
                if loop.time() + pause_s > ends_at:
                    raise
                await asyncio.sleep(pause_s)


def drawn_tokens(
    response: inference_pb2.GenerateResponse, stop: Sequence[str], *, is_stop: bool
) -> list[Drawn]:
    """Return the tokens of a response with their log probabilities, but for the end token.

    Args:
        response: It has log probabilities.
        stop: The request's stop strings.
        is_stop: Whether the choice ends with this response, by a token or a string.
    """
    drawn = list(zip(unpack_token_ids(response.token_ids), response.logprobs, strict=False))
    is_end_token = is_stop and response.stopped_by not in stop
    return drawn[:-1] if is_end_token else drawn


def chat_logprobs(drawn: Sequence[Drawn], texts: TokenTexts) -> list[dict[str, Any]]:
    """Return tokens in the format of chats and responses."""
    return [
        {
            **_token(texts[token_id], entry.logprob),
            "top_logprobs": [
                _token(texts[other], logprob)
                for other, logprob in zip(
                    unpack_token_ids(entry.top_token_ids), entry.top_logprobs, strict=True
                )
            ],
        }
        for token_id, entry in drawn
    ]


def completion_logprobs(
    drawn: Sequence[Drawn], texts: TokenTexts, offset: int, *, has_top: bool
) -> dict[str, Any]:
    """Return tokens in the format of completions.

    Args:
        drawn: The tokens.
        texts: Their texts.
        offset: Position of the first one in the text, characters.
        has_top: Whether the most probable tokens were requested, too.
    """
    tokens = [texts[token_id] for token_id, _ in drawn]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    tops = [
        {
            texts[other]: max(logprob, LEAST_LOGPROB)
            for other, logprob in zip(
                unpack_token_ids(entry.top_token_ids), entry.top_logprobs, strict=True
            )
        }
        for _, entry in drawn
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [max(entry.logprob, LEAST_LOGPROB) for _, entry in drawn],
        "top_logprobs": tops if has_top else None,
        "text_offset": offsets,
    }


def _token(text: str, logprob: float) -> dict[str, Any]:
    # A token that is part of a character has no text, and its bytes are unknown.
    is_partial = "\ufffd" in text
    return {
        "token": text,
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": None if is_partial else [*text.encode()],
    }
