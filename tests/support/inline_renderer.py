"""Renders chats at once, without a child process: for virtual time."""

from collections.abc import Mapping, Sequence
from typing import Any

from router.chat_template import ChatTemplate
from router.tenants.tenant import NO_TENANT, TenantRules


class InlineRenderer:
    """Implements router.chat_renderer.ChatRenderer."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    async def start(self) -> None:
        self._template.compile()

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools_json: str = "",
        *,
        add_generation_prompt: bool = True,
        tenant: TenantRules = NO_TENANT,
    ) -> str:
        return self._template.render(
            messages, tools_json, add_generation_prompt=add_generation_prompt
        )

    async def close(self) -> None:
        pass
