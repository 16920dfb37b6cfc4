"""Chooses how to parse the text of an answer, from the router's report on the model's template."""

import secrets
import string
from collections.abc import Collection

from http_gateway.parts import CallBegins, Content, Part, PartReader
from http_gateway.reasoning import ReasoningReader
from http_gateway.tool_calls.hermes import HermesReader
from http_gateway.tool_calls.llama import LlamaReader
from http_gateway.tool_calls.mistral import MistralReader
from pagewire import Model

# Formats whose markers are special tokens, which must stay in the text to be seen.
SPECIAL_MARKERS = {"llama3_json", "mistral"}
_LETTERS = string.ascii_letters + string.digits


class AnswerText:
    """Reads the text of one choice.

    Args:
        model: The model that answers.
        begins_in_reasoning: As the router reports for the prompt.
        tools: Names of the functions that the model may call; empty: none.
        is_parallel: Whether more than the first call counts.

    Attributes:
        num_reasoning_tokens: Pushed tokens of reasoning. Tokens that come together with the end of
            the reasoning count in proportion to their text.
    """

    def __init__(
        self,
        model: Model,
        *,
        begins_in_reasoning: bool,
        tools: Collection[str],
        is_parallel: bool,
    ) -> None:
        self.has_calls = False
        self.num_reasoning_tokens = 0
        self._is_parallel = is_parallel
        calls = _call_reader(model, tools) if tools else None
        self._reasoning: ReasoningReader | None = None
        if model.has_reasoning:
            self._reasoning = ReasoningReader(is_begun=begins_in_reasoning, answer=calls)
        self._reader: PartReader | None = self._reasoning or calls

    @property
    def is_plain(self) -> bool:
        """Whether all further text is content as it is."""
        return self._reader is None

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning has begun, and the answer has not."""
        return self._reasoning is not None and self._reasoning.has_begun

    def push(self, text: str, num_tokens: int = 0) -> list[Part]:
        """Return the parts that are certain after more text, of this many tokens."""
        if self._reader is None:
            return [Content(text)] if text else []
        is_reasoning = self._reasoning is not None and self._reasoning.is_reasoning
        parts = self._reader.push(text)
        if is_reasoning:
            content_len = sum(len(each.text) for each in parts if isinstance(each, Content))
            share = 1 - min(content_len / len(text), 1) if text else 1
            self.num_reasoning_tokens += round(share * num_tokens)
        return self._counted(parts)

    def finish(self) -> list[Part]:
        """Return the text that was held back."""
        return self._counted(self._reader.finish()) if self._reader else []

    def _counted(self, parts: list[Part]) -> list[Part]:
        self.has_calls |= any(isinstance(each, CallBegins) for each in parts)
        if self._is_parallel:
            return parts
        return [each for each in parts if not getattr(each, "index", 0)]


def _call_reader(model: Model, tools: Collection[str]) -> PartReader | None:
    match model.tool_call_format:
        case "hermes":
            return HermesReader(_new_id)
        case "llama3_json":
            return LlamaReader(_new_id, tools)
        case "mistral":
            return MistralReader(_short_id)
        case _:
            return None


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Return an id in the form of Mistral's templates: nine letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))
