"""The trace of a request joins what it did on router, prefill and decode workers."""

import asyncio

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.trace import StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pagewire import AsyncClient
from pagewire.protos import inference_pb2_grpc
from pagewire.protos.trace_context import TraceContext
from pagewire.tracing import caller_span
from tests.simulation.checked_requests import PAGE, assert_right, request
from tests.support.fake_cluster import FakeCluster, generate_request
from tests.support.scenario import ClusterShape
from tests.support.simulator import in_cluster
from tests.support.traces import Traces, traced, values
from tests.support.virtual_time import wait_until

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = f"00-{TRACE_ID}-{SPAN_ID}-01"
PASS_MS, TOKEN_MS = 10.0, 0.5  # of ClusterShape, besides 0.5 for a launch
WHOLE = ["generate", "attempt", "decode", "receive", "prefill"]


def passes_ms(span: ReadableSpan, event: str) -> float:
    [attributes] = [each.attributes for each in span.events if each.name == event]
    assert attributes is not None
    told = attributes["pagewire.passes_ms"]
    assert isinstance(told, float)
    return told


def trace_ids(traces: Traces) -> set[str]:
    return {f"{span.context.trace_id:032x}" for span in traces.spans}


def test_one_trace_goes_through_all_processes_and_says_what_was_computed_and_moved() -> None:
    async def body(cluster: FakeCluster) -> None:
        with traced() as traces:
            assert_right(await cluster.generate(request("r0", 41)))
            await cluster.wait_quiescent()

            assert [span.name for span in traces.spans] == WHOLE
            assert traces.path(traces.one("prefill")) == WHOLE
            assert len(trace_ids(traces)) == 1
            assert all(span.status.status_code is StatusCode.UNSET for span in traces.spans)
            [request_id] = {
                values(traces.one(name))["request_id"] for name in ("generate", "decode")
            }
            assert request_id
            generate = values(traces.one("generate"))
            assert generate["gen_ai.usage.input_tokens"] == 41
            assert generate["gen_ai.usage.output_tokens"] == 16
            assert (generate["outcome"], generate["decode_workers"]) == ("ok", "decode-0")
            events = [event.name for event in traces.one("generate").events]
            assert events == ["admitted", "first_token"]
            decode = values(traces.one("decode"))
            assert (decode["moved_pages"], decode["computed_tokens"]) == (11, 0)
            assert passes_ms(traces.one("decode"), "first_token") == 0
            assert values(traces.one("attempt"))["decode_worker"] == "decode-0"
            receive = values(traces.one("receive"))
            assert (receive["moved_pages"], receive["moved_bytes"]) == (11, 11 * PAGE * 16)
            assert receive["prefill_worker"] == "prefill-0"
            prefill = values(traces.one("prefill"))
            assert (prefill["computed_tokens"], prefill["moved_pages"]) == (41, 11)
            assert passes_ms(traces.one("prefill"), "computed") == pytest.approx(
                PASS_MS + 41 * TOKEN_MS, abs=1
            )

    in_cluster(FakeCluster(), body)


@pytest.mark.parametrize(
    ("num_prefill", "name", "event"), [(1, "prefill", "computed"), (0, "decode", "first_token")]
)
def test_the_passes_of_a_prompt_are_told_without_those_that_it_waits_for(
    num_prefill: int, name: str, event: str
) -> None:
    async def body(cluster: FakeCluster) -> None:
        with traced() as traces:
            first = asyncio.create_task(cluster.generate(request("r0", 56)))
            await asyncio.sleep(0.005)  # the first of its two passes runs
            assert_right(await cluster.generate(request("r1", 24)), await first)
            await cluster.wait_quiescent()

        told = {
            values(span)["gen_ai.usage.input_tokens"]: span.context.trace_id
            for span in traces.named("generate")
        }
        by_trace = {span.context.trace_id: span for span in traces.named(name)}
        found = {length: passes_ms(by_trace[told[length]], event) for length in told}
        # The second pass computes the rest of the one and all of the other, which waits 25 ms.
        each_ms = PASS_MS + 40 * TOKEN_MS
        assert found[56] == pytest.approx(2 * each_ms, abs=1)
        assert found[24] == pytest.approx(each_ms, abs=1)

    shape = ClusterShape(num_prefill=num_prefill, max_step_tokens=40)
    in_cluster(FakeCluster(shape=shape), body)


def test_a_request_that_loses_its_worker_stays_one_trace() -> None:
    async def body(cluster: FakeCluster) -> None:
        with traced() as traces:
            serving = asyncio.create_task(cluster.generate(request("r0", 41)))
            engine = cluster.workers["decode-0"].engine
            await wait_until(lambda: engine.num_computed_tokens > 3)
            cluster.kill("decode-0")
            assert_right(await serving)
            await cluster.wait_quiescent()

            assert len(trace_ids(traces)) == 1
            first, second = traces.named("attempt")
            assert values(first)["decode_worker"] == "decode-0"
            assert first.status.status_code is StatusCode.ERROR
            assert second.status.status_code is StatusCode.UNSET
            assert values(traces.one("generate"))["resumptions"] == 1

    in_cluster(FakeCluster(shape=ClusterShape(num_decode=2)), body)


def test_a_request_that_is_cancelled_ends_its_spans_as_failed() -> None:
    async def body(cluster: FakeCluster) -> None:
        with traced() as traces:
            serving = asyncio.create_task(cluster.generate(request("r0", 41)))
            engine = cluster.workers["decode-0"].engine
            await wait_until(lambda: engine.num_computed_tokens > 3)
            serving.cancel()
            await asyncio.wait([serving])
            await cluster.wait_quiescent()

            assert [span.name for span in traces.spans][:2] == WHOLE[:2]
            failed = {s.name for s in traces.spans if s.status.status_code is StatusCode.ERROR}
            assert failed >= {"generate", "attempt", "decode"}
            assert values(traces.one("generate"))["outcome"] == "CANCELLED"

    in_cluster(FakeCluster(), body)


async def traced_call(
    cluster: FakeCluster, given: str, sample_ratio: float = 1.0, state: str = ""
) -> Traces:
    """Return the trace of a call of the client library within a caller's span."""
    token = caller_span.set(TraceContext(given, state))
    try:
        with traced(sample_ratio) as traces:
            async with AsyncClient("router-0:1", channel_factory=cluster.network.channel) as client:
                completion = await client.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
            assert len(completion.token_ids) == 4
            await cluster.wait_quiescent()
    finally:
        caller_span.reset(token)
    return traces


@pytest.mark.parametrize(
    ("given", "goes_on"),
    [
        (CALLER, True),
        ("", False),
        ("00-" + "0" * 32 + f"-{SPAN_ID}-01", False),
        (f"00-{TRACE_ID}-{'0' * 16}-01", False),
        (CALLER + "-more", False),
        ("x" * 30_000, False),
        ("\x00", False),
    ],
)
def test_the_trace_of_a_caller_goes_on_if_it_is_one(given: str, goes_on: bool) -> None:
    async def body(cluster: FakeCluster) -> None:
        traces = await traced_call(cluster, given)

        [found] = trace_ids(traces)
        assert (found == TRACE_ID) is goes_on
        assert (traces.one("generate").parent is not None) is goes_on

    in_cluster(FakeCluster(), body)


STATE = "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"
MEMBERS = ",".join(f"k{number}=v" for number in range(33))


@pytest.mark.parametrize(
    ("given", "state", "goes_on"),
    [
        (CALLER, STATE, STATE),
        (CALLER, STATE.replace(",", " ,\t,"), STATE),
        (CALLER, "a=" + "x" * 200 + ",b=" + "y" * 200, "a=" + "x" * 200 + ",b=" + "y" * 200),
        (CALLER, MEMBERS.rpartition(",")[0], MEMBERS.rpartition(",")[0]),
        (CALLER, MEMBERS, ""),
        (CALLER, "a=" + "x" * 255 + ",b=" + "y" * 255, ""),  # 515 characters
        (CALLER, "a=1,a=2", ""),
        (CALLER, STATE + ",secret", ""),
        (CALLER, STATE + ",B=secret\n", ""),
        ("", STATE, ""),
        (CALLER + "-more", STATE, ""),
    ],
)
def test_the_state_of_a_callers_trace_reaches_all_spans_if_it_is_one(
    given: str, state: str, goes_on: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(cluster: FakeCluster) -> None:
        traces = await traced_call(cluster, given, state=state)

        assert [span.name for span in traces.spans] == WHOLE
        assert {span.context.trace_state.to_header() for span in traces.spans} == {goes_on}

    in_cluster(FakeCluster(), body)
    assert not [each for each in caplog.records if each.name.startswith("opentelemetry")]
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("given", "sample_ratio"), [(CALLER[:-1] + "0", 1.0), (CALLER, 0.0), ("", 0.0)]
)
def test_nothing_is_traced_that_the_caller_or_the_ratio_leaves_out(
    given: str, sample_ratio: float
) -> None:
    async def body(cluster: FakeCluster) -> None:
        assert (await traced_call(cluster, given, sample_ratio)).spans == []

    in_cluster(FakeCluster(), body)


def test_a_span_of_opentelemetry_and_the_metadata_of_a_call_are_the_caller_too() -> None:
    async def body(cluster: FakeCluster) -> None:
        own = TracerProvider().get_tracer("caller")
        above = TraceContextTextMapPropagator().extract(
            {"traceparent": CALLER, "tracestate": STATE}
        )
        with own.start_as_current_span("work", context=above) as span:
            traces = await traced_call(cluster, "")
            parent = traces.one("generate").parent
            assert parent is not None
            assert parent.span_id == span.get_span_context().span_id
            assert traces.one("prefill").context.trace_state.to_header() == STATE
        with traced() as traces:
            stub = inference_pb2_grpc.InferenceServiceStub(cluster.network.channel("router-0:1"))
            first, second = STATE.split(",")
            metadata = (("traceparent", CALLER), ("tracestate", first), ("tracestate", second))
            call = stub.Generate(generate_request(request("r0", 9)), metadata=metadata)
            async for _ in call:
                pass
            await cluster.wait_quiescent()
        assert trace_ids(traces) == {TRACE_ID}
        assert traces.one("generate").context.trace_state.to_header() == STATE

    in_cluster(FakeCluster(), body)
