"""POST /v1/responses: text and calls of functions, without storage."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from http_gateway.answer_text import AnswerText
from http_gateway.constraints import take_text_format
from http_gateway.errors import refused
from http_gateway.exchange import Exchange
from http_gateway.fields import Fields, Unsupported
from http_gateway.generation import Generation
from http_gateway.messages import chat_field, take_tools
from http_gateway.response_events import ResponseBuilder
from http_gateway.response_input import Source, input_field, input_messages
from http_gateway.sampling import field_name, take_sampling
from http_gateway.shared_fields import drop_without_effect, take_stream
from http_gateway.sse import json_bytes
from http_gateway.token_texts import TokenTexts, chat_logprobs, drawn_tokens
from http_gateway.wire import RouterLink
from pagewire import Constraint, Model
from pagewire.arguments import MAX_LOGPROBS
from pagewire.protos import inference_pb2
from pagewire.protos.token_ids import TOKEN_BYTES
from pagewire.shown import shown
from pagewire.wire import FINISH_REASONS, chat_request

LOGPROBS = "message.output_text.logprobs"  # in `include`
_STATELESS = "nothing is stored: send the whole conversation as input"
UNSUPPORTED = {
    "background": Unsupported("an answer lives as long as its request", off=(False,)),
    "context_management": Unsupported("a conversation is not shortened"),
    "conversation": Unsupported(_STATELESS),
    "max_completion_tokens": Unsupported("use max_output_tokens"),
    "max_tokens": Unsupported("use max_output_tokens"),
    "max_tool_calls": Unsupported("there are no tools of the server's own"),
    "moderation": Unsupported("nothing is moderated"),
    "previous_response_id": Unsupported(_STATELESS),
    "prompt": Unsupported("there are no stored prompts"),
    "reasoning": Unsupported("the chat template decides", off=({},)),
    "response_format": Unsupported("use text.format"),
    "service_tier": Unsupported("there is one tier", off=("auto", "default")),
    "store": Unsupported(_STATELESS, off=(False,)),
    "truncation": Unsupported("a conversation is not shortened", off=("disabled",)),
}
_NAMES = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
TEXT = {"format": {"type": "text"}}


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseRequest:
    """A checked request."""

    call: inference_pb2.GenerateRequest
    is_stream: bool
    tools: Sequence[str]  # names of functions that may be called
    is_parallel: bool
    has_logprobs: bool
    echoed: dict[str, Any]  # fields that the answer repeats


def parse_response(
    body: dict[str, Any], model: Model, names: dict[str, str], sources: list[Source]
) -> ResponseRequest:
    """Check a request.

    Args:
        body: The request.
        model: The served model.
        names: Gets its names of options that gRPC names differently.
        sources: Gets where each message comes from.
    """
    echoed = {
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "temperature": body.get("temperature"),
        "text": {**TEXT, **text} if isinstance(text := body.get("text"), dict) else TEXT,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": body.get("top_p"),
    }
    fields = Fields(body)
    fields.refuse_unsupported(UNSUPPORTED)
    echoed["metadata"] = drop_without_effect(fields)
    is_stream, stream_options = take_stream(fields)
    stream_options.refuse_others()
    constraint = _take_text(fields.object("text"), names)
    instructions, given = fields.text("instructions"), fields.take("input")
    tools = take_tools(fields, model, is_flat=True)
    is_parallel = fields.flag("parallel_tool_calls", True)
    has_logprobs = _takes_logprobs(fields)
    top_logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS) or 0
    if top_logprobs and not has_logprobs:
        raise fields.refused("top_logprobs", str(top_logprobs), f"0 without {LOGPROBS!r} included")
    sampled = ("temperature", "top_p")
    options = take_sampling(fields, names, openai=sampled, max_tokens=("max_output_tokens",))
    if constraint is not None:
        if options["constraint"] is not None:
            raise refused("text.format", "a format", "absent with another one")
        options["constraint"] = constraint
    model_name = fields.text("model")
    fields.refuse_others()
    messages = input_messages(instructions, given, sources)
    tools.hold(options, names, model, is_parallel=is_parallel)
    if has_logprobs:
        options["logprobs"] = top_logprobs
    return ResponseRequest(
        call=chat_request(messages, tools.shown, model_name, options),
        is_stream=is_stream,
        tools=tools.functions,
        is_parallel=is_parallel,
        has_logprobs=has_logprobs,
        echoed=echoed,
    )


class Responses:
    """Creates responses."""

    def __init__(self, link: RouterLink, texts: TokenTexts) -> None:
        self._link = link
        self._texts = texts

    async def answer(self, exchange: Exchange, body: dict[str, Any]) -> None:
        """Create one."""
        names, sources = dict(_NAMES), list[Source]()
        exchange.rename_field = lambda name: field_name(
            input_field(chat_field(name), sources), names
        )
        model = await self._link.model(exchange.authorization)
        request = await exchange.convert(partial(parse_response, body, model, names, sources))
        generation = Generation(
            self._link, self._texts, exchange, model, [request.call], is_stream=request.is_stream
        )
        head = {
            "id": f"resp_{exchange.record.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model.name,
        }
        builder = ResponseBuilder(head, request.echoed)
        answer = _Answer(request, model, generation, builder)
        async with generation:
            if request.is_stream:
                exchange.stream_error = builder.fail
                await answer.stream(exchange)
            else:
                await answer.read()
                await exchange.answer_json(builder.response())


class _Answer:
    """Feeds messages to a builder as they come."""

    def __init__(
        self,
        request: ResponseRequest,
        model: Model,
        generation: Generation,
        builder: ResponseBuilder,
    ) -> None:
        self._request = request
        self._model = model
        self._generation = generation
        self._builder = builder
        self._reader: AnswerText | None = None

    async def read(self) -> None:
        """Read the whole answer."""
        async for batch in self._generation.batches():
            for _, response in batch:
                self._add(response)
        self._builder.end(self._usage())

    async def stream(self, exchange: Exchange) -> None:
        """Send events as they come."""
        has_begun = False
        async for batch in self._generation.batches():
            events = "" if has_begun else self._builder.begin()
            has_begun = True
            events += "".join(self._add(response) for _, response in batch)
            if events:
                await exchange.send_events(json_bytes(events))
        await exchange.end_events(json_bytes(self._builder.end(self._usage())))

    def _add(self, response: inference_pb2.GenerateResponse) -> str:
        if self._reader is None:
            self._reader = AnswerText(
                self._model,
                begins_in_reasoning=response.begins_in_reasoning,
                tools=self._request.tools,
                is_parallel=self._request.is_parallel,
            )
        parts = self._reader.push(response.text, len(response.token_ids) // TOKEN_BYTES)
        finish = FINISH_REASONS.get(response.finish_reason)
        if finish:
            parts += self._reader.finish()
        logprobs: list[dict[str, Any]] = []
        if self._request.has_logprobs and not self._reader.is_reasoning:
            drawn = drawn_tokens(response, (), is_stop=finish == "stop")
            logprobs = chat_logprobs(drawn, self._generation.texts)
        return self._builder.add(parts, logprobs, finish)

    def _usage(self) -> dict[str, Any]:
        counts = self._generation.counts
        return {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {"cached_tokens": counts.cached_tokens},
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": self._reader.num_reasoning_tokens if self._reader else 0
            },
            "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        }


def _take_text(text: Fields, names: dict[str, str]) -> Constraint | None:
    text.refuse_unsupported({"verbosity": Unsupported("the model decides")})
    constraint = take_text_format(text, names)
    text.refuse_others()
    return constraint


def _takes_logprobs(fields: Fields) -> bool:
    included = fields.array("include")
    for index, each in enumerate(included):
        if each != LOGPROBS:
            raise refused(f"include[{index}]", shown(each), repr(LOGPROBS))
    return bool(included)
