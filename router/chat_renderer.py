"""Renders chats in child processes, so that a template can harm only its own process."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from observability.logs import fields
from router.chat_template import ChatTemplate
from router.child_pool import Answer, ChildLimits, ChildPool
from router.errors import (
    ChatTemplateError,
    ChildLimit,
    RefusedByTemplate,
    RenderingTooLong,
    TemplateLimit,
    WrongTools,
)
from router.tenants.tenant import NO_TENANT, TenantRules

logger = logging.getLogger(__name__)

BYTES_PER_CHAR = 6  # the most in JSON, of a control character
ANSWER_BYTES = 8192  # most bytes of an answer without text
PROBE = ({"role": "user", "content": "Hello"},)

Messages = Sequence[Mapping[str, Any]]


class ChatRenderer(Protocol):
    """Turns chats into prompt texts."""

    async def start(self) -> None:
        """Get ready; raise ChatTemplateError if the template cannot be used."""
        ...

    async def render(
        self,
        messages: Messages,
        tools_json: str = "",
        *,
        add_generation_prompt: bool = True,
        tenant: TenantRules = NO_TENANT,
    ) -> str:
        """Render a chat of a tenant, as ChatTemplate does; also raises Overloaded."""
        ...

    async def close(self) -> None:
        """End; no rendering may be under way."""
        ...


def check_template(template: ChatTemplate) -> None:
    """Start a child with the template and render a small chat; call it outside an event loop.

    Raises:
        ChatTemplateError: The template cannot be compiled, or exceeds a limit.
    """

    async def check() -> None:
        renderer = ChildRenderer(template, num_children=1)
        try:
            await renderer.start()
        finally:
            await renderer.close()

    asyncio.run(check())


class ChildRenderer:
    """Implements ChatRenderer with a few warm children."""

    def __init__(
        self, template: ChatTemplate, *, num_children: int = 2, limits: ChildLimits | None = None
    ) -> None:
        self._pool = ChildPool(
            "router.chat_child",
            lambda: {
                "source": template.source,
                "special_tokens": template.special_tokens,
                "max_chars": template.max_chars,
            },
            check_ready=_check,
            num_children=num_children,
            limits=limits or ChildLimits(),
            max_answer_bytes=ANSWER_BYTES + BYTES_PER_CHAR * template.max_chars,
            busy="chats wait to be rendered",
        )

    async def start(self) -> None:
        try:
            await self._pool.start()
        except ChildLimit as limit:
            raise TemplateLimit(str(limit)) from None
        try:
            await self.render(PROBE)
        except RefusedByTemplate:
            return  # it wants another chat
        except TemplateLimit:
            raise
        except ChatTemplateError as error:
            logger.warning("chat_template_failed", extra=fields(error=str(error)))

    async def render(
        self,
        messages: Messages,
        tools_json: str = "",
        *,
        add_generation_prompt: bool = True,
        tenant: TenantRules = NO_TENANT,
    ) -> str:
        try:
            chat = {
                "messages": list(messages),
                "tools_json": tools_json,
                "add_generation_prompt": add_generation_prompt,
            }
            answer = await self._pool.ask(chat, tenant)
        except ChildLimit as limit:
            raise TemplateLimit(str(limit)) from None
        _check(answer)
        return answer["text"]

    async def close(self) -> None:
        await self._pool.close()


def _check(answer: Answer) -> None:
    if "tools" in answer:
        raise WrongTools(answer["tools"])
    if "refused" in answer:
        raise RefusedByTemplate(answer["refused"])
    if "too_long" in answer:
        raise RenderingTooLong(answer["too_long"])
    if "error" in answer:
        raise ChatTemplateError(answer["error"])
