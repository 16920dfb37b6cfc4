"""A whole cluster behind a gateway: no stream loses a token, and no log holds a prompt.

`python -m benchmarks.gateway --ways both` does the same with a thousand streams of each kind.
"""

import json
import logging
from collections import Counter

import grpc
import pytest

from observability.logs import ATTRIBUTE
from pagewire.protos import inference_pb2
from tests.http_gateway.parrot import MARKS, write_folder
from tests.http_gateway.raw_http import exchange, request
from tests.http_gateway.serving import gateway
from tests.http_gateway.whole_cluster import GrpcCanary, HttpCanary, whole_cluster
from tests.support.traces import traced
from tests.support.waiting import wait_until

EACH = 40  # together several times as many as the pages of the decode worker hold


def test_many_streams_of_both_front_ends_lose_repeat_and_change_no_token(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = write_folder(tmp_path_factory.mktemp("model"), MARKS["plain"])
    with gateway(lambda: whole_cluster(folder)) as served:
        singers = [
            kind(served, f"{kind.__name__} {number}")
            for kind in (GrpcCanary, HttpCanary)
            for number in range(EACH)
        ]
        for each in singers:
            each.is_over.set()  # one song each

        for each in singers:
            each.start()
        for each in singers:
            each.join(100)

        assert not any(each.failure for each in singers), [each.failure for each in singers]
        assert [each.num_songs for each in singers] == [1] * (2 * EACH)
        assert served.backend.router.admission.num_active == 0


def test_a_request_is_one_line_of_each_process_and_none_holds_its_text(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_folder(tmp_path_factory.mktemp("model"), MARKS["plain"])
    secret = "nobody else may read this"
    body = json.dumps({"prompt": secret, "max_tokens": 30, "ignore_eos": True})
    written = ("http_request", "request_done", "request_ended", "prefill_ended")

    def lines() -> list[logging.LogRecord]:
        return [each for each in caplog.records if each.getMessage() in written]

    with gateway(lambda: whole_cluster(folder)) as served:
        caplog.set_level(logging.DEBUG)
        answered = exchange(served.host_and_port, request("/v1/completions", body))
        wait_until(lambda: len(lines()) == len(written))  # a line follows its answer
        token_ids = served.backend.tokenizer.encode(secret, add_special_tokens=False)

    assert Counter(each.getMessage() for each in lines()) == Counter(written)
    assert {each.levelno for each in lines()} == {logging.INFO}
    told = [getattr(each, ATTRIBUTE) for each in lines()]
    assert len({each.get("router_request_id") or each["request_id"] for each in told}) == 1
    answer = json.loads(answered.body)["choices"][0]["text"]
    text = "\n".join(f"{each.getMessage()} {vars(each)}" for each in caplog.records)
    for hidden in (secret, answer, str(token_ids)[1:-1]):
        assert hidden not in text


def test_the_trace_of_a_request_begins_at_the_gateway(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = write_folder(tmp_path_factory.mktemp("model"), MARKS["plain"])
    body = json.dumps({"prompt": ["One page of text", "and another"], "max_tokens": 30})
    with gateway(lambda: whole_cluster(folder)) as served, traced() as traces:
        assert exchange(served.host_and_port, request("/v1/completions", body)).status == 200
        wait_until(lambda: traces.named("POST /v1/completions"))
        wait_until(lambda: len(traces.named("decode")) == 2)

        above = ["POST /v1/completions", "generate", "attempt", "decode"]
        assert [traces.path(each) for each in traces.named("decode")] == [above, above]
        assert len({span.context.trace_id for span in traces.spans}) == 1


def test_what_is_refused_is_in_no_log_either(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_folder(tmp_path_factory.mktemp("model"), MARKS["hermes"])
    secret = "nobodymayreadthis"
    chat = {"role": "user", "content": secret}
    schema = {"type": "object", "properties": {secret: {"type": secret}}}
    over_http = [
        {"prompt": secret, "max_tokens": secret},
        {"prompt": secret, "model": secret},
        {"prompt": secret, "guided_json": schema},
        {"prompt": secret, "guided_regex": f"{secret}("},
    ]
    over_grpc = [
        {"text": secret, "model": secret},
        {"text": secret, "sampling": {"stop": [secret * 100]}},
        {"text": secret, "resume": {"token": secret.encode()}},
        {"chat": {"messages": [chat | {"role": secret}]}},
        {"chat": {"messages": [chat], "tools_json": secret}},
    ]
    garbled = b"\x12\x12" + secret.encode() + b"\xff"  # a text that is not UTF-8

    with gateway(lambda: whole_cluster(folder)) as served:
        caplog.set_level(logging.DEBUG)
        for body in over_http:
            data = request("/v1/completions", json.dumps(body))
            assert exchange(served.host_and_port, data).status in (400, 404)
        with grpc.insecure_channel(served.router_address) as channel:
            call = channel.unary_stream("/pagewire.v1.InferenceService/Generate")
            for fields in over_grpc:
                wrong = inference_pb2.GenerateRequest(**fields).SerializeToString()
                with pytest.raises(grpc.RpcError, match=r"NOT_FOUND|INVALID_ARGUMENT"):
                    list(call(wrong, timeout=10))
            with pytest.raises(grpc.RpcError, match="text: byte 17 is not UTF-8"):
                list(call(garbled, timeout=10))
        wait_until(lambda: any(each.getMessage() == "request_refused" for each in caplog.records))

    text = "\n".join(f"{each.getMessage()} {vars(each)}" for each in caplog.records)
    assert secret not in text
