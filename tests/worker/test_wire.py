"""Values survive the contract, and malformed messages do not pass."""

import pytest

from grammars.constraint import Constraint
from kv_cache.page_pool import PageCounts
from llm_engine.engine_api import GpuMemory
from llm_engine.kv_reads import KVReads
from llm_engine.sampling import SampledToken, SamplingParams
from pagewire.protos import common_pb2, inference_pb2
from pagewire.protos.token_ids import pack_token_ids
from tests.support.grammar_cases import JSON_OBJECT, choice, grammar, json_schema, regex
from worker.identity import WorkerIdentity
from worker.load import WorkerLoad, WorkerTotals
from worker.wire import (
    heartbeat_to_proto,
    logprobs_to_proto,
    own_status,
    sampled_from_proto,
    sampling_from_proto,
    sampling_to_proto,
    worker_from_proto,
    worker_to_proto,
)


@pytest.mark.parametrize("logprobs", [None, 0, 5])
def test_sampling_parameters_survive(logprobs: int | None) -> None:
    params = SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        seed=2**64 - 1,
        max_tokens=9,
        min_tokens=3,
        stop_token_ids=(4, 5),
        ignore_eos=True,
        logprobs=logprobs,
    )
    message = common_pb2.SamplingParams.FromString(sampling_to_proto(params).SerializeToString())
    assert sampling_from_proto(message) == params


@pytest.mark.parametrize(
    "constraint",
    [JSON_OBJECT, json_schema({"type": "null"}), regex("é"), choice("a", "b"), grammar("x")],
)
def test_constraints_survive(constraint: Constraint) -> None:
    params = SamplingParams(constraint=constraint)
    message = common_pb2.SamplingParams.FromString(sampling_to_proto(params).SerializeToString())
    assert sampling_from_proto(message).constraint == constraint


@pytest.mark.parametrize("said", [{}, {"json_object": False}])
def test_a_constraint_that_says_nothing_is_refused(said: dict[str, bool]) -> None:
    message = common_pb2.SamplingParams(constraint=common_pb2.Constraint(**said))
    with pytest.raises(ValueError, match="nothing; allowed: one of json_schema"):
        sampling_from_proto(message)


def test_drawn_tokens_survive_with_and_without_log_probabilities() -> None:
    plain = [SampledToken(token_id=3), SampledToken(token_id=4)]
    assert sampled_from_proto(pack_token_ids([3, 4]), logprobs_to_proto(plain)) == plain
    rich = [SampledToken(token_id=3, logprob=-0.5, top_logprobs=((3, -0.5), (9, -1.5)))]
    assert sampled_from_proto(pack_token_ids([3]), logprobs_to_proto(rich)) == rich


def test_log_probabilities_must_be_one_per_token() -> None:
    one = logprobs_to_proto([SampledToken(token_id=3, logprob=-0.5)])
    with pytest.raises(ValueError, match="2 tokens came with 1"):
        sampled_from_proto(pack_token_ids([3, 4]), one)


def test_the_identity_of_a_worker_survives() -> None:
    identity = WorkerIdentity(worker_id="decode-0", incarnation=2**64 - 1, address="host:1")
    assert worker_from_proto(worker_to_proto(identity)) == identity


@pytest.mark.parametrize(("is_draining", "state"), [(False, "ready"), (True, "draining")])
def test_a_worker_tells_of_itself_what_its_heartbeat_says(is_draining: bool, state: str) -> None:
    heartbeat = inference_pb2.Heartbeat(
        worker=common_pb2.WorkerRef(worker_id="decode-1", incarnation=7),
        pool=common_pb2.POOL_DECODE,
        steps=3,
        draining=is_draining,
        pages=inference_pb2.PageCounts(total=9, free=4),
        totals=inference_pb2.WorkerTotals(generated_tokens=5),
    )

    found = own_status(heartbeat)

    assert (found.worker_id, found.pool, found.state) == ("decode-1", "decode", state)
    assert found.is_living
    assert (found.steps, found.pages.free, found.generated_tokens) == (3, 4, 5)


def test_a_heartbeat_tells_the_memory_of_a_gpu() -> None:
    load = WorkerLoad(
        steps=1,
        steps_ahead=0,
        steps_alone=0,
        reads=KVReads(),
        num_over_quota=0,
        gpu_memory=GpuMemory(allocated_bytes=2**37 + 1, reserved_bytes=2**38),
        running=0,
        waiting=0,
        queued_tokens=0,
        is_draining=False,
        is_stepping=False,
    )
    heartbeat = heartbeat_to_proto(
        identity=WorkerIdentity(worker_id="decode-1", incarnation=7, address="10.0.0.1:1"),
        pool=common_pb2.POOL_DECODE,
        load=load,
        pages=PageCounts(total=1, free=1, live=0, cached=0, leased=0, incoming=0, quarantine=0),
        totals=WorkerTotals(),
    )

    found = own_status(inference_pb2.Heartbeat.FromString(heartbeat.SerializeToString()))

    assert (found.gpu_allocated_bytes, found.gpu_reserved_bytes) == (2**37 + 1, 2**38)
