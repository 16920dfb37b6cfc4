"""The public service: texts, chats, errors as rich statuses, status of the cluster."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.protos import (
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from pagewire.protos.token_ids import pack_token_ids, unpack_token_ids
from router.config import RouterConfig
from router.reported_wait import PATIENCE_S
from router.router import Router
from router.tokenizer import Tokenizer
from tests.router.error_details import details
from tests.router.scripted_worker import (
    EOS,
    LENGTH,
    STOP,
    Answer,
    RouterUnderTest,
    ScriptedWorker,
    Session,
    running_router,
    tokens,
)
from tests.router.tokenizers_for_tests import byte_level
from tests.support.log_records import logged
from tests.support.virtual_time import run_virtual, wait_until

GenerateRequest = inference_pb2.GenerateRequest


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    byte_level().save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "chat_template": "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level().to_str())


def writes(tokenizer: Tokenizer, text: str, *, chunk: int = 1) -> Any:
    """A worker that answers with a text and then an end token."""

    async def serve(session: Session, submit: worker_pb2.SubmitRequest) -> None:
        ids = [*tokenizer.encode(text, add_special_tokens=False), EOS]
        for first in range(0, len(ids), chunk):
            await asyncio.sleep(0.01)
            if submit.request_id in session.cancelled:
                return
            part = ids[first : first + chunk]
            is_last = first + chunk >= len(ids)
            session.send(
                worker_pb2.TokenDelta(
                    request_id=submit.request_id,
                    attempt=submit.attempt,
                    choice=0,
                    first_index=first,
                    token_ids=pack_token_ids(part),
                    finish_reason=STOP if is_last else 0,
                )
            )

    return serve


def test_a_text_far_beyond_the_context_is_refused_without_tokenizing(model_dir: Path) -> None:
    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0"), model_dir=model_dir) as tested:
            # The scripted model's context holds 512 tokens.
            answer = await tested.generate(request=GenerateRequest(text="x" * (32 * 512 + 1)))

            [violation] = details(answer.error, error_details_pb2.BadRequest).field_violations
            assert (violation.field, violation.reason) == ("prompt.text", "PROMPT_TOO_LONG")
            assert "at most 16384" in violation.description

    run_virtual(main())


@pytest.mark.parametrize("template", ["{{ bos_token }}", None])
def test_a_model_has_a_chat_template_if_the_router_can_render_one(
    tmp_path: Path, template: str | None
) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))

    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0"), model_dir=tmp_path) as tested:
            [model] = (await tested.stub.ListModels(inference_pb2.ListModelsRequest())).models
            assert model.has_chat_template == (template is not None)

    run_virtual(main())


def test_all_wrong_sampling_parameters_are_named_at_once(model_dir: Path) -> None:
    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0"), model_dir=model_dir) as tested:
            wrong = common_pb2.SamplingParams(
                temperature=-1, top_p=2, n=0, min_p=3, stop=["", ""], stop_token_ids=[10**6]
            )
            answer = await tested.generate(request=GenerateRequest(text="x", sampling=wrong))

            [detail] = [details(answer.error, error_details_pb2.BadRequest)]
            named = {each.field.removeprefix("sampling.") for each in detail.field_violations}
            assert {each.reason for each in detail.field_violations} == {"INVALID_REQUEST"}
            assert named == {"temperature", "top_p", "n", "min_p", "stop[0]", "stop_token_ids[0]"}
            assert answer.error is not None
            assert len((answer.error.details() or "").splitlines()) == len(named)

    run_virtual(main())


def test_the_largest_message_has_room_for_any_valid_request_and_little_more() -> None:
    default = RouterConfig()

    assert 4 * 1_000_000 + 4 * 2**20 < default.max_request_bytes < 16 * 2**20
    assert RouterConfig(max_prompt_chars=10**7).max_request_bytes > 4 * 10**7


def test_a_full_router_refuses_before_any_work_and_says_when_to_try_again() -> None:
    async def main() -> None:
        worker = ScriptedWorker("decode-0", token_s=0.1)
        async with running_router(worker, max_active_requests=2, retry_delay_s=0.7) as tested:
            running = [asyncio.create_task(tested.generate()) for _ in range(2)]
            await asyncio.sleep(0.05)
            # Not even the prompt is looked at.
            refused = await tested.generate(request=GenerateRequest())

            assert refused.error is not None
            assert refused.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            retry = details(refused.error, error_details_pb2.RetryInfo).retry_delay
            assert retry.ToMilliseconds() == 700
            reason = details(refused.error, error_details_pb2.ErrorInfo)
            assert (reason.reason, reason.domain) == ("OVERLOADED", "pagewire")
            assert all(each.error is None for each in await asyncio.gather(*running))
            assert (await tested.generate()).error is None, "there is room again"

    run_virtual(main())


def test_text_is_streamed_without_the_end_token(model_dir: Path, tokenizer: Tokenizer) -> None:
    async def main() -> None:
        text = "日本語 😀 the fox"
        worker = ScriptedWorker("decode-0", serve=writes(tokenizer, text))
        async with running_router(worker, model_dir=model_dir) as tested:
            answer = await tested.generate(request=GenerateRequest(text="Grüße"))

            assert answer.text() == text
            assert not any("\ufffd" in message.text for message in answer.messages)
            assert answer.token_ids()[-1] == EOS
            assert answer.messages[-1].finish_reason == STOP
            [submit] = worker.submits
            expected = tokenizer.encode("Grüße", add_special_tokens=True)
            assert unpack_token_ids(submit.prompt_token_ids) == expected
            assert not submit.sampling.stop

    run_virtual(main())


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_stop_string_cuts_the_text_and_cancels_the_rest(
    model_dir: Path, tokenizer: Tokenizer, chunk: int
) -> None:
    async def main() -> None:
        worker = ScriptedWorker(
            "decode-0", serve=writes(tokenizer, "the dog. END of the fox", chunk=chunk)
        )
        async with running_router(worker, model_dir=model_dir) as tested:
            request = GenerateRequest(text="x")
            request.sampling.stop.extend(["never", "END"])
            answer = await tested.generate(request=request)

            assert answer.error is None
            assert answer.text() == "the dog. "
            assert answer.messages[-1].finish_reason == STOP
            assert answer.messages[-1].stopped_by == "END"
            assert tokenizer.decode(answer.token_ids()).startswith("the dog. END")
            assert answer.usage.completion_tokens == len(answer.token_ids())
            if chunk < 100:
                await wait_until(lambda: bool(worker.cancels), timeout_s=0.1)

    run_virtual(main())


def test_a_choice_that_a_stop_string_ended_is_cancelled_while_others_go_on(
    model_dir: Path, tokenizer: Tokenizer
) -> None:
    async def main() -> None:
        texts = ["the END of it", "no end of it at all", "the END"]
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]

        async def serve(session: Session, submit: worker_pb2.SubmitRequest) -> None:
            for index in range(max(map(len, ids))):
                await asyncio.sleep(0.01)
                for choice, whole in enumerate(ids):
                    if index >= len(whole) or (submit.request_id, choice) in worker.choice_cancels:
                        continue
                    session.send(
                        worker_pb2.TokenDelta(
                            request_id=submit.request_id,
                            choice=choice,
                            first_index=index,
                            token_ids=pack_token_ids([whole[index]]),
                            finish_reason=STOP if index == len(whole) - 1 else 0,
                        )
                    )

        worker = ScriptedWorker("decode-0", serve=serve)
        async with running_router(worker, model_dir=model_dir) as tested:
            request = GenerateRequest(text="x")
            request.sampling.n = 3
            request.sampling.stop.append("END")
            answer = await tested.generate(request=request)

            assert answer.error is None
            assert [answer.text(choice) for choice in range(3)] == ["the ", texts[1], "the "]
            [submit] = worker.submits
            # Choice 2 ended at the worker by itself, with the token that completed the string.
            assert worker.choice_cancels == [(submit.request_id, 0)]
            assert worker.cancels == [], "nothing was left to cancel"

    run_virtual(main())


def test_text_held_back_for_a_stop_string_comes_at_the_end(
    model_dir: Path, tokenizer: Tokenizer
) -> None:
    async def main() -> None:
        worker = ScriptedWorker("decode-0", serve=writes(tokenizer, "the EN"))
        async with running_router(worker, model_dir=model_dir) as tested:
            request = GenerateRequest(text="x")
            request.sampling.stop.append("END")
            answer = await tested.generate(request=request)

            assert answer.text() == "the EN"
            assert answer.messages[-1].stopped_by == tokenizer.token_text(EOS)

    run_virtual(main())


def test_text_goes_on_in_the_middle_of_a_character_after_a_resumption(
    model_dir: Path, tokenizer: Tokenizer
) -> None:
    async def main() -> None:
        ids = tokenizer.encode("a😀b", add_special_tokens=False)

        async def serve(session: Session, submit: worker_pb2.SubmitRequest) -> None:
            done = len(submit.choices[0].emitted_token_ids) // 4
            part = ids[:3] if submit.attempt == 0 else ids[done:]
            session.send(
                worker_pb2.TokenDelta(
                    request_id=submit.request_id,
                    attempt=submit.attempt,
                    first_index=done,
                    token_ids=pack_token_ids(part),
                    finish_reason=LENGTH if submit.attempt else 0,
                )
            )
            if submit.attempt == 0:
                session.end()

        async with running_router(
            ScriptedWorker("decode-0", serve=serve), model_dir=model_dir
        ) as tested:
            answer = await tested.generate()

            assert answer.text() == "a😀b"
            assert answer.token_ids() == ids

    run_virtual(main())


def test_logprobs_stay_with_their_tokens() -> None:
    async def main() -> None:
        async def serve(session: Session, submit: worker_pb2.SubmitRequest) -> None:
            def part(first: int, count: int, **fields: Any) -> worker_pb2.TokenDelta:
                logprobs = [
                    common_pb2.TokenLogprobs(logprob=-float(i)) for i in range(first, first + count)
                ]
                ids = pack_token_ids(tokens(0, first + count)[first:])
                return worker_pb2.TokenDelta(
                    request_id=submit.request_id,
                    first_index=first,
                    token_ids=ids,
                    logprobs=logprobs,
                    **fields,
                )

            session.send(part(0, 3))
            session.send(part(1, 4), part(5, 1, finish_reason=LENGTH))

        async with running_router(ScriptedWorker("decode-0", serve=serve)) as tested:
            answer = await tested.generate(logprobs=0)

            assert [x.logprob for m in answer.messages for x in m.logprobs] == [
                0,
                -1,
                -2,
                -3,
                -4,
                -5,
            ]

    run_virtual(main())


def test_tokenize_equals_what_generate_uses(model_dir: Path, tokenizer: Tokenizer) -> None:
    async def main() -> None:
        worker = ScriptedWorker("decode-0")
        async with running_router(worker, model_dir=model_dir) as tested:
            chat = inference_pb2.ChatPrompt()
            chat.messages.add(role="user", content="the fox")
            tokenized = await tested.stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat))
            await tested.generate(request=GenerateRequest(chat=chat))

            assert tokenized.text == "<|begin|>[user]the fox[assistant]"
            assert tokenized.token_ids == worker.submits[0].prompt_token_ids
            ids = unpack_token_ids(tokenized.token_ids)
            assert ids[:2] == tokenizer.encode("<|begin|>[", add_special_tokens=False)

            plain = await tested.stub.Tokenize(inference_pb2.TokenizeRequest(text="the fox"))
            expected = tokenizer.encode("the fox", add_special_tokens=True)
            assert unpack_token_ids(plain.token_ids) == expected

            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await tested.stub.Tokenize(inference_pb2.TokenizeRequest(text=""))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await tested.stub.Tokenize(inference_pb2.TokenizeRequest())
            assert caught.value.details() == "input: found nothing; allowed: one of text, chat"

            for options, text in (
                ({"add_generation_prompt": False}, "<|begin|>[user]the fox"),
                ({"continue_final_message": True}, "<|begin|>[user]the fox"),
            ):
                request = inference_pb2.TokenizeRequest(chat=chat, **options)
                assert (await tested.stub.Tokenize(request)).text == text
            for request, field in (
                ({"text": "x", "continue_final_message": True}, "continue_final_message"),
                ({"text": "x", "add_generation_prompt": True}, "add_generation_prompt"),
                (
                    {"chat": chat, "add_generation_prompt": True, "continue_final_message": True},
                    "add_generation_prompt",
                ),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await tested.stub.Tokenize(inference_pb2.TokenizeRequest(**request))
                assert caught.value.details().startswith(f"{field}: found true; allowed: false")

    run_virtual(main())


@pytest.mark.parametrize(
    "request_", [GenerateRequest(text="x"), GenerateRequest(chat=inference_pb2.ChatPrompt())]
)
def test_without_a_tokenizer_text_is_refused_clearly(request_: GenerateRequest) -> None:
    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0")) as tested:
            answer = await tested.generate(request=request_)

            assert answer.error is not None
            assert answer.error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "token_ids" in (answer.error.details() or "")

    run_virtual(main())


def test_models_status_and_health_follow_the_workers() -> None:
    async def main() -> None:
        tested = RouterUnderTest(RouterConfig())
        tested.router.register(tested.server)
        await tested.router.start()
        await tested.server.start()
        health = health_pb2_grpc.HealthStub(tested.network.channel("router:1"))

        async def serving(service: str) -> bool:
            check = await health.Check(health_pb2.HealthCheckRequest(service=service))
            return check.status == health_pb2.HealthCheckResponse.SERVING

        name = "pagewire.v1.InferenceService"
        models = await tested.stub.ListModels(inference_pb2.ListModelsRequest())
        assert not models.models
        assert await serving("")
        assert not await serving(name)
        said: list[str] = []
        waiting = asyncio.create_task(tested.router.health.wait_ready(said.append))
        await asyncio.sleep(PATIENCE_S - 0.1)
        assert said == []
        await tested.add(ScriptedWorker("prefill-0", pool="prefill"))
        await asyncio.sleep(1)
        assert (said, waiting.done()) == (["no decode worker takes requests"], False)

        pages = inference_pb2.PageCounts(total=10, free=7, live=3)
        decode = ScriptedWorker("decode-0", heartbeat={"pages": pages, "running": 2})
        await tested.add(decode)
        await waiting
        assert await serving(name)
        await tested.generate()

        [model] = (await tested.stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert (model.name, model.vocab_size, model.page_size) == ("tiny", 400, 4)
        status = await tested.stub.GetClusterStatus(inference_pb2.GetClusterStatusRequest())
        assert (status.active_requests, status.finished_requests) == (0, 1)
        by_id = {each.worker.worker_id: each for each in status.workers}
        assert by_id["decode-0"].state == inference_pb2.WORKER_STATE_READY
        assert by_id["decode-0"].pool == common_pb2.POOL_DECODE
        assert by_id["decode-0"].heartbeat.pages == pages
        assert by_id["decode-0"].heartbeat_age_ms <= 500
        assert by_id["prefill-0"].pool == common_pb2.POOL_PREFILL

        tested.network.kill("decode-0:1")
        await asyncio.sleep(0.5)
        assert not await serving(name)
        del tested.workers["decode-0"]
        await tested.announce()
        status = await tested.stub.GetClusterStatus(inference_pb2.GetClusterStatusRequest())
        by_id = {each.worker.worker_id: each for each in status.workers}
        assert by_id["decode-0"].state == inference_pb2.WORKER_STATE_DEAD, "shown for a minute"
        assert by_id["decode-0"].silence.startswith("UNAVAILABLE: ")
        assert by_id["prefill-0"].silence == ""
        await asyncio.sleep(61)
        status = await tested.stub.GetClusterStatus(inference_pb2.GetClusterStatusRequest())
        assert [each.worker.worker_id for each in status.workers] == ["prefill-0"]
        assert not status.is_stopping
        await tested.router.stop(0.1)
        status = await tested.stub.GetClusterStatus(inference_pb2.GetClusterStatusRequest())
        assert status.is_stopping
        assert not await serving("")

    run_virtual(main())


def test_a_crash_in_one_request_is_an_internal_error_of_that_request_only(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0"), model_dir=model_dir) as tested:

            def crash(*args: Any, **kwargs: Any) -> None:
                raise ZeroDivisionError

            with monkeypatch.context() as patched:
                patched.setattr(Tokenizer, "encode", crash)
                answer = await tested.generate(request=GenerateRequest(text="x"))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await tested.stub.Tokenize(inference_pb2.TokenizeRequest(text="x"))

            lines = logged("request_crashed", caplog)
            for error, line in zip((answer.error, caught.value), lines, strict=True):
                assert error is not None
                assert error.code() is grpc.StatusCode.INTERNAL
                assert "ZeroDivision" not in (error.details() or "")
                assert f"request_id {line['request_id']} " in (error.details() or "")
            assert (await tested.generate()).error is None

    run_virtual(main())


def test_the_same_over_real_sockets(model_dir: Path, tokenizer: Tokenizer) -> None:
    async def main() -> None:
        worker = ScriptedWorker("decode-0", serve=writes(tokenizer, "日本語 the fox"))
        server = grpc.aio.server()
        worker_port = server.add_insecure_port("127.0.0.1:0")
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(worker, server)
        await server.start()
        ids = iter(f"{i:032x}" for i in range(1, 100))
        router = Router(
            config=RouterConfig(),
            model_dir=model_dir,
            connect_channel=lambda _: grpc.aio.insecure_channel(f"127.0.0.1:{worker_port}"),
            random_id=lambda: next(ids),
        )
        front = grpc.aio.server()
        port = front.add_insecure_port("127.0.0.1:0")
        router.register(front)
        await router.start()
        await front.start()
        await router.set_workers([worker.member])

        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            answer = Answer()
            async for message in stub.Generate(GenerateRequest(text="x"), timeout=20):
                answer.messages.append(message)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(GenerateRequest(text="x", model="other"), timeout=20).read()
            chat = inference_pb2.ChatPrompt()
            chat.messages.add(role="user", content="the fox")
            tokenized = await stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat))
            assert tokenized.text == "<|begin|>[user]the fox[assistant]"
            call = stub.Generate(GenerateRequest(text="x"), timeout=20)
            await call.read()
            call.cancel()
            await wait_until(lambda: bool(worker.cancels), timeout_s=5)

        assert answer.text() == "日本語 the fox"
        assert answer.usage.completion_tokens == len(answer.token_ids())
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        [violation] = details(caught.value, error_details_pb2.BadRequest).field_violations
        assert violation.field == "model"
        await router.stop(1.0)
        await front.stop(None)
        await server.stop(None)

    asyncio.run(main())
