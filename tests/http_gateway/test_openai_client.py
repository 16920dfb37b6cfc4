"""OpenAI's own client against a gateway before a real router, with and without streaming."""

import asyncio
from functools import partial

import openai
import pytest

from tests.http_gateway.conftest import openai as client_of
from tests.http_gateway.parrot import parrot, write_folder
from tests.http_gateway.serving import gateway, real_router

SAID = "the quick brown fox, 日本語 😀"


def ask(text=SAID, **options):
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "max_tokens": 200, **options}


def collected(stream):
    """The text of each choice, the finish reasons, and the last usage of a stream of chunks."""
    texts, reasons, usage = {}, {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            assert choice.index not in reasons, "nothing follows the end of a choice"
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


def logprobs_of(chunks, index):
    return [
        token
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == index and choice.logprobs
        for token in choice.logprobs.content
    ]


# Chats


def test_a_chat_is_answered_as_a_whole(client):
    answer = client.chat.completions.create(**ask())

    [choice] = answer.choices
    assert choice.message.content == SAID
    assert choice.message.role == "assistant"
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 4
    assert answer._request_id in answer.id


async def streamed_by_the_async_client(client, **options):
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key="x", max_retries=0) as other:
        stream = await other.chat.completions.create(**options, stream=True)
        return [chunk async for chunk in stream]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_chat_is_streamed_with_its_usage_at_the_end(client, is_async):
    whole = client.chat.completions.create(**ask())
    options = ask(stream_options={"include_usage": True})
    if is_async:
        chunks = asyncio.run(streamed_by_the_async_client(client, **options))
    else:
        chunks = list(client.chat.completions.create(**options, stream=True))

    texts, reasons, usage = collected(chunks)
    assert texts == {0: SAID}
    assert reasons == {0: "stop"}
    assert usage == whole.usage
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert {each.id for each in chunks} == {chunks[0].id}
    assert {each.object for each in chunks} == {"chat.completion.chunk"}
    assert len(chunks) > 10, "tokens come one by one"


def test_a_stream_has_no_usage_unless_asked_for(client):
    _, _, usage = collected(client.chat.completions.create(**ask(), stream=True))

    assert usage is None


def test_max_tokens_end_an_answer_by_both_of_its_names(client):
    for name in ("max_tokens", "max_completion_tokens"):
        request = {**ask(), name: 3}
        if name != "max_tokens":
            del request["max_tokens"]
        answer = client.chat.completions.create(**request)

        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("stop", ["fox", ["never", "fox"]])
def test_a_stop_string_ends_an_answer_and_is_no_part_of_it(client, stop):
    answer = client.chat.completions.create(**ask(stop=stop))

    assert answer.choices[0].message.content == "the quick brown "
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("is_stream", [False, True])
def test_several_choices_come_side_by_side(client, is_stream):
    answer = client.chat.completions.create(**ask(n=3), stream=is_stream)

    if is_stream:
        texts, reasons, _ = collected(answer)
    else:
        texts = {each.index: each.message.content for each in answer.choices}
        reasons = {each.index: each.finish_reason for each in answer.choices}
    assert texts == dict.fromkeys(range(3), SAID)
    assert reasons == dict.fromkeys(range(3), "stop")


def test_an_event_of_several_tokens_says_all_that_their_own_would(client, gathering_client):
    options = {
        "stop": ["日"],
        "n": 2,
        "logprobs": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    alone = list(client.chat.completions.create(**ask(**options)))
    together = list(gathering_client.chat.completions.create(**ask(**options)))

    assert len(together) < len(alone) / 2
    texts, reasons, usage = collected(together)
    assert (texts, reasons, usage) == collected(alone)
    assert texts == dict.fromkeys(range(2), "the quick brown fox, ")
    assert reasons == dict.fromkeys(range(2), "stop")
    assert logprobs_of(together, 1) == logprobs_of(alone, 1)


@pytest.mark.parametrize("is_stream", [False, True])
def test_log_probabilities_come_with_each_token_but_the_end(client, is_stream):
    answer = client.chat.completions.create(
        **ask("the fox"), logprobs=True, top_logprobs=3, stream=is_stream
    )

    found = logprobs_of(answer, 0) if is_stream else answer.choices[0].logprobs.content
    assert "".join(each.token for each in found) == "the fox"
    assert all(bytes(each.bytes).decode() == each.token for each in found)
    assert {each.logprob for each in found} == {-0.5}
    assert [len(each.top_logprobs) for each in found] == [3] * len(found)
    assert found[0].top_logprobs[0].token == found[0].token
    assert found[0].top_logprobs[2].logprob == -9999, "JSON has no infinity"


def test_all_sampling_parameters_are_passed_on(client, plain):
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "seed": -1,
    }
    further = {
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [9],
        "skip_special_tokens": False,
    }
    seen = []
    with_worker = plain.backend.dispatcher
    submit = with_worker._attempt

    def watched(stream, *rest):
        seen.append(stream.generation.request.sampling)
        submit(stream, *rest)

    with_worker._attempt = watched
    try:
        client.chat.completions.create(**ask(), **options, extra_body=further)
        client.chat.completions.create(**ask(), extra_body={"top_k": -1, "min_p": None})
    finally:
        with_worker._attempt = submit

    sampling, unset = seen
    assert sampling.seed == 2**64 - 1
    for name, value in {**options, **further}.items():
        if name not in ("seed", "stop_token_ids"):
            assert getattr(sampling, name) == pytest.approx(value), name
    assert sampling.stop_token_ids == (9,)
    assert (unset.top_k, unset.min_p, unset.temperature) == (0, 0.0, 1.0)


def test_fields_of_openai_that_change_nothing_here_are_taken(client):
    answer = client.chat.completions.create(
        **ask("hi"),
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        response_format={"type": "text"},
        logit_bias={},
        modalities=["text"],
        parallel_tool_calls=True,
        tool_choice="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        extra_body={"reasoning_effort": None},
    )

    assert answer.choices[0].message.content == "hi"


def test_messages_of_all_roles_and_of_parts_reach_the_template(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b", "refusal": None},
            {
                "role": "user",
                "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}],
                "name": "ann",
            },
        ],
    )

    assert answer.choices[0].message.content == "cd"


# Completions


def test_a_prompt_is_continued(client):
    answer = client.completions.create(model="tiny", prompt="[user]one two", max_tokens=50)

    assert answer.choices[0].text == "one two"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "text_completion"
    assert client.completions.create(model="tiny", prompt="x" * 99).usage.completion_tokens == 16


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_batch_of_prompts_with_choices_is_numbered_in_order(client, is_stream):
    prompts = ["[user]one", "[user]two two", "[user]three"]
    answer = client.completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=50, stream=is_stream
    )

    if is_stream:
        texts, reasons, _ = collected(answer)
    else:
        texts = {each.index: each.text for each in answer.choices}
        reasons = {each.index: each.finish_reason for each in answer.choices}
        assert answer.usage.prompt_tokens > 20
    assert [texts[i] for i in range(6)] == ["one", "one", "two two", "two two", "three", "three"]
    assert reasons == dict.fromkeys(range(6), "stop")


@pytest.mark.parametrize("is_batch", [False, True])
def test_prompts_may_be_token_ids_and_echoed(client, is_batch):
    ids = client.post("/../tokenize", body={"prompt": "[user]the fox"}, cast_to=object)["tokens"]

    answer = client.completions.create(
        model="tiny", prompt=[ids, ids] if is_batch else ids, max_tokens=50, echo=True
    )
    streamed = client.completions.create(
        model="tiny", prompt="[user]x", max_tokens=50, echo=True, stream=True
    )

    expected = "<|begin|>[user]the foxthe fox"
    assert [each.text for each in answer.choices] == [expected] * (2 if is_batch else 1)
    assert collected(streamed)[0] == {0: "[user]xx"}


@pytest.mark.parametrize("is_stream", [False, True])
def test_completions_have_log_probabilities_by_offset(client, is_stream):
    answer = client.completions.create(
        model="tiny", prompt="[user]the fox", max_tokens=50, logprobs=2, stream=is_stream
    )

    parts = list(answer) if is_stream else [answer]
    found = [each.choices[0].logprobs for each in parts if each.choices[0].logprobs]
    tokens = [token for each in found for token in each.tokens]
    offsets = [offset for each in found for offset in each.text_offset]
    assert "".join(tokens) == "the fox"
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
    assert all(len(top) == 2 for each in found for top in each.top_logprobs)
    assert all(value == -0.5 for each in found for value in each.token_logprobs)


# Responses


def test_a_response_is_created(client):
    response = client.responses.create(
        model="tiny",
        instructions="be brief",
        input=SAID,
        max_output_tokens=100,
        metadata={"a": "b"},
    )

    assert response.output_text == SAID
    assert response.status == "completed"
    assert response.instructions == "be brief"
    assert response.metadata == {"a": "b"}
    assert response.usage.input_tokens_details.cached_tokens == 4
    assert response.incomplete_details is None
    assert response.store is False


def test_a_response_that_ends_early_says_why(client):
    response = client.responses.create(model="tiny", input=SAID, max_output_tokens=3)

    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"


def test_a_response_is_streamed_as_the_events_of_the_api(client):
    with client.responses.stream(model="tiny", input=SAID) as stream:
        events = list(stream)
        final = stream.get_final_response()

    kinds = [each.type for each in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == SAID
    assert final.output_text == SAID
    assert final.usage.output_tokens == final.usage.total_tokens - final.usage.input_tokens


def test_a_conversation_goes_on_from_the_output_of_a_response(client):
    history = [{"role": "user", "content": "one"}]
    first = client.responses.create(model="tiny", input=history)
    history += [each.model_dump(exclude_none=True) for each in first.output]
    history.append({"role": "user", "content": [{"type": "input_text", "text": "two"}]})

    assert client.responses.create(model="tiny", input=history).output_text == "two"


def test_responses_have_log_probabilities_if_included(client):
    asked = {
        "model": "tiny",
        "input": "fox 😀!",  # some tokens make no text until others come
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
    }
    response = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))

    logprobs = response.output[0].content[0].logprobs
    assert logprobs[0].token in "fox"
    assert len(logprobs) == response.usage.output_tokens - 1, "all but the end token"
    assert all(len(each.top_logprobs) == 1 for each in logprobs)
    deltas = [each for each in events if each.type == "response.output_text.delta"]
    assert sum(len(each.logprobs) for each in deltas) == len(logprobs)


# Models and tokens


def test_models_are_listed_and_shown(client):
    [model] = client.models.list().data

    assert model == client.models.retrieve("tiny")
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "pagewire")
    assert model.max_model_len == 4096
    assert model.sampling_defaults["temperature"] == 1.0
    assert model.sampling_defaults["top_k"] == 0
    with pytest.raises(openai.NotFoundError, match="allowed: 'tiny'"):
        client.models.retrieve("org/other")


def test_tokenize_and_detokenize_are_inverse(client):
    def post(path, **body):
        return client.post(f"/../{path}", body=body, cast_to=object)

    text = post("tokenize", model="tiny", prompt="the fox 😀", return_token_strs=True)
    assert text["count"] == len(text["tokens"]) == len(text["token_strs"])
    assert text["max_model_len"] == 4096
    assert post("detokenize", tokens=text["tokens"]) == {"prompt": "<|begin|>the fox 😀"}
    assert text["token_strs"][0] == "<|begin|>"
    chat = post("tokenize", messages=[{"role": "user", "content": "the fox"}])
    assert chat["token_strs"] is None
    assert post("detokenize", tokens=chat["tokens"])["prompt"] == "[user]the fox[assistant]"


def test_texts_of_more_tokens_than_the_context_holds_can_be_shown(tmp_path):
    folder = write_folder(tmp_path / "small")
    small = parrot(folder, max_context_tokens=60)
    with gateway(lambda: real_router(small, folder), stream_interval_s=1.0) as served:
        client = client_of(served)
        prompt = "the quick brown fox " * 10
        body = {"prompt": prompt, "add_special_tokens": False, "return_token_strs": True}
        shown = client.post("/../tokenize", body=body, cast_to=object)
        chat = ask(logprobs=True, top_logprobs=20, stream=True)
        chunks = list(client.chat.completions.create(**chat))

    named = [logprobs for each in chunks if (logprobs := logprobs_of([each], 0))]
    assert len(named) == 2, "the first token comes at once, the others gather"
    assert len({top.token for each in named[1] for top in each.top_logprobs}) > 60
    assert shown["count"] > 60
    assert "".join(shown["token_strs"]) == prompt


def test_tokenize_ends_a_prompt_as_asked(client):
    def text_of(**body):
        tokens = client.post("/../tokenize", body=body, cast_to=object)["tokens"]
        return client.post("/../detokenize", body={"tokens": tokens}, cast_to=object)["prompt"]

    chat = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "runs"}]
    whole = "[user]the fox[assistant]runs"
    assert text_of(prompt="the fox", add_special_tokens=False) == "the fox"
    assert text_of(messages=chat, add_special_tokens=True) == f"<|begin|>{whole}[assistant]"
    assert text_of(messages=chat, add_generation_prompt=False) == whole
    for options in ({}, {"add_generation_prompt": False}):
        assert text_of(messages=chat, continue_final_message=True, **options) == whole
    with pytest.raises(openai.BadRequestError) as refused:
        text_of(messages=chat, continue_final_message=True, add_generation_prompt=True)
    assert refused.value.param == "add_generation_prompt"
    with pytest.raises(openai.BadRequestError) as refused:
        text_of(prompt="x", continue_final_message=True)
    assert refused.value.param == "continue_final_message"


# Errors


@pytest.mark.parametrize(
    ("options", "kind", "param", "words"),
    [
        ({"model": "other"}, openai.NotFoundError, "model", "found 'other'; allowed: 'tiny'"),
        ({"temperature": -1}, openai.BadRequestError, "temperature", "found -1"),
        ({"top_p": 1.5}, openai.BadRequestError, "top_p", "above 0, up to 1"),
        ({"n": 65}, openai.BadRequestError, "n", "1 to 64"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens", "found 0"),
        ({"stop": ["a", ""]}, openai.BadRequestError, "stop[1]", "1 to 1024 characters"),
        ({"messages": []}, openai.BadRequestError, "messages", "at least one message"),
        (
            {"extra_body": {"foo": 1}},
            openai.BadRequestError,
            "foo",
            "foo: found an unknown parameter; allowed: ",
        ),
    ],
)
def test_wrong_requests_raise_the_clients_own_errors(client, options, kind, param, words):
    with pytest.raises(kind) as refused:
        client.chat.completions.create(**{**ask(), **options})

    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"
    assert words in refused.value.message


def test_a_prompt_beyond_the_context_has_the_code_that_programs_look_for(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt=[1] * 5000)

    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("num_chars", [4096 * 32, 10_000_000])  # fewer than that are tokenized
def test_a_text_too_long_to_tokenize_has_that_code_too(client, num_chars):
    text = "x" * num_chars
    for call, param in (
        (lambda: client.completions.create(model="tiny", prompt=text + "x"), "prompt"),
        (lambda: client.chat.completions.create(**ask(text)), "messages"),
        (lambda: client.responses.create(model="tiny", input=text), "input"),
        (
            lambda: client.post("/../tokenize", body={"prompt": text + "x"}, cast_to=object),
            "prompt",
        ),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            call()

        assert refused.value.code == "context_length_exceeded", refused.value.message
        assert refused.value.param == param


def test_a_chat_that_only_its_template_makes_too_long_has_that_code_too(tmp_path):
    folder = write_folder(tmp_path)
    backend = partial(real_router, parrot(folder), folder, max_prompt_chars=50)
    with (
        gateway(backend) as served,
        pytest.raises(openai.BadRequestError, match="template wrote more than 50") as refused,
    ):
        client_of(served).chat.completions.create(**ask("x" * (50 - len("user"))))

    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("max_tokens", [7, 2**32 - 1])
def test_an_answer_of_more_tokens_than_fit_ends_where_the_context_ends(client, max_tokens):
    prompt = [1] * 4090  # of 4,096
    text = client.completions.create(model="tiny", prompt=prompt, max_tokens=max_tokens)

    assert text.choices[0].finish_reason == "length"
    assert (text.usage.completion_tokens, text.usage.total_tokens) == (6, 4096)


def test_of_a_batch_the_wrong_prompt_is_named(client):
    for prompts, param in (
        ([[1], [2, 500]], "prompt[1][1]"),
        (["a", ""], "prompt[1]"),
        ([[1], [2] * 5000], "prompt[1]"),
        ([[1], [True]], "prompt[1][0]"),
        ([1, "x"], "prompt[1]"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="tiny", prompt=prompts)
        assert refused.value.param == param
