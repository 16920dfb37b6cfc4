"""POST /v1/completions: one prompt or several, texts or token ids."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from http_gateway.config import GatewayConfig
from http_gateway.errors import refused
from http_gateway.exchange import Exchange
from http_gateway.fields import Fields, Unsupported, shown_json
from http_gateway.generation import Generation, usage_json
from http_gateway.messages import check_count
from http_gateway.sampling import field_name, take_sampling
from http_gateway.shared_fields import StreamOptions, drop_without_effect, take_stream_options
from http_gateway.sse import DONE, Chunks, compact, quoted
from http_gateway.token_texts import TokenTexts, completion_logprobs, drawn_tokens
from http_gateway.wire import RouterLink
from pagewire import Model, PagewireError, SamplingOptions
from pagewire.arguments import MAX_LOGPROBS
from pagewire.protos import inference_pb2
from pagewire.shown import shown, shown_with_type
from pagewire.wire import FINISH_REASONS, detokenize_request, generate_request

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API, and vLLM
UNSUPPORTED = {
    "logit_bias": Unsupported("tokens cannot be biased", off=({},)),
    "max_completion_tokens": Unsupported("use max_tokens"),
    "max_output_tokens": Unsupported("use max_tokens"),
    "suffix": Unsupported("text cannot be filled in", off=("",)),
}
Prompt = str | list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """A checked request."""

    prompts: Sequence[Prompt]
    is_batch: bool  # given as an array of prompts
    options: SamplingOptions
    model: str
    delivery: StreamOptions
    has_echo: bool  # the prompt is part of the text
    logprobs: int | None  # most probable tokens to show, besides the drawn one

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        n = self.options.get("n")
        return n if type(n) is int else 1


@dataclass(slots=True)
class _Choice:
    """One choice as far as it has come."""

    texts: list[str]
    num_chars: int
    finish_reason: str | None
    logprobs: dict[str, Any] | None


def parse_completion(
    body: dict[str, Any], config: GatewayConfig, names: dict[str, str]
) -> CompletionRequest:
    """Check a request; `names` gets its names of options that gRPC names differently."""
    fields = Fields(body)
    fields.refuse_unsupported(UNSUPPORTED)
    drop_without_effect(fields)
    delivery = take_stream_options(fields)
    prompt = fields.take("prompt")
    has_echo = fields.flag("echo")
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    options = take_sampling(fields, names, max_tokens=("max_tokens",))
    options["logprobs"] = logprobs
    if has_echo and logprobs is not None:
        allowed = "absent with echo: prompts have no log probabilities"
        raise refused("logprobs", str(logprobs), allowed, code="unsupported_parameter")
    if options.get("max_tokens") is None:
        options["max_tokens"] = DEFAULT_MAX_TOKENS
    n, best_of = options.get("n"), fields.take("best_of")
    if best_of is not None and best_of != (1 if n is None else n):
        allowed = "n: all answers are returned"
        raise refused("best_of", shown(best_of), allowed, code="unsupported_parameter")
    model = fields.text("model")
    fields.refuse_others()
    prompts, is_batch = _prompts(prompt, config.max_prompts)
    return CompletionRequest(
        prompts=prompts,
        is_batch=is_batch,
        options=options,
        model=model,
        delivery=delivery,
        has_echo=has_echo,
        logprobs=logprobs,
    )


class Completions:
    """Continues prompts."""

    def __init__(self, link: RouterLink, texts: TokenTexts, config: GatewayConfig) -> None:
        self._link = link
        self._texts = texts
        self._config = config

    async def answer(self, exchange: Exchange, body: dict[str, Any]) -> None:
        """Answer one request."""
        names: dict[str, str] = {}
        request = await exchange.convert(partial(parse_completion, body, self._config, names))
        place = _Place(request.is_batch)
        exchange.rename_field = lambda name: field_name(place.rename(name), names)
        model = await self._link.model(exchange.authorization)
        calls, echoes = [], []
        for place.index, prompt in enumerate(request.prompts):
            call = partial(generate_request, prompt, request.model, request.options)
            calls.append(await exchange.convert(call))
            echoes.append(await self._echo(exchange, request, prompt, model))
        is_stream = request.delivery.is_stream
        generation = Generation(
            self._link, self._texts, exchange, model, calls, is_stream=is_stream
        )
        answer = _Answer(request, model, generation, echoes, exchange.record.request_id)
        async with generation:
            try:
                if is_stream:
                    await answer.stream(exchange)
                else:
                    await exchange.answer_json(await answer.whole())
            except PagewireError:
                place.index = generation.failed_call
                raise

    async def _echo(
        self, exchange: Exchange, request: CompletionRequest, prompt: Prompt, model: Model
    ) -> str:
        if not request.has_echo:
            return ""
        if isinstance(prompt, str):
            return prompt
        convert = partial(detokenize_request, prompt, model.name, False)
        call = await exchange.convert(convert)
        return await self._link.detokenize(exchange.authorization, call)


@dataclass(slots=True)
class _Place:
    """The prompt of a request that an error is about."""

    is_batch: bool
    index: int = 0

    def rename(self, field: str) -> str:
        """Return the request's name of a call's field: prompt.token_ids[3] -> prompt[0][3]."""
        prompt = f"prompt[{self.index}]" if self.is_batch else "prompt"
        return re.sub(r"^(prompt\.text|prompt\.token_ids|prompt|token_ids)\b", prompt, field)


class _Answer:
    """The answer to one request, as a whole or as a stream."""

    def __init__(
        self,
        request: CompletionRequest,
        model: Model,
        generation: Generation,
        echoes: Sequence[str],
        request_id: str,
    ) -> None:
        self._request = request
        self._generation = generation
        self._echoes = echoes
        self._head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }
        self._choices: dict[int, _Choice] = {}

    async def whole(self) -> dict[str, Any]:
        """Return the complete answer."""
        async for batch in self._generation.batches():
            for number, response in batch:
                self._take(number, response)
        choices = [
            {
                "index": index,
                "text": "".join(choice.texts),
                "logprobs": choice.logprobs,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in sorted(self._choices.items())
        ]
        return {**self._head, "choices": choices, "usage": usage_json(self._generation.counts)}

    async def stream(self, exchange: Exchange) -> None:
        """Send the answer as it comes."""
        delivery = self._request.delivery
        chunks = Chunks(self._head, has_usage=delivery.has_usage)
        async for batch in self._generation.batches():
            events = []
            for number, response in batch:
                index, text, logprobs = self._take(number, response)
                if text or logprobs or response.finish_reason:
                    finish = FINISH_REASONS.get(response.finish_reason)
                    events.append(chunks.chunk(_chunk(index, text, logprobs, finish)))
            if events:
                await exchange.send_events("".join(events).encode())
        last = ""
        if delivery.has_usage:
            last = chunks.usage(usage_json(self._generation.counts))
        await exchange.end_events(last.encode() + DONE)

    def _take(
        self, number: int, response: inference_pb2.GenerateResponse
    ) -> tuple[int, str, dict[str, Any] | None]:
        """Add a response to its choice; return the choice's index and the new part."""
        index = number * self._request.num_choices + response.choice
        choice = self._choices.get(index)
        text = response.text
        if choice is None:
            choice = self._choices[index] = _Choice([], 0, None, None)
            text = self._echoes[number] + text
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = self._logprobs(response, choice)
        if not self._request.delivery.is_stream:
            choice.texts.append(text)
        choice.num_chars += len(text)
        choice.finish_reason = FINISH_REASONS.get(response.finish_reason)
        return index, text, logprobs

    def _logprobs(
        self, response: inference_pb2.GenerateResponse, choice: _Choice
    ) -> dict[str, Any]:
        assert self._request.logprobs is not None
        is_stop = FINISH_REASONS.get(response.finish_reason) == "stop"
        stop = self._request.options.get("stop") or ()
        stop = [stop] if isinstance(stop, str) else stop
        new = completion_logprobs(
            drawn_tokens(response, stop, is_stop=is_stop),
            self._generation.texts,
            choice.num_chars,
            has_top=self._request.logprobs > 0,
        )
        if choice.logprobs is None or self._request.delivery.is_stream:
            choice.logprobs = new
        else:
            for name, values in new.items():
                if values is not None:
                    choice.logprobs[name] += values
        return new


def _prompts(value: object, max_prompts: int) -> tuple[list[Prompt], bool]:
    """Return the prompts of a request, and whether they were given as an array of prompts."""
    allowed = "a string, an array of strings, of token ids, or of arrays of token ids"
    if isinstance(value, str):
        return [value], False
    if not isinstance(value, list) or not value:
        raise refused("prompt", "none" if value in (None, []) else shown_with_type(value), allowed)
    if type(value[0]) not in (str, list):
        return [value], False  # token ids, which the client's validator checks
    check_count("prompt", value, "prompts", max_prompts)
    for index, each in enumerate(value):
        if type(each) is not type(value[0]):
            raise refused(f"prompt[{index}]", shown_json(each), allowed)
    return value, True


def _chunk(index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> str:
    shown = compact(logprobs) if logprobs else "null"
    reason = f'"{finish}"' if finish else "null"
    return f'{{"index":{index},"text":{quoted(text)},"logprobs":{shown},"finish_reason":{reason}}}'
