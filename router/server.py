"""The router's public gRPC service: requests in, streams out, errors as rich statuses."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NoReturn

import grpc
from google.rpc import status_pb2
from grpc_status import rpc_status

from credentials.door import Encryption
from observability.logs import fields
from pagewire.protos import inference_pb2, inference_pb2_grpc
from pagewire.protos.gathering import MAX_MORE, READS_MORE_KEY, READS_TOKENS_KEY
from pagewire.protos.trace_context import trace_context
from router import wire
from router.call import Call, Reception, read_tokenize_prompt
from router.delivery import Delivery
from router.errors import InvalidRequest, NoWorker, Overloaded, RequestCrashed, RouterError
from router.idle_streams import IdleStreams
from router.many_calls import ManyCalls
from router.pacing import OWN_CALL_US, Pace
from router.prefix_index import PrefixIndex
from router.statuses import status_of
from router.tenants.account import Account
from router.tenants.gate import current_tenant
from router.tenants.tenant import Tenant
from router.validation import MAX_REQUEST_FIELDS
from router.worker_registry import WorkerRegistry

logger = logging.getLogger(__name__)

_SHOWN_PREFIXES = 10  # in a cluster's status
_PACE = Pace(message_us=OWN_CALL_US)
# Calls that a message begins before others have a turn. The first requests of a burst then leave
# for their workers before its last ones are read, and no stream waits for all of them.
_MOST_AT_ONCE = 32

# Describes the connections of clients to the router, and of the router to the cluster.
DescribeTls = Callable[[], tuple[Encryption, Encryption]]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Implements InferenceService on top of reception, registry and index."""

    def __init__(
        self,
        reception: Reception,
        *,
        registry: WorkerRegistry,
        index: PrefixIndex,
        slow_client_timeout_s: float,
        describe_tls: DescribeTls,
        controller_silence: Callable[[], str],
    ) -> None:
        self._reception = reception
        self._admission = reception.admission
        self._dispatcher = reception.dispatcher
        self._tenants = reception.tenants
        self._registry = registry
        self._index = index
        self._slow_client_timeout_s = slow_client_timeout_s
        self._describe_tls = describe_tls
        self._controller_silence = controller_silence
        self._idle_streams = IdleStreams()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        if not request.traceparent:
            caller = trace_context(context.invocation_metadata() or ())
            request.traceparent, request.tracestate = caller
        has_news = asyncio.Event()
        call = self._reception.call(has_news.set)
        async with _answering(context):
            try:
                call.begin(request, context.time_remaining(), _PACE)
                await Delivery(
                    _messages(call, has_news),
                    begin=lambda: context.send_initial_metadata(()),
                    write=context.write,
                    timeout_s=self._slow_client_timeout_s,
                ).run()
                call.close()
            except Exception as error:
                raise call.fail(error) from None
            finally:
                call.cancel()

    async def GenerateMany(
        self,
        requests: AsyncIterator[inference_pb2.GenerateManyRequest],
        context: grpc.aio.ServicerContext,
    ) -> None:
        cancelled = status_pb2.Status(code=grpc.StatusCode.CANCELLED.value[0], message="cancelled")
        calls = ManyCalls(
            self._reception.call,
            cancelled=cancelled,
            is_one_caller=not self._tenants.is_open,
            reads_tokens=bool(_metadata(context, READS_TOKENS_KEY)),
            idle=self._idle_streams,
        )
        reader = asyncio.create_task(_read_calls(requests, calls), name="many-calls")
        try:
            async with _answering(context):
                await context.send_initial_metadata(((READS_MORE_KEY, "1"),))
                await Delivery(
                    _results(calls),
                    begin=None,
                    write=context.write,
                    timeout_s=self._slow_client_timeout_s,
                ).run()
        finally:
            reader.cancel()
            calls.stop()

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        async with _answering(context), self._served() as tenant:
            with _charged(tenant):
                prompt = read_tokenize_prompt(request)
                text, packed = await self._admission.tokenize(request.model, prompt, tenant.rules)
        return inference_pb2.TokenizeResponse(token_ids=packed, text=text)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        # The caller may be a gateway in the midst of the tenant's last answer.
        async with _answering(context), self._served(0) as tenant:
            text, pieces = await self._admission.detokenize(
                request.model,
                request.token_ids,
                skip_special_tokens=request.skip_special_tokens,
                with_pieces=request.with_pieces,
                tenant=tenant.rules,
            )
        return inference_pb2.DetokenizeResponse(text=text, pieces=pieces)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        async with _answering(context):
            tenant = current_tenant(self._tenants)
        served = self._registry.model
        if served is None:
            return inference_pb2.ListModelsResponse(tenant=tenant.name)
        model = wire.model(
            served,
            has_chat_template=self._admission.has_chat_template,
            tool_call_format=self._admission.tool_call_format,
            has_reasoning=self._admission.has_reasoning,
            max_request_bytes=self._admission.max_request_bytes,
            max_request_fields=MAX_REQUEST_FIELDS,
            sampling_defaults=self._admission.sampling_defaults,
        )
        return inference_pb2.ListModelsResponse(models=[model], tenant=tenant.name)

    async def GetClusterStatus(
        self, request: inference_pb2.GetClusterStatusRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GetClusterStatusResponse:
        async with _answering(context):
            tenant = current_tenant(self._tenants)
        if not tenant.rules.operator:
            return inference_pb2.GetClusterStatusResponse(
                active_requests=tenant.num_active,
                is_stopping=self._admission.is_closed,
                hot_prefixes=self._hot_prefixes(tenant.name),
                tenants=[wire.tenant_status(tenant)],
                is_partial=True,
            )
        return self.cluster_status()

    def cluster_status(self) -> inference_pb2.GetClusterStatusResponse:
        """Return this router's current view of the cluster, for operators."""
        front, cluster = self._describe_tls()
        return inference_pb2.GetClusterStatusResponse(
            workers=[wire.worker_status(each) for each in self._registry.known_workers()],
            active_requests=self._admission.num_active,
            finished_requests=self._admission.num_finished,
            resumed_requests=self._dispatcher.num_resumed,
            index_pages=self._index.num_pages,
            is_stopping=self._admission.is_closed,
            hot_prefixes=self._hot_prefixes(None),
            front_tls=wire.encryption(front),
            cluster_tls=wire.encryption(cluster),
            tenants=[wire.tenant_status(each) for each in self._tenants.told],
            controller_silence=self._controller_silence(),
        )

    def _hot_prefixes(self, tenant: str | None) -> list[inference_pb2.HotPrefix]:
        """Return what operators, for None, or a tenant may see: tenants see no workers."""
        is_operator = tenant is None
        return [
            wire.hot_prefix(each, self._index.holders(each.page_hash) if is_operator else ())
            for each in self._dispatcher.hot_prefixes.hottest(_SHOWN_PREFIXES, tenant)
        ]

    @asynccontextmanager
    async def _served(self, num_answers: int = 1) -> AsyncIterator[Tenant]:
        """Hold a place for a call that generates nothing; failures become a RouterError.

        Args:
            num_answers: As how many of its tenant's answers at a time it counts.
        """
        tenant: Tenant | None = None
        try:
            tenant = current_tenant(self._tenants)
            with self._admission.place(tenant, num_answers):
                yield tenant
        except RouterError as error:
            if tenant and isinstance(error, Overloaded):
                tenant.counts.refused += 1
            raise
        except Exception:
            # A bug in one request must not affect others.
            request_id = self._reception.random_id()  # these calls have none of their own
            logger.exception("request_crashed", extra=fields(request_id=request_id))
            raise RequestCrashed(request_id) from None


@contextmanager
def _charged(tenant: Tenant) -> Iterator[None]:
    """Count a call as one of its tenant's requests, unless the cluster refuses it."""
    account = Account(tenant)
    is_refused = False
    try:
        yield
    except (Overloaded, NoWorker):
        is_refused = True
        raise
    finally:
        account.close(may_have_run=not is_refused, is_refused=is_refused)


def add_to_server(servicer: InferenceServicer, server: grpc.aio.Server) -> None:
    """Serve InferenceService on a server."""
    add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    add(servicer, server)  # type: ignore[no-untyped-call]


def _metadata(context: grpc.aio.ServicerContext, key: str) -> str:
    """Return a value of the call's metadata; empty: there is none."""
    metadata = context.invocation_metadata() or ()
    return next((value for each, value in metadata if each == key), "")


async def _messages(
    call: Call, has_news: asyncio.Event
) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
    messages: deque[inference_pb2.GenerateResponse] = deque()

    def add() -> inference_pb2.GenerateResponse:
        messages.append(inference_pb2.GenerateResponse())
        return messages[-1]

    while not call.is_over:
        # No deadline here: the dispatcher has one and ends this wait.
        await has_news.wait()
        has_news.clear()
        call.take(add)
        while messages:
            yield messages.popleft()
    if call.error:
        raise call.error


async def _results(calls: ManyCalls) -> AsyncGenerator[inference_pb2.GenerateManyResponse, None]:
    while (response := await calls.take()) is not None:
        yield response


async def _read_calls(
    requests: AsyncIterator[inference_pb2.GenerateManyRequest], calls: ManyCalls
) -> None:
    error = None
    try:
        async for message in requests:
            if len(message.more) > MAX_MORE:
                raise InvalidRequest("more", f"{len(message.more)} of them", f"at most {MAX_MORE}")
            for number, each in enumerate((message, *message.more), 1):
                if each.HasField("start"):
                    calls.start(each)
                else:
                    calls.cancel(each.call_id)
                if number % _MOST_AT_ONCE == 0:
                    await asyncio.sleep(0)
            await calls.wait_taken()
            await calls.wait_for_retry()
    except Exception as found:  # whatever ends the reading ends the stream
        error = found
    calls.close(error)


@asynccontextmanager
async def _answering(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """End a call with the status of its error."""
    try:
        yield
    except RouterError as error:
        await _abort(context, status_of(error))


async def _abort(context: grpc.aio.ServicerContext, status: status_pb2.Status) -> NoReturn:
    rich = rpc_status.to_status(status)
    await context.abort(rich.code, rich.details, rich.trailing_metadata)
    raise AssertionError("abort always raises")
