"""Converts between messages of protos/ and the values of this package."""

from collections.abc import Sequence
from dataclasses import asdict

from grammars.wire import constraint_from_proto, constraint_to_proto
from kv_cache.page_pool import PageCounts
from llm_engine.sampling import SampledToken, SamplingParams
from pagewire.protos import common_pb2, inference_pb2
from pagewire.protos.token_ids import pack_token_ids, unpack_token_ids
from pagewire.types import WorkerStatus
from pagewire.wire import worker_status_from
from worker.identity import WorkerIdentity
from worker.load import WorkerLoad, WorkerTotals

MAX_REASON_CHARS = 2000  # of a failure, as the contract has it


def cut_reason(reason: str) -> str:
    """Return what fits of a failure's message: more would end a stream that others share."""
    return reason[:MAX_REASON_CHARS]


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Read complete parameters; the router has set every field that has a default.

    Raises:
        InvalidConstraint: A constraint is empty.
    """
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=message.seed,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        constraint=constraint_from_proto(message),
    )


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """Write complete parameters."""
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        constraint=constraint_to_proto(params.constraint),
    )


def logprobs_to_proto(tokens: Sequence[SampledToken]) -> list[common_pb2.TokenLogprobs]:
    """Write the log probabilities of tokens; empty where they were not requested."""
    return [
        common_pb2.TokenLogprobs(
            logprob=token.logprob,
            top_token_ids=pack_token_ids([token_id for token_id, _ in token.top_logprobs]),
            top_logprobs=[logprob for _, logprob in token.top_logprobs],
        )
        for token in tokens
        if token.logprob is not None
    ]


def sampled_from_proto(
    packed: bytes, logprobs: Sequence[common_pb2.TokenLogprobs]
) -> list[SampledToken]:
    """Read drawn tokens; the inverse of pack_token_ids and logprobs_to_proto together.

    Raises:
        ValueError: If there are log probabilities, but not one per token.
    """
    token_ids = unpack_token_ids(packed)
    if not logprobs:
        return [SampledToken(token_id=token_id) for token_id in token_ids]
    if len(logprobs) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens came with {len(logprobs)} log probabilities")
    return [
        SampledToken(
            token_id=token_id,
            logprob=each.logprob,
            top_logprobs=tuple(
                zip(unpack_token_ids(each.top_token_ids), each.top_logprobs, strict=True)
            ),
        )
        for token_id, each in zip(token_ids, logprobs, strict=True)
    ]


def worker_to_proto(identity: WorkerIdentity) -> common_pb2.WorkerRef:
    """Write the identity of a worker."""
    return common_pb2.WorkerRef(
        worker_id=identity.worker_id,
        incarnation=identity.incarnation,
        address=identity.address,
        contract_version=identity.contract_version,
    )


def worker_from_proto(message: common_pb2.WorkerRef) -> WorkerIdentity:
    """Read the identity of a worker."""
    return WorkerIdentity(
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        address=message.address,
        contract_version=message.contract_version,
    )


def heartbeat_to_proto(
    *,
    identity: WorkerIdentity,
    pool: "common_pb2.Pool",
    load: WorkerLoad,
    pages: PageCounts,
    totals: WorkerTotals,
) -> inference_pb2.Heartbeat:
    """Write a heartbeat."""
    return inference_pb2.Heartbeat(
        worker=worker_to_proto(identity),
        pool=pool,
        steps=load.steps,
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.queued_tokens,
        draining=load.is_draining,
        stepping=load.is_stepping,
        gpu_allocated_bytes=load.gpu_memory.allocated_bytes,
        gpu_reserved_bytes=load.gpu_memory.reserved_bytes,
        pages=inference_pb2.PageCounts(**asdict(pages)),
        totals=inference_pb2.WorkerTotals(
            **asdict(totals),
            steps_ahead=load.steps_ahead,
            steps_alone=load.steps_alone,
            attention_needed_bytes=load.reads.needed_bytes,
            attention_read_bytes=load.reads.read_bytes,
            sharing_groups=load.reads.groups,
            sharing_rows=load.reads.grouped_rows,
            over_quota_pages=load.num_over_quota,
        ),
    )


def own_status(heartbeat: inference_pb2.Heartbeat) -> WorkerStatus:
    """Return what a router that has just received this heartbeat tells of the worker."""
    is_draining = heartbeat.draining
    return worker_status_from(
        inference_pb2.WorkerStatus(
            worker=heartbeat.worker,
            pool=heartbeat.pool,
            state="WORKER_STATE_DRAINING" if is_draining else "WORKER_STATE_READY",
            heartbeat=heartbeat,
        )
    )
