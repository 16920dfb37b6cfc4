"""POST /v1/chat/completions."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from http_gateway.answer_text import AnswerText
from http_gateway.exchange import Exchange
from http_gateway.fields import Fields, Unsupported
from http_gateway.generation import Generation, usage_json
from http_gateway.messages import Tools, chat_field, read_messages, take_tools
from http_gateway.parts import CallArguments, CallBegins, Content, Part, Reasoning
from http_gateway.sampling import field_name, take_sampling
from http_gateway.shared_fields import StreamOptions, drop_without_effect, take_stream_options
from http_gateway.sse import DONE, Chunks, compact, json_bytes, quoted
from http_gateway.token_texts import TokenTexts, chat_logprobs, drawn_tokens
from http_gateway.wire import RouterLink
from pagewire import Model
from pagewire.arguments import MAX_LOGPROBS
from pagewire.protos import inference_pb2
from pagewire.protos.token_ids import TOKEN_BYTES
from pagewire.wire import FINISH_REASONS, chat_request

UNSUPPORTED = {
    "audio": Unsupported("there is no audio"),
    "function_call": Unsupported("it is deprecated; use tool_choice"),
    "functions": Unsupported("it is deprecated; use tools"),
    "logit_bias": Unsupported("tokens cannot be biased", off=({},)),
    "max_output_tokens": Unsupported("use max_completion_tokens"),
    "modalities": Unsupported("there is text only", off=(["text"],)),
    "moderation": Unsupported("nothing is moderated"),
    "prediction": Unsupported("predictions are not used"),
    "reasoning_effort": Unsupported("the chat template decides"),
    "service_tier": Unsupported("there is one tier", off=("auto", "default")),
    "store": Unsupported("nothing is stored", off=(False,)),
    "verbosity": Unsupported("the model decides"),
    "web_search_options": Unsupported("there is no web search"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A checked request."""

    call: inference_pb2.GenerateRequest
    delivery: StreamOptions
    tools: Tools
    is_parallel: bool  # whether it may call several
    has_logprobs: bool

    @property
    def stop(self) -> Sequence[str]:
        """The stop strings."""
        return self.call.sampling.stop


@dataclass(slots=True)
class _Choice:
    """One choice so far."""

    reader: AnswerText
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)  # id, name, arguments
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


def parse_chat(body: dict[str, Any], model: Model, names: dict[str, str]) -> ChatRequest:
    """Check a request; `names` gets its names of options that gRPC names differently."""
    fields = Fields(body)
    fields.refuse_unsupported(UNSUPPORTED)
    drop_without_effect(fields)
    delivery = take_stream_options(fields)
    given = fields.array("messages")
    tools = take_tools(fields, model)
    is_parallel = fields.flag("parallel_tool_calls", True)
    has_logprobs = fields.flag("logprobs")
    top_logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS) or 0
    if top_logprobs and not has_logprobs:
        raise fields.refused("top_logprobs", str(top_logprobs), "0 where logprobs is not true")
    max_tokens = ("max_tokens", "max_completion_tokens")
    options = take_sampling(fields, names, max_tokens=max_tokens)
    model_name = fields.text("model")
    fields.refuse_others()
    messages = read_messages(given)
    if has_logprobs:
        options["logprobs"], names["logprobs"] = top_logprobs, "top_logprobs"
    tools.hold(options, names, model, is_parallel=is_parallel)
    return ChatRequest(
        call=chat_request(messages, tools.shown, model_name, options),
        delivery=delivery,
        tools=tools,
        is_parallel=is_parallel,
        has_logprobs=has_logprobs,
    )


class ChatCompletions:
    """Answers chats."""

    def __init__(self, link: RouterLink, texts: TokenTexts) -> None:
        self._link = link
        self._texts = texts

    async def answer(self, exchange: Exchange, body: dict[str, Any]) -> None:
        """Answer one."""
        names: dict[str, str] = {}
        exchange.rename_field = lambda name: field_name(chat_field(name), names)
        model = await self._link.model(exchange.authorization)
        request = await exchange.convert(partial(parse_chat, body, model, names))
        generation = Generation(
            self._link,
            self._texts,
            exchange,
            model,
            [request.call],
            is_stream=request.delivery.is_stream,
        )
        answer = _ChatAnswer(request, model, generation, exchange.record.request_id)
        async with generation:
            if request.delivery.is_stream:
                await answer.stream(exchange)
            else:
                await exchange.answer_json(await answer.whole())


class _ChatAnswer:
    """The answer to one chat, as a whole or as a stream."""

    def __init__(
        self, request: ChatRequest, model: Model, generation: Generation, request_id: str
    ) -> None:
        self._request = request
        self._model = model
        self._generation = generation
        self._head = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model.name,
        }
        self._choices: dict[int, _Choice] = {}

    async def whole(self) -> dict[str, Any]:
        """Return the complete answer."""
        async for batch in self._generation.batches():
            for _, response in batch:
                choice = self._choice(response)
                choice.logprobs += self._logprobs(response)
                for part in self._read(choice, response):
                    _add(choice, part)
        choices = [self._message(index, each) for index, each in sorted(self._choices.items())]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def stream(self, exchange: Exchange) -> None:
        """Send the answer as it comes."""
        delivery = self._request.delivery
        head = {**self._head, "object": "chat.completion.chunk"}
        chunks = Chunks(head, has_usage=delivery.has_usage)
        async for batch in self._generation.batches():
            events = "".join(
                chunks.chunk(each) for _, response in batch for each in self._deltas(response)
            )
            if events:
                await exchange.send_events(json_bytes(events))
        last = chunks.usage(self._usage()).encode() if delivery.has_usage else b""
        await exchange.end_events(last + DONE)

    def _deltas(self, response: inference_pb2.GenerateResponse) -> Iterable[str]:
        """Yield the choices of a response's chunks, as JSON."""
        index = response.choice
        if index not in self._choices:
            yield _delta(index, '"role":"assistant","content":""')
        choice = self._choice(response)
        logprobs = "null"
        if self._request.has_logprobs and (found := self._logprobs(response)):
            logprobs = f'{{"content":{compact(found)},"refusal":null}}'
        if choice.reader.is_plain and not response.finish_reason:  # as most are
            if response.text or logprobs != "null":
                yield _delta(index, f'"content":{quoted(response.text)}', logprobs)
            return
        for part in self._read(choice, response):
            yield _delta(index, _part_json(part), logprobs)
            logprobs = "null"  # they are told once
        if logprobs != "null":
            yield _delta(index, "", logprobs)
        if choice.finish_reason:
            yield _delta(index, "", finish=quoted(choice.finish_reason))

    def _read(self, choice: _Choice, response: inference_pb2.GenerateResponse) -> list[Part]:
        parts = choice.reader.push(response.text, len(response.token_ids) // TOKEN_BYTES)
        if response.finish_reason:
            parts += choice.reader.finish()
            reason = FINISH_REASONS[response.finish_reason]
            # For a function that the client named, OpenAI reports "stop".
            is_call = choice.reader.has_calls and self._request.tools.only is None
            choice.finish_reason = "tool_calls" if is_call and reason == "stop" else reason
        return parts

    def _choice(self, response: inference_pb2.GenerateResponse) -> _Choice:
        choice = self._choices.get(response.choice)
        if choice is None:
            reader = AnswerText(
                self._model,
                begins_in_reasoning=response.begins_in_reasoning,
                tools=self._request.tools.functions,
                is_parallel=self._request.is_parallel,
            )
            choice = self._choices[response.choice] = _Choice(reader)
        return choice

    def _logprobs(self, response: inference_pb2.GenerateResponse) -> list[dict[str, Any]]:
        if not self._request.has_logprobs:
            return []
        is_stop = FINISH_REASONS.get(response.finish_reason) == "stop"
        drawn = drawn_tokens(response, self._request.stop, is_stop=is_stop)
        return chat_logprobs(drawn, self._generation.texts)

    def _message(self, index: int, choice: _Choice) -> dict[str, Any]:
        content = "".join(choice.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not choice.calls else None,
            "refusal": None,
        }
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if choice.calls:
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": "".join(arguments)},
                }
                for call_id, name, arguments in choice.calls
            ]
        logprobs = {"content": choice.logprobs, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs if self._request.has_logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _usage(self) -> dict[str, Any]:
        usage = usage_json(self._generation.counts)
        if self._model.has_reasoning:
            count = sum(each.reader.num_reasoning_tokens for each in self._choices.values())
            usage["completion_tokens_details"] = {"reasoning_tokens": count}
        return usage


def _delta(index: int, delta: str, logprobs: str = "null", finish: str = "null") -> str:
    return f'{{"index":{index},"delta":{{{delta}}},"logprobs":{logprobs},"finish_reason":{finish}}}'


def _part_json(part: Part) -> str:
    match part:
        case Content(text):
            return f'"content":{quoted(text)}'
        case Reasoning(text):
            return f'"reasoning_content":{quoted(text)}'
        case CallBegins(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return f'"tool_calls":[{compact(call)}]'
        case CallArguments(index, text):
            return f'"tool_calls":[{{"index":{index},"function":{{"arguments":{quoted(text)}}}}}]'


def _add(choice: _Choice, part: Part) -> None:
    match part:
        case Content(text):
            choice.content.append(text)
        case Reasoning(text):
            choice.reasoning.append(text)
        case CallBegins(_, call_id, name):
            choice.calls.append((call_id, name, []))
        case CallArguments(index, text):
            choice.calls[index][2].append(text)
