"""Texts of tokens for log probabilities of answers that run."""

import asyncio
from collections.abc import Sequence

import pytest

from http_gateway.token_texts import FULL_S, TokenTexts
from http_gateway.wire import RouterLink
from pagewire import Model, OverloadedError
from pagewire.protos import inference_pb2
from pagewire.protos.token_ids import pack_token_ids
from tests.http_gateway.answer_texts import model
from tests.support.virtual_time import run_virtual

MODEL = model()
RESPONSE = inference_pb2.GenerateResponse(token_ids=pack_token_ids([5, 7]))


class FullRouter(RouterLink):
    """Has room again after some seconds."""

    def __init__(self, full_s: float, advice_s: float | None) -> None:
        self.full_s, self.advice_s = full_s, advice_s
        self.num_calls = 0

    async def pieces(self, authorization: str, model: Model, token_ids: Sequence[int]) -> list[str]:
        self.num_calls += 1
        if asyncio.get_running_loop().time() < self.full_s:
            raise OverloadedError("full", code="RESOURCE_EXHAUSTED", retry_after_s=self.advice_s)
        return [f"<{token_id}>" for token_id in token_ids]


@pytest.mark.parametrize("advice_s", [None, 1.0])
def test_an_answer_waits_for_texts_while_the_router_is_full(advice_s: float | None) -> None:
    async def scenario() -> None:
        link = FullRouter(FULL_S / 2, advice_s)
        texts = TokenTexts(link)
        await texts.load("", MODEL, [RESPONSE])
        assert [texts[5], texts[7]] == ["<5>", "<7>"]
        num_calls = link.num_calls
        assert num_calls <= FULL_S + 1
        await texts.load("", MODEL, [RESPONSE])
        assert link.num_calls == num_calls, "they were known"

    run_virtual(scenario())


def test_an_answer_ends_if_the_router_stays_full() -> None:
    async def scenario() -> None:
        with pytest.raises(OverloadedError):
            await TokenTexts(FullRouter(2 * FULL_S, None)).load("", MODEL, [RESPONSE])
        assert asyncio.get_running_loop().time() <= FULL_S

    run_virtual(scenario())
