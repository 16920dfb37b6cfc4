"""Token ids to text through the public service: Detokenize, special tokens, tools, reasoning."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.protos import common_pb2, inference_pb2, worker_pb2
from pagewire.protos.token_ids import pack_token_ids, unpack_token_ids
from router.tokenizer import Tokenizer
from tests.router.scripted_worker import (
    EOS,
    STOP,
    ScriptedWorker,
    Session,
    delta,
    running_router,
)
from tests.router.tokenizers_for_tests import byte_fallback, byte_level
from tests.support.virtual_time import run_virtual

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    "{% if messages[-1].role != 'tool' %}<think>\n{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level().to_str())


def asking(*texts: str, **fields: Any) -> inference_pb2.DetokenizeRequest:
    ids = [each for text in texts for each in TOKENIZER.encode(text, add_special_tokens=True)]
    fields.setdefault("token_ids", pack_token_ids(ids))
    return inference_pb2.DetokenizeRequest(**fields)


TOKENIZER = Tokenizer(byte_level().to_str())


def test_detokenize_is_the_inverse_of_tokenize(model_dir: Path) -> None:
    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0"), model_dir=model_dir) as tested:
            detokenize = tested.stub.Detokenize

            assert (await detokenize(asking("the fox 😀"))).text == "<|begin|>the fox 😀"
            shown = await detokenize(asking("the fox 😀", skip_special_tokens=True))
            assert shown.text == "the fox 😀"
            assert not shown.pieces
            assert (await detokenize(asking())).text == ""
            pieces = (await detokenize(asking("the fox", with_pieces=True))).pieces
            assert "".join(pieces) == "<|begin|>the fox"

    run_virtual(main())


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (asking("x", model="another"), grpc.StatusCode.NOT_FOUND, "model"),
        (asking(token_ids=b"abc"), grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
        (
            asking(token_ids=pack_token_ids([1, 400])),
            grpc.StatusCode.INVALID_ARGUMENT,
            "token_ids[1]: found 400; allowed: 0 to 399",
        ),
        (
            asking(token_ids=pack_token_ids([1] * 513)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "token_ids: found 513 tokens; allowed: at most 512",
        ),
    ],
)
def test_what_cannot_be_detokenized_is_refused_by_its_field(
    model_dir: Path,
    request_: inference_pb2.DetokenizeRequest,
    code: grpc.StatusCode,
    field: str,
) -> None:
    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0"), model_dir=model_dir) as tested:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await tested.stub.Detokenize(request_)
            assert refused.value.code() is code
            assert (refused.value.details() or "").startswith(field)

    run_virtual(main())


def test_a_router_without_a_tokenizer_says_that_it_makes_no_text() -> None:
    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0")) as tested:
            with pytest.raises(grpc.aio.AioRpcError, match="has no tokenizer"):
                await tested.stub.Detokenize(asking("x"))

    run_virtual(main())


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_piece_keeps_the_blank_that_a_text_would_lose(make: Any) -> None:
    tokenizer = Tokenizer(make().to_str())
    ids = tokenizer.encode("the the quick", add_special_tokens=False)

    assert "".join(tokenizer.piece(each) for each in ids).lstrip() == "the the quick"
    assert tokenizer.piece(10**6) == ""


@pytest.mark.parametrize("skips", [False, True])
def test_text_made_without_the_interpreter_lock_is_equal(skips: bool) -> None:
    ids = TOKENIZER.encode("the quick brown fox 😀 " * 10, add_special_tokens=True)

    text = TOKENIZER.decode_unlocked(ids, skip_special_tokens=skips)

    assert text == TOKENIZER.decode(ids, skip_special_tokens=skips)


def test_special_tokens_stay_in_the_text_if_asked_for_except_the_end_token(
    model_dir: Path, tokenizer: Tokenizer
) -> None:
    ids = [*tokenizer.encode("a<|begin|>b", add_special_tokens=False), EOS]

    async def serve(session: Session, submit: worker_pb2.SubmitRequest) -> None:
        packed = pack_token_ids(ids)
        session.send(delta(submit, 0, 0, len(ids), token_ids=packed, finish_reason=STOP))

    async def main() -> None:
        worker = ScriptedWorker("decode-0", serve=serve)
        async with running_router(worker, model_dir=model_dir) as tested:
            texts = []
            for sampling in (
                common_pb2.SamplingParams(),
                common_pb2.SamplingParams(skip_special_tokens=True),
                common_pb2.SamplingParams(skip_special_tokens=False),
            ):
                request = inference_pb2.GenerateRequest(text="x", sampling=sampling)
                texts.append((await tested.generate(request=request)).text())

            assert texts == ["ab", "ab", "a<|begin|>b"]

    run_virtual(main())


def test_a_chat_with_tools_reaches_the_template_and_an_answer_says_where_it_begins(
    model_dir: Path,
) -> None:
    async def main() -> None:
        worker = ScriptedWorker("decode-0")
        async with running_router(worker, model_dir=model_dir) as tested:
            chat = inference_pb2.ChatPrompt(tools_json=json.dumps(TOOLS))
            chat.messages.add(role="user", content="hi")
            answer = await tested.generate(request=inference_pb2.GenerateRequest(chat=chat))

            [submit] = worker.submits
            prompt = TOKENIZER.decode(unpack_token_ids(submit.prompt_token_ids))
            assert prompt == f"{json.dumps(TOOLS)}<tool_call>[user]hi[assistant]<think>\n"
            assert all(message.begins_in_reasoning for message in answer.messages)

            chat.messages.add(role="tool", content="9", tool_call_id="c", name="f")
            answer = await tested.generate(request=inference_pb2.GenerateRequest(chat=chat))
            assert not any(message.begins_in_reasoning for message in answer.messages)
            answer = await tested.generate()
            assert not any(message.begins_in_reasoning for message in answer.messages)

    run_virtual(main())


def test_the_model_says_how_its_answers_are_to_be_read(model_dir: Path) -> None:
    async def main() -> None:
        request = inference_pb2.ListModelsRequest()
        async with running_router(ScriptedWorker("decode-0"), model_dir=model_dir) as tested:
            [model] = (await tested.stub.ListModels(request)).models
            assert model.tool_call_format == inference_pb2.TOOL_CALL_FORMAT_HERMES
            assert model.has_reasoning
        async with running_router(ScriptedWorker("decode-0")) as tested:
            [model] = (await tested.stub.ListModels(request)).models
            assert model.tool_call_format == inference_pb2.TOOL_CALL_FORMAT_UNSPECIFIED
            assert not model.has_reasoning

    run_virtual(main())
