"""One attempt to have a prefill worker fill the pages of a group.

Life of an attempt:
1. connection   taken from the pool, or made with the Connect call
2. start        names what to compute and which pages are wanted, on the stream of all attempts
3. pages        the Receiver takes them chunk by chunk and reports each commit at once
4. result       the first tokens, drawn after the last token of the prompt, usually come before the
                last page
5. close        in any case, and after a failure only once stop was called: wait until nothing can
                write into the pages, then leave unless everything has come
"""

import asyncio
from collections.abc import Awaitable, Callable

from decode_worker.errors import ConnectionUnknown, PrefillFailed
from decode_worker.prefill_client import AttemptLine, PrefillStream
from decode_worker.request import PrefillGroup
from decode_worker.wire import PrefillEnd, PrefillMessage, PrefillResult, start_message
from kv_cache.page_storage import PageStorage
from kv_transfer.deadlines import TransferDeadlines
from kv_transfer.errors import TransferError
from kv_transfer.joining import JoinedDigests
from kv_transfer.messages import Ticket
from kv_transfer.order import Incoming
from kv_transfer.receiver import Receiver
from kv_transfer.transport import Connection
from pagewire.protos.call_tasks import mark_seen
from pagewire.protos.trace_context import TraceContext
from worker.identity import ModelInfo


class RemotePrefill:
    """One attempt at one candidate. Call `run`, `stop` if that raised, then `close`; each once.

    Args:
        contract_version: That of this worker.
        model: The model, whose tokens the result may contain.
        stream: Returns the stream to the candidate, or raises PrefillFailed.
        connect: Returns a connection to the candidate, or raises PrefillFailed or TransferError.
        drop: Takes a connection that the candidate does not know.
        on_commit: Called with n when the first n pages of the group are verified.
        result_s: How long the result may take after the last page.
        trace: Parent span of the candidate's part; empty: none.

    Attributes:
        result: The first tokens, one per choice, as soon as they arrive; PrefillFailed if the
            candidate ended the attempt without them.
    """

    def __init__(
        self,
        group: PrefillGroup,
        *,
        ticket: Ticket,
        contract_version: int,
        model: ModelInfo,
        stream: Callable[[], PrefillStream],
        connect: Callable[[], Awaitable[Incoming]],
        drop: Callable[[Connection], None],
        storage: PageStorage,
        on_commit: Callable[[int], None],
        deadlines: TransferDeadlines,
        result_s: float,
        digests: JoinedDigests,
        trace: TraceContext,
    ) -> None:
        self._group = group
        self._trace = trace
        self._ticket = ticket
        self._contract_version = contract_version
        self._model = model
        self._stream = stream
        self._connect = connect
        self._drop = drop
        self._storage = storage
        self._on_commit = on_commit
        self._deadlines = deadlines
        self._result_s = result_s
        self._digests = digests
        self._line: AttemptLine | None = None
        self.receiver: Receiver | None = None  # None while nothing can have been posted
        self.result: asyncio.Future[PrefillResult] = asyncio.get_running_loop().create_future()
        self.result.add_done_callback(mark_seen)
        self._computed_at: float | None = None  # loop time of the result
        self._failure: PrefillFailed | None = None  # what the candidate told
        self._has_all = False  # pages and first tokens

    @property
    def request_id(self) -> str:
        """Of the group's request, for logs."""
        return self._group.request.request_id

    @property
    def moved(self) -> dict[str, object]:
        """Counters of the transfer so far, by name."""
        if self.receiver is None:
            return {}
        stats = self.receiver.stats
        return {
            "moved_pages": stats.pages_moved,
            "moved_bytes": stats.bytes_moved,
            "wire_ms": round(1000 * self.receiver.wire_s(), 1),
        }

    @property
    def wire_s(self) -> tuple[float, float]:
        """The time in which pages arrived, and how much of it came after the result."""
        if self.receiver is None or self._computed_at is None:
            return 0.0, 0.0
        return self.receiver.wire_s(), self.receiver.wire_s(after=self._computed_at)

    async def run(self) -> None:
        """Return when all pages are committed and the first tokens are known.

        Raises:
            PrefillFailed: The prefill worker refused, or ended the attempt.
            TransferError: The transfer failed.
            TimeoutError: The result did not come. Committed pages stay committed in all cases.
        """
        incoming = await self._connect()
        stream = self._stream()
        assert self._group.pages is not None
        start = start_message(
            self._group,
            ticket=self._ticket,
            connection_id=incoming.connection.connection_id,
            first_page=self._group.pages.num_committed_pages,
            contract_version=self._contract_version,
            trace=self._trace,
        )
        self._line = stream.begin(start, self)
        self.receiver = self._make_receiver(incoming, self._line)
        try:
            await self.receiver.run()
        except TransferError as error:
            if isinstance(self._failure, ConnectionUnknown):
                self._drop(incoming.connection)
            # What the worker told says more than the lost stream.
            raise self._failure or error from error
        if not self.result.done():
            await asyncio.wait({self.result}, timeout=self._result_s)
        if not self.result.done():
            raise TimeoutError(f"no result within {self._result_s:g} s after the last page")
        self.result.result()
        self._has_all = True

    def take(self, message: PrefillMessage) -> None:
        """Take a message of the prefill worker."""
        assert self.receiver is not None
        if isinstance(message, PrefillResult):
            self._take_result(message)
        elif isinstance(message, PrefillFailed):
            self._failure = message  # an Abort follows
        elif isinstance(message, PrefillEnd):
            self._failure = self._failure or message.error
            self.receiver.driver.stream_lost("the prefill worker ended the attempt")
            if not self.result.done():
                self.result.set_exception(
                    self._failure or PrefillFailed("the attempt ended without a result")
                )
        else:
            self.receiver.driver.post(message)

    def stop(self, reason: str) -> None:
        """Give up: no further page is committed; `receiver` knows whether one may be written."""
        if self.receiver is not None:
            self.receiver.driver.cancel(reason)

    async def close(self) -> None:
        """Wait until nothing writes into the pages, then leave unless everything has come.

        Call `stop` before, after a failure.

        Raises:
            ConnectionBroken: The transport does not become quiet in time.
        """
        if self._line is None:
            return
        try:
            if self.receiver is not None:
                await self.receiver.driver.wait_quiescent()
        finally:
            if self._has_all:  # and the candidate the last acknowledgement, which says as much
                self._line.forget()
            else:
                self._line.leave()

    def _make_receiver(self, incoming: Incoming, line: AttemptLine) -> Receiver:
        assert self._group.pages is not None
        return Receiver(
            ticket=self._ticket,
            page_ids=self._group.pages.page_ids,
            first_page=self._group.pages.num_committed_pages,
            storage=self._storage,
            incoming=incoming,
            send=line.send,  # no method of this attempt: they would form a cycle
            on_commit=self._on_commit,
            deadlines=self._deadlines,
            digests=self._digests,
        )

    def _take_result(self, result: PrefillResult) -> None:
        """Take the first result; later ones would repeat or change tokens."""
        if self.result.done():
            return
        try:
            self._check_result(result)
        except ValueError as error:
            self.result.set_exception(PrefillFailed(f"its result cannot be used: {error}"))
            return
        self._computed_at = asyncio.get_running_loop().time()
        self.result.set_result(result)

    def _check_result(self, result: PrefillResult) -> None:
        """Raise ValueError if a result is not one of the group."""
        found, allowed = len(result.tokens), len(self._group.choices)
        if found != allowed:
            raise ValueError(f"token_ids: found {found} tokens; allowed: {allowed}")
        # A wrong one would fail a pass, which other requests share.
        self._model.check_tokens("token_ids", [each.token_id for each in result.tokens])
        self._check_logprobs(result)
        cached, computed = result.num_cached_tokens, result.num_computed_tokens
        if cached + computed != len(self._group.tokens):  # too large a sum fits no answer
            raise ValueError(
                f"cached_tokens and computed_tokens: found {cached} cached and {computed} computed "
                f"tokens; allowed: {len(self._group.tokens)} in all"
            )

    def _check_logprobs(self, result: PrefillResult) -> None:
        """Raise ValueError unless there are those that were asked for, and no others."""
        most = self._group.request.params.logprobs
        found = sum(each.logprob is not None for each in result.tokens)
        allowed = 0 if most is None else len(result.tokens)
        if found != allowed:
            raise ValueError(f"logprobs: found {found}; allowed: {allowed}")
        for each in result.tokens:
            top = [token_id for token_id, _ in each.top_logprobs]
            if len(top) > (most or 0):
                raise ValueError(
                    f"logprobs.top_token_ids: found {len(top)}; allowed: at most {most}"
                )
            self._model.check_tokens("logprobs.top_token_ids", top)
