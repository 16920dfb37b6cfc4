"""The process in which a chat template runs; router/chat_renderer.py starts it.

It receives the template, and answers each chat with one of

    {"text": ...}      the rendering
    {"refused": ...}   the template does not accept these messages
    {"tools": ...}     the tools are invalid: what was found
    {"too_long": ...}  the template wrote more than a prompt may have
    {"error": ...}     the template failed
"""

from collections.abc import Callable
from typing import Any

from router.chat_template import ChatTemplate
from router.child_side import Answer, Work, serve
from router.errors import ChatTemplateError, RefusedByTemplate, RenderingTooLong, WrongTools

MAX_REASON_CHARS = 500


def main() -> None:
    """Serve the router."""
    serve(_make_work)


def _make_work(settings: Any) -> tuple[Callable[[], Answer], Work]:
    template = ChatTemplate(
        settings["source"],
        special_tokens=settings["special_tokens"],
        max_chars=settings["max_chars"],
    )
    return (
        lambda: _answered(lambda: _compile(template)),
        lambda chat: _answered(lambda: _render(template, chat)),
    )


def _answered(work: Callable[[], Answer]) -> Answer:
    try:
        return work()
    except WrongTools as wrong:
        return {"tools": str(wrong)[:MAX_REASON_CHARS]}
    except RefusedByTemplate as refused:
        return {"refused": str(refused)[:MAX_REASON_CHARS]}
    except RenderingTooLong as error:
        return {"too_long": str(error)}
    except ChatTemplateError as error:
        return {"error": str(error)[:MAX_REASON_CHARS]}


def _compile(template: ChatTemplate) -> Answer:
    template.compile()
    return {}


def _render(template: ChatTemplate, chat: dict[str, Any]) -> Answer:
    text = template.render(
        chat["messages"],
        chat["tools_json"],
        add_generation_prompt=chat["add_generation_prompt"],
    )
    return {"text": text}
