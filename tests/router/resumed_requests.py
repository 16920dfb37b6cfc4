"""Requests of a client that continues a stream."""

from typing import Any

from pagewire.protos import common_pb2, inference_pb2
from pagewire.protos.token_ids import pack_token_ids
from tests.router.scripted_worker import RouterUnderTest

GenerateRequest = inference_pb2.GenerateRequest


def asking(max_tokens: int = 10, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        token_ids=pack_token_ids([5, 6, 7]),
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, **sampling),
    )


def resuming(
    request: GenerateRequest, messages: list[Any], token: bytes | None = None
) -> GenerateRequest:
    """The request of a client that has these messages of it."""
    again = GenerateRequest()
    again.CopyFrom(request)
    again.resume.token = messages[0].resume_token if token is None else token
    for choice in sorted({each.choice for each in messages}):
        own = [each for each in messages if each.choice == choice]
        again.resume.choices.add(
            choice=choice,
            token_ids=b"".join(each.token_ids for each in own),
            text_chars=sum(len(each.text) for each in own),
            finished=any(each.finish_reason for each in own),
        )
    return again


async def assert_refused(tested: RouterUnderTest, request: GenerateRequest, field: str) -> str:
    error = (await tested.generate(request=request)).error
    assert error is not None
    assert error.code().name == "INVALID_ARGUMENT"
    assert (error.details() or "").startswith(f"{field}: found "), error.details()
    return error.details() or ""
