"""Prompts as front ends pass them, and their conversion to token ids."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pagewire.chat_arguments import ALLOWED_ROLES
from pagewire.protos.token_ids import pack_token_ids, unpack_token_ids
from router.chat_format import names_in, template_role
from router.chat_renderer import ChatRenderer
from router.errors import (
    ChatTemplateError,
    InvalidRequest,
    PromptTooLong,
    RefusedByTemplate,
    RenderingTooLong,
    WrongTools,
)
from router.model_folder import ModelFolder
from router.off_loop import OffLoop
from router.tenants.tenant import TenantRules
from router.validation import check_packed_token_ids, check_text, quote

T = TypeVar("T")

# Work of more than half a millisecond; a detour through a thread costs a third of one.
LARGE_TEXT_CHARS = 1000
LARGE_PACKED_BYTES = 16_384  # to check and hash
LARGE_CHAT_BYTES = 1000  # to read, of many small messages
LARGE_IDS_BYTES = 4000  # to turn into text
LARGE_PIECES_BYTES = 160  # ... and each separately


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text; usually the model's special tokens are added."""

    field: str  # its name in the request, for errors
    text: str
    adds_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Token ids, packed."""

    packed: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A function that the assistant called."""

    name: str
    arguments: str = ""  # as the model wrote them
    id: str = ""

    def for_template(self) -> dict[str, Any]:
        """Return the form that ChatTemplate takes."""
        function = {"name": self.name, "arguments": self.arguments}
        return {**_given(id=self.id), "type": "function", "function": function}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatMessage:
    """One message of a chat; empty fields do not exist for the template, but role and content."""

    role: str
    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    @property
    def num_chars(self) -> int:
        texts = (self.role, self.content, self.reasoning_content, self.tool_call_id, self.name)
        calls = (text for call in self.tool_calls for text in (call.id, call.name, call.arguments))
        return sum(map(len, texts)) + sum(map(len, calls))

    def for_template(self) -> dict[str, Any]:
        """Return the form that ChatTemplate takes, with the keys of transformers' documentation."""
        return {
            "role": self.role,
            "content": self.content,
            **_given(
                reasoning_content=self.reasoning_content,
                tool_calls=[call.for_template() for call in self.tool_calls],
                tool_call_id=self.tool_call_id,
                name=self.name,
            ),
        }


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the model's template, which usually writes the special tokens itself."""

    field: str
    read_messages: Callable[[], tuple[ChatMessage, ...]]
    num_bytes: int  # about their size; many small ones take long to read
    held_bytes: int  # of memory that they take until they are read; small ones take far more
    tools_json: str = ""  # functions that the model may call; empty: none
    adds_special_tokens: bool = False
    adds_generation_prompt: bool = True  # ends with the beginning of the assistant's answer
    continues_final: bool = False  # ends within the last message, whose text goes on


Prompt = Text | PackedTokens | Chat


class PromptEncoder:
    """Turns prompts into token ids, with the text side of a model."""

    def __init__(
        self, *, folder: ModelFolder, renderer: ChatRenderer | None, off_loop: OffLoop
    ) -> None:
        self._folder = folder
        self._renderer = renderer  # None: the model has no chat template
        self._off_loop = off_loop
        template = folder.chat_template
        self._names = names_in(template.source if template else "")

    def encode_at_once(
        self, prompt: Prompt, finish: Callable[[bytes], T], *, max_chars: int
    ) -> tuple[str, T] | None:
        """Do what `encode` does for a small prompt; None: it takes long, `encode` must do it.

        Raises:
            InvalidRequest: The prompt cannot become tokens.
        """
        if isinstance(prompt, PackedTokens):
            check_packed_token_ids("prompt.token_ids", prompt.packed)
            is_small = len(prompt.packed) <= LARGE_PACKED_BYTES
            return ("", finish(prompt.packed)) if is_small else None
        tokenizer = self._folder.tokenizer
        if tokenizer is None:
            raise InvalidRequest(prompt.field, "text", "token_ids: this router has no tokenizer")
        if isinstance(prompt, Chat):
            return None
        check_text(prompt.field, prompt.text, max_chars)
        if len(prompt.text) > LARGE_TEXT_CHARS:
            return None
        ids = tokenizer.encode(prompt.text, add_special_tokens=prompt.adds_special_tokens)
        return prompt.text, finish(pack_token_ids(ids))

    async def encode(
        self,
        prompt: Prompt,
        finish: Callable[[bytes], T],
        *,
        max_chars: int,
        tenant: TenantRules,
    ) -> tuple[str, T]:
        """Return the text of a prompt, "" for token ids, and the result of `finish` for its tokens.

        Args:
            prompt: As a front end hands it over.
            finish: Called with the packed token ids; for a large prompt in a thread.
            max_chars: The limit of a text, and of a chat with all its fields.
            tenant: In whose turns what takes long is done.

        Raises:
            InvalidRequest: The prompt cannot become tokens.
            Overloaded: Too many prompts wait to be rendered or tokenized.
        """
        encoded = self.encode_at_once(prompt, finish, max_chars=max_chars)
        if encoded is not None:
            return encoded
        if isinstance(prompt, PackedTokens):
            work = partial(finish, prompt.packed)
            return "", await self._off_loop.run(work, len(prompt.packed), tenant)
        tokenizer = self._folder.tokenizer
        assert tokenizer is not None, "a text was refused without one"
        adds_special_tokens = prompt.adds_special_tokens
        text = (
            prompt.text
            if isinstance(prompt, Text)
            else await self._render(prompt, max_chars, tenant)
        )
        if len(text) <= LARGE_TEXT_CHARS:
            ids = tokenizer.encode(text, add_special_tokens=adds_special_tokens)
            return text, finish(pack_token_ids(ids))

        def encode_large() -> T:
            ids = tokenizer.encode_unlocked(text, add_special_tokens=adds_special_tokens)
            return finish(pack_token_ids(ids))

        return text, await self._off_loop.run(encode_large, len(text), tenant)

    async def decode(
        self,
        packed: bytes,
        *,
        skip_special_tokens: bool,
        with_pieces: bool,
        tenant: TenantRules,
    ) -> tuple[str, list[str]]:
        """Return the text of packed token ids and, if requested, the text of each one.

        Raises:
            InvalidRequest: The router has no tokenizer.
            Overloaded: Too many prompts wait to be tokenized.
        """
        tokenizer = self._folder.tokenizer
        if tokenizer is None:
            raise InvalidRequest("token_ids", "ids", "none: this router has no tokenizer")

        def work() -> tuple[str, list[str]]:
            token_ids = unpack_token_ids(packed)
            pieces = {each: tokenizer.piece(each) for each in set(token_ids if with_pieces else ())}
            text = tokenizer.decode_unlocked(token_ids, skip_special_tokens=skip_special_tokens)
            return text, [pieces[each] for each in token_ids] if with_pieces else []

        if len(packed) <= (LARGE_PIECES_BYTES if with_pieces else LARGE_IDS_BYTES):
            return work()
        return await self._off_loop.run(work, len(packed), tenant)

    async def _render(self, prompt: Chat, max_chars: int, tenant: TenantRules) -> str:
        if self._renderer is None:
            raise InvalidRequest(
                prompt.field, "a chat", "text or token_ids: the model has no chat template"
            )
        field = f"{prompt.field}.messages"

        def read() -> list[dict[str, Any]]:
            messages = prompt.read_messages()
            _check_chat(prompt, messages, self._names, max_chars)
            return [
                {**each.for_template(), "role": template_role(each.role, self._names)}
                for each in messages
            ]

        if prompt.num_bytes <= LARGE_CHAT_BYTES:
            messages = read()
        else:
            messages = await self._off_loop.run(read, prompt.held_bytes, tenant)
        try:
            text = await self._renderer.render(
                messages,
                prompt.tools_json,
                add_generation_prompt=prompt.adds_generation_prompt,
                tenant=tenant,
            )
        except WrongTools as wrong:
            raise InvalidRequest(
                f"{prompt.field}.tools_json", str(wrong), "a JSON array of objects"
            ) from wrong
        except RefusedByTemplate as refused:
            raise InvalidRequest(
                field, "messages that the template refuses", str(refused)
            ) from refused
        except ChatTemplateError as error:
            kind = PromptTooLong if isinstance(error, RenderingTooLong) else InvalidRequest
            raise kind(
                field, f"messages for which the model's template {error}", "other messages"
            ) from error
        if prompt.continues_final:
            return _within_final(text, f"{field}[{len(messages) - 1}]", messages[-1]["content"])
        return text


def _within_final(text: str, field: str, content: str) -> str:
    """Cut a rendering after the content of its last message, as transformers does."""
    shown = content if content in text else content.strip()  # many templates strip it
    at = text.rfind(shown) if shown else -1
    if at < 0:
        raise InvalidRequest(
            f"{field}.content", "a text that the template changes", "one that it keeps"
        )
    return text[: at + len(shown)]


def _check_chat(
    prompt: Chat, messages: Sequence[ChatMessage], names: frozenset[str], max_chars: int
) -> None:
    if not messages:
        raise InvalidRequest(f"{prompt.field}.messages", "none", "at least one message")
    num_chars = len(prompt.tools_json) + sum(each.num_chars for each in messages)
    if num_chars > max_chars:
        raise PromptTooLong(prompt.field, f"{num_chars} characters", f"at most {max_chars}")
    for refusal in _wrong_names(prompt.field, messages, names):
        raise refusal


def _wrong_names(
    chat: str, messages: Sequence[ChatMessage], names: frozenset[str]
) -> Iterator[InvalidRequest]:
    """Find unknown roles, and functions without a name."""
    for index, message in enumerate(messages):
        field = f"{chat}.messages[{index}]"
        if template_role(message.role, names) is None:
            found = quote(message.role) if message.role else "none"
            yield InvalidRequest(f"{field}.role", found, ALLOWED_ROLES)
        for number, call in enumerate(message.tool_calls):
            if not call.name:
                name = f"{field}.tool_calls[{number}].name"
                yield InvalidRequest(name, "an empty name", "the name of the called function")


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}
