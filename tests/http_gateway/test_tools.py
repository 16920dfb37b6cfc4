"""Tools and reasoning end to end: OpenAI's client, a real router and template, each format."""

import json

import openai
import pytest

from tests.http_gateway.conftest import openai as client_of
from tests.http_gateway.raw_http import exchange, request

FORMATS = ("hermes", "llama3_json", "mistral")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"tells the {name}",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "time")
]
CALLS = [("weather", '{"city": "Paris"}'), ("time", '{"city": "Rome"}')]
WRITTEN = {  # by the model
    "hermes": "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in CALLS
    ),
    "llama3_json": "<|python_tag|>"
    + "; ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in CALLS),
    "mistral": "[TOOL_CALLS]"
    + "[TOOL_CALLS]".join(f"{name}[ARGS]{arguments}" for name, arguments in CALLS),
}


def ask(text, **options):
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "max_tokens": 400, "tools": TOOLS, **options}


def called(message):
    return [(each.function.name, each.function.arguments) for each in message.tool_calls or ()]


@pytest.fixture(params=FORMATS)
def kind(request):
    return request.param


@pytest.fixture
def client(parrots, kind):
    return client_of(parrots(kind))


def test_calls_are_read_out_of_the_answer(client, kind):
    answer = client.chat.completions.create(**ask(WRITTEN[kind]))

    [choice] = answer.choices
    assert called(choice.message) == CALLS
    assert choice.message.content is None
    assert choice.finish_reason == "tool_calls"
    assert len({each.id for each in choice.message.tool_calls}) == 2


def test_calls_are_streamed_as_they_are_written(client, kind):
    deltas = [
        (choice.delta, choice.finish_reason)
        for chunk in client.chat.completions.create(**ask(WRITTEN[kind]), stream=True)
        for choice in chunk.choices
    ]

    calls = {}
    pieces = [call for delta, _ in deltas for call in delta.tool_calls or ()]
    for call in pieces:
        name, arguments = calls.setdefault(call.index, (call.function.name, ""))
        assert (call.id is None) == (call.function.name is None), "both come once, at first"
        calls[call.index] = (name, arguments + (call.function.arguments or ""))
    assert [calls[index] for index in sorted(calls)] == CALLS
    assert len(pieces) > 10, "arguments come in pieces"
    assert not any(delta.content for delta, _ in deltas)
    assert [reason for _, reason in deltas if reason] == ["tool_calls"]


def test_the_clients_own_helper_puts_streamed_calls_together(client, kind):
    with client.chat.completions.stream(**ask(WRITTEN[kind])) as stream:
        message = stream.get_final_completion().choices[0].message

    assert called(message) == CALLS


def test_an_answer_without_calls_stays_text(client):
    answer = client.chat.completions.create(**ask("plain text"))

    assert answer.choices[0].message.content == "plain text"
    assert answer.choices[0].finish_reason == "stop"


def test_results_go_back_to_the_model(client, kind):
    first = client.chat.completions.create(**ask(WRITTEN[kind]))
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": each.id, "content": f"result {index}"}
        for index, each in enumerate(message.tool_calls)
    ]

    answer = client.chat.completions.create(
        **ask("x", messages=[{"role": "user", "content": "x"}, message, *results])
    )

    # The parrot repeats the last message, behind which the template writes the id.
    assert answer.choices[0].message.content == f"result 1{message.tool_calls[1].id}"


def test_the_template_sees_tools_and_calls(client, parrots, kind):
    def prompt(**options):
        body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **options}
        tokens = client.post("/../tokenize", body=body, cast_to=object)["tokens"]
        return client.post("/../detokenize", body={"tokens": tokens}, cast_to=object)["prompt"]

    assert f"TOOLS{json.dumps(TOOLS)}[user]x" in prompt()
    assert "TOOLS" not in prompt(tool_choice="none")
    assert "TOOLS" not in prompt(tools=[])
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    shown = {**call, "function": {"name": "f", "arguments": {"a": "é"}}}
    assert f"[assistant]{json.dumps(shown, ensure_ascii=False)}" in prompt(messages=messages)


def test_no_calls_are_read_where_none_may_be_made(client, kind):
    written = WRITTEN["hermes"]
    answer = client.chat.completions.create(**ask(written, tool_choice="none"))

    assert answer.choices[0].message.content == written
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


def test_only_one_call_is_told_of_if_only_one_is_wanted(client, kind):
    request = ask(WRITTEN[kind], parallel_tool_calls=False)

    assert called(client.chat.completions.create(**request).choices[0].message) == CALLS[:1]


def test_an_answer_that_is_cut_in_a_call_says_so(client, kind):
    whole = client.chat.completions.create(**ask(WRITTEN[kind]))
    answer = client.chat.completions.create(
        **ask(WRITTEN[kind], max_tokens=whole.usage.completion_tokens - 8)
    )

    assert answer.choices[0].finish_reason == "length"


HALF_AN_EMOJI = {  # which UTF-8 does not have
    "a text of arguments": '<tool_call>{"name": "weather", "arguments": "\\ud83d"}</tool_call>',
    "arguments before the name": (
        '<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "weather"}</tool_call>'
    ),
}


@pytest.mark.parametrize("name", HALF_AN_EMOJI)
def test_half_an_emoji_in_a_call_is_passed_on_as_it_was_escaped(parrots, name):
    client, question = client_of(parrots("hermes")), ask(HALF_AN_EMOJI[name])
    whole = client.chat.completions.create(**question)
    chunks = list(client.chat.completions.create(**question, stream=True))

    [(_, arguments)] = called(whole.choices[0].message)
    assert "\ud83d" in arguments
    deltas = [call for each in chunks for call in each.choices[0].delta.tool_calls or ()]
    assert "".join(each.function.arguments for each in deltas) == arguments


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_response_repeats_half_an_emoji_of_its_request(parrots, is_stream):
    schema = {"type": "object", "description": "\ud83d"}
    tools = [{"type": "function", "name": "weather", "parameters": schema}]
    body = {"input": "hello", "tools": tools, "tool_choice": "none", "stream": is_stream}
    address = parrots("hermes").host_and_port
    answer = exchange(address, request("/v1/responses", json.dumps(body)))

    assert answer.status == 200, answer.body
    assert b"hello" in answer.body
    assert b"\\ud83d" in answer.body


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_number_in_a_tool_that_no_answer_could_repeat_is_refused(parrots, choice):
    tool = '{"type": "function", "name": "weather", "parameters": {"maximum": 1e400}}'
    body = f'{{"input": "hello", "tools": [{tool}], "tool_choice": "{choice}"}}'
    answer = exchange(parrots("hermes").host_and_port, request("/v1/responses", body))

    assert answer.status == 400
    assert "tools: found a value that is not JSON" in answer.error["message"]


@pytest.mark.parametrize("size", [0, 300_000], ids=["small", "large"])  # read in a thread
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_tool_that_is_too_deep_for_the_answer_is_refused(parrots, choice, size):
    address = parrots("hermes").host_and_port
    for depth in range(850, 1000, 3):
        schema = f'{{"a": {"[" * depth}{"]" * depth}}}'
        tool = f'{{"type": "function", "name": "weather", "parameters": {schema}}}'
        body = f'{{"input": "hello", "tools": [{tool}], "tool_choice": "{choice}"}}'
        answer = exchange(address, request("/v1/responses", body + " " * size))

        assert answer.status == 200 or "nested too deeply" in answer.error["message"]
    assert answer.status == 400


def test_a_response_has_calls_as_items(client, kind):
    tools = [{"type": "function", "strict": False, **each["function"]} for each in TOOLS]
    response = client.responses.create(model="tiny", input=WRITTEN[kind], tools=tools)

    assert [(each.type, each.name, each.arguments) for each in response.output] == [
        ("function_call", *call) for call in CALLS
    ]
    history = [{"role": "user", "content": "x"}]
    history += [each.model_dump(exclude_none=True) for each in response.output]
    for each in response.output:
        result = {"type": "function_call_output", "call_id": each.call_id, "output": each.name}
        history.append(result)
    answer = client.responses.create(model="tiny", input=history, tools=tools)
    assert answer.output_text == f"time{response.output[1].call_id}"


def test_a_streamed_response_has_events_for_calls(client, kind):
    tools = [{"type": "function", "strict": None, **each["function"]} for each in TOOLS]
    with client.responses.stream(model="tiny", input=WRITTEN[kind], tools=tools) as stream:
        events = list(stream)
        final = stream.get_final_response()

    assert [(each.name, each.arguments) for each in final.output] == CALLS
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [(each.output_index, each.arguments) for each in done] == [
        (index, arguments) for index, (_, arguments) in enumerate(CALLS)
    ]
    assert [each.sequence_number for each in events] == list(range(len(events)))


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name", "letters, digits"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "letters, digits",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "tools[0].function.strict",
            "unless tool_choice demands a call",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
            "tools[0].function.parameters",
            "an object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "extra": 1}}]},
            "tools[0].function.extra",
            "unknown parameter",
        ),
        ({"tools": ["f"]}, "tools[0]", "an object"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls", "true or false"),
    ],
)
def test_what_cannot_be_done_with_tools_is_refused_by_its_field(parrots, options, param, words):
    with pytest.raises(openai.BadRequestError) as refused:
        client_of(parrots("hermes")).chat.completions.create(**{**ask("x"), **options})

    assert refused.value.param == param
    assert words in refused.value.message


def test_a_model_whose_template_knows_no_tools_takes_none(parrots):
    with pytest.raises(openai.BadRequestError, match="no known format of calls") as refused:
        client_of(parrots("plain")).chat.completions.create(**ask("x"))

    assert refused.value.param == "tools"


# Reasoning

THOUGHT = "<think>\nlet me see\n</think>\n\nthe answer"


@pytest.fixture
def thinker(parrots):
    return client_of(parrots("reasoning"))


def reasoned(text, **options):
    return ask(text, tools=openai.NOT_GIVEN, **options)


def test_reasoning_is_a_field_of_its_own(thinker):
    answer = thinker.chat.completions.create(**reasoned(THOUGHT))

    message = answer.choices[0].message
    assert message.content == "the answer"
    assert message.reasoning_content == "let me see"
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.completion_tokens


def test_reasoning_is_streamed_before_the_answer(thinker):
    reasoning, content = "", ""
    for chunk in thinker.chat.completions.create(**reasoned(THOUGHT), stream=True):
        delta = chunk.choices[0].delta
        if more := getattr(delta, "reasoning_content", None):
            assert not content
            reasoning += more
        content += delta.content or ""

    assert (reasoning, content) == ("let me see", "the answer")


def test_an_answer_without_reasoning_has_no_field_for_it(thinker):
    message = thinker.chat.completions.create(**reasoned("hi")).choices[0].message

    assert message.content == "hi"
    assert not hasattr(message, "reasoning_content")


def test_reasoning_of_earlier_answers_goes_back_to_the_template(thinker):
    body = {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "y", "reasoning_content": "z"},
        ]
    }
    tokens = thinker.post("/../tokenize", body=body, cast_to=object)["tokens"]
    prompt = thinker.post("/../detokenize", body={"tokens": tokens}, cast_to=object)["prompt"]

    assert "[assistant]<think>z</think>y" in prompt


def test_a_response_has_reasoning_as_an_item(thinker):
    response = thinker.responses.create(model="tiny", input=THOUGHT)
    with thinker.responses.stream(model="tiny", input=THOUGHT) as stream:
        events = list(stream)

    reasoning, message = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content[0].text == "let me see"
    assert message.content[0].text == "the answer"
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    deltas = [each.delta for each in events if each.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "let me see"
    assert [e.output_index for e in events if e.type == "response.output_item.done"] == [0, 1]
    history = [{"role": "user", "content": "x"}]
    history += [each.model_dump(exclude_none=True) for each in response.output]
    history.append({"role": "user", "content": "z"})
    assert thinker.responses.create(model="tiny", input=history).output_text == "z"
