"""Shared by all generating endpoints: starting calls, reading their answers, accounting."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from http_gateway.answers import Answers, Message
from http_gateway.exchange import Exchange
from http_gateway.token_texts import TokenTexts
from http_gateway.wire import RouterLink
from pagewire import Model
from pagewire.protos import inference_pb2
from pagewire.protos.token_ids import TOKEN_BYTES
from pagewire.wire import FINISH_REASONS, usage_from

WHOLE_S = 1.0  # between two messages of a call whose answer is sent whole
COMMENT = b": waiting\n\n"  # which clients of event streams skip


@dataclass(slots=True)
class Counts:
    """Tokens of a request, over all its calls."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


def usage_json(counts: Counts) -> dict[str, Any]:
    """Return the usage of a completion."""
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
    }


class Generation:
    """The calls of one request, while they run. Use it with `async with`.

    Args:
        link: The connection to the router.
        texts: Texts of tokens, for log probabilities.
        exchange: The request.
        model: The model that answers.
        requests: One for each call.
        is_stream: Whether the client gets events.
    """

    def __init__(
        self,
        link: RouterLink,
        texts: TokenTexts,
        exchange: Exchange,
        model: Model,
        requests: Sequence[inference_pb2.GenerateRequest],
        *,
        is_stream: bool,
    ) -> None:
        self.counts = Counts()
        self.texts = texts
        self._link = link
        self._exchange = exchange
        self._model = model
        self._requests = requests
        self._is_stream = is_stream
        self._has_logprobs = any(each.sampling.HasField("logprobs") for each in requests)
        self._answers: Answers | None = None
        exchange.record.model = model.name
        exchange.record.is_stream = is_stream

    async def __aenter__(self) -> "Generation":
        self._answers = await self._link.start(
            self._exchange.authorization, self._requests, self._interval_s()
        )
        self._exchange.metrics.waiting(1)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._answers
        if not self._exchange.record.first_token_at:
            self._exchange.metrics.waiting(-1)
        self._answers.close()

    @property
    def failed_call(self) -> int:
        """The number of the call that ended them all."""
        return self._answers.failed_call if self._answers else 0

    async def batches(self) -> AsyncIterator[list[Message]]:
        """Yield the messages that arrived since the last time, until all calls are over.

        `texts` has all tokens that their log probabilities name.

        Raises:
            PagewireError: A call failed.
        """
        assert self._answers
        record = self._exchange.record
        while not self._answers.is_over:
            arrived = await self._answers.next()
            if not arrived:  # keeps proxies from closing the connection
                if self._is_stream:
                    await self._exchange.send_events(COMMENT)
                continue
            if not record.first_token_at:
                self._note_first_token(arrived[0][1])
            for _, response in arrived:
                record.completion_tokens += len(response.token_ids) // TOKEN_BYTES
                if response.finish_reason:
                    reason = FINISH_REASONS[response.finish_reason]
                    self._exchange.metrics.choice_finished(self._model.name, reason)
                if response.HasField("usage"):
                    self._account(response.usage)
            if self._has_logprobs:
                responses = (response for _, response in arrived if response.logprobs)
                await self.texts.load(self._exchange.authorization, self._model, responses)
            yield arrived
        self._exchange.metrics.answered(self._model.name, record.elapsed_s)

    def _interval_s(self) -> float:
        if self._is_stream:
            return self._exchange.config.stream_interval_s
        return 0.0 if self._model.has_reasoning else WHOLE_S  # tokens of reasoning are counted

    def _note_first_token(self, response: inference_pb2.GenerateResponse) -> None:
        record = self._exchange.record
        record.router_request_id = response.request_id
        record.first_token_at = record.started_at + record.elapsed_s
        record.span.event("first_token")
        self._exchange.metrics.waiting(-1)
        self._exchange.metrics.first_token(self._model.name, record.elapsed_s)

    def _account(self, usage: inference_pb2.Usage) -> None:
        cached_tokens = usage_from(usage).cached_tokens
        self.counts.prompt_tokens += usage.prompt_tokens
        self.counts.completion_tokens += usage.completion_tokens
        self.counts.cached_tokens += cached_tokens
        self._exchange.record.prompt_tokens = self.counts.prompt_tokens
        self._exchange.metrics.call_finished(self._model.name, usage, cached_tokens)
