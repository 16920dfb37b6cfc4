"""What a template tells of its model's answers, and what a template is told of a chat."""

import asyncio
import json
from typing import Any

import pytest

from router.chat_format import ToolCallFormat, begins_in_reasoning, has_reasoning, tool_call_format
from router.chat_template import ChatTemplate
from router.errors import InvalidRequest
from router.model_folder import ModelFolder
from router.off_loop import OffLoop
from router.prompt import Chat, ChatMessage, PromptEncoder, ToolCall
from router.tenants.tenant import NO_TENANT
from router.tokenizer import Tokenizer
from tests.router.tokenizers_for_tests import byte_level
from tests.support.inline_renderer import InlineRenderer

LLAMA = '{% if tools %}{"name": f, "parameters": {}}{% endif %}<|start_header_id|>user'
QWEN = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> write <tool_call>\n"
    '{"name": f, "arguments": {}}\n</tool_call>{% endif %}<think>'
)
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LLAMA, ToolCallFormat.LLAMA3_JSON),
        (QWEN, ToolCallFormat.HERMES),
        (MISTRAL, ToolCallFormat.MISTRAL),
        ("", None),
        ("<|start_header_id|>{{ messages[0].content }}", None),  # Llama 3.0 knows no tools
        ("{% if tools %}<tool_call>\n<function=f>{% endif %}", None),  # Qwen3-Coder
        ("{% if tools %}<tool_call>f\n<arg_key>{% endif %}", None),  # GLM
        ("{{ tools }}", None),
    ],
)
def test_a_template_shows_the_format_of_tool_calls(
    template: str, expected: ToolCallFormat | None
) -> None:
    assert tool_call_format(template) is expected


def test_a_template_shows_whether_the_model_reasons_and_a_chat_whether_it_has_begun() -> None:
    assert has_reasoning(QWEN)
    assert not has_reasoning(LLAMA)
    assert begins_in_reasoning("<|assistant|><think>\n")
    assert not begins_in_reasoning("<|assistant|><think>\n\n</think>\n\n")
    assert not begins_in_reasoning("what does <think> mean?<|assistant|>")


def render(template: str, *messages: ChatMessage, tools_json: str = "") -> str:
    source = ChatTemplate(template, special_tokens={}, max_chars=10_000)
    encoder = PromptEncoder(
        folder=ModelFolder(tokenizer=Tokenizer(byte_level().to_str()), chat_template=source),
        renderer=InlineRenderer(source),
        off_loop=OffLoop(asyncio.to_thread, retry_delay_s=1.0),
    )
    chat = Chat("prompt.chat", lambda: messages, 0, 0, tools_json)
    text, _ = asyncio.run(encoder.encode(chat, len, max_chars=2_000, tenant=NO_TENANT))
    return text


def test_a_template_sees_every_field_of_a_message_that_is_given_and_no_other() -> None:
    call = ToolCall(id="c1", name="f", arguments='{"b": 1, "a": "é"}')
    messages = (
        ChatMessage(role="user", content="hi"),
        ChatMessage(role="assistant", reasoning_content="hm", tool_calls=(call,)),
        ChatMessage(role="tool", content="9", tool_call_id="c1", name="f"),
    )

    seen = json.loads(render("{{ messages | tojson }}", *messages))

    function = {"name": "f", "arguments": {"b": 1, "a": "é"}}
    assert seen == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "9", "tool_call_id": "c1", "name": "f"},
    ]


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [("", {}), ("{}", {}), ("[1]", "[1]"), ("{not json", "{not json"), ("[" * 5_00, "[" * 5_00)],
)
def test_arguments_that_are_no_object_stay_what_the_model_wrote(arguments: str, seen: Any) -> None:
    message = ChatMessage(role="assistant", tool_calls=(ToolCall(name="f", arguments=arguments),))

    rendered = render("{{ messages[0].tool_calls[0].function.arguments | tojson }}", message)

    assert json.loads(rendered) == seen


def test_a_template_sees_tools_as_they_were_sent() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": [None]}}}]
    user = ChatMessage(role="user", content="hi")

    text = render("{{ tools | tojson }}", user, tools_json=json.dumps(tools))

    assert text == json.dumps(tools), "in the order of the request"
    for nothing in ("", "[]"):
        assert render("{{ tools is none }}", user, tools_json=nothing) == "True"


@pytest.mark.parametrize(
    ("role", "named", "seen"),
    [
        *[(role, "", role) for role in ("system", "user", "assistant", "tool")],
        ("developer", "", "system"),
        ("developer", "{% if messages[0].role == 'developer' %}{% endif %}", "developer"),
        ("ipython", '{% if messages[0].role in ["tool", "ipython"] %}{% endif %}', "ipython"),
    ],
)
def test_a_template_gets_the_roles_of_openais_api_and_those_that_it_names(
    role: str, named: str, seen: str
) -> None:
    assert render(named + "{{ messages[0].role }}", ChatMessage(role=role)) == seen


@pytest.mark.parametrize("role", ["", "ipython", "User", "system ", "x" * 500])
def test_a_role_that_neither_api_nor_template_knows_is_refused(role: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt.chat.messages\[1\].role: found ") as refused:
        render("{{ messages[0]['role'] }}", ChatMessage(role="user"), ChatMessage(role=role))

    assert "'system', 'developer', 'user', 'assistant', 'tool', or a role" in refused.value.allowed


@pytest.mark.parametrize(
    ("message", "tools_json", "field"),
    [
        (ChatMessage(role="user"), "{", "prompt.chat.tools_json"),
        (ChatMessage(role="user"), '{"a": 1}', "prompt.chat.tools_json"),
        (ChatMessage(role="user"), "[1]", "prompt.chat.tools_json"),
        (ChatMessage(role="user"), "[" * 1_990, "prompt.chat.tools_json"),
        (ChatMessage(role="user"), "[]" + " " * 1_999, "prompt.chat"),
        (ChatMessage(role="user", name="x" * 2_001), "", "prompt.chat"),
        (
            ChatMessage(role="user", tool_calls=(ToolCall(name="f", arguments="x" * 2_000),)),
            "",
            "prompt.chat",
        ),
        (
            ChatMessage(role="assistant", tool_calls=(ToolCall(name="f"), ToolCall(name=""))),
            "",
            "prompt.chat.messages[0].tool_calls[1].name",
        ),
    ],
)
def test_what_a_template_cannot_be_given_is_refused_by_its_field(
    message: ChatMessage, tools_json: str, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        render("x", message, tools_json=tools_json)
    assert refused.value.field == field
