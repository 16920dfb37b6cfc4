"""The calls of one GenerateMany stream: begins each, and collects the news of all for its writer.

A call with news is noted, and the writer takes what each noted one has. While the writer is
blocked, the calls' generations merge what arrives. A call holds its place until the writer has
taken its end.

After many refusals in a row, the caller's next messages are read more slowly.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from google.rpc import status_pb2

from router import wire
from router.call import Call
from router.errors import InvalidRequest, Overloaded
from router.pacing import SHARED_CALL_US, Pace
from router.statuses import status_of

MOST_RESULTS = 128  # that a message begins to add to
_MOST_NEWS = 1024  # that wait for the writer before no more calls begin
_LONGEST_INTERVAL_S = 10.0  # as protos/inference.proto says; some memory is held as long
_MOST_REFUSED = 16  # one after the other, before the caller has to wait
_LONGEST_PAUSE_S = 1.0  # cancellations wait as long
_PACE = Pace(message_us=SHARED_CALL_US)


class ManyCalls:
    """Owns the calls of a stream.

    Args:
        make_call: Makes a call, given what is to be told of its news.
        cancelled: The status of a call that its caller cancels.
        is_one_caller: Whether all calls are of one tenant, which may be made to wait.
    """

    def __init__(
        self,
        make_call: Callable[[Callable[[], None]], Call],
        *,
        cancelled: status_pb2.Status,
        is_one_caller: bool,
    ) -> None:
        self._make_call = make_call
        self._is_one_caller = is_one_caller
        self._num_refused = 0  # of the latest calls, one after the other, as they began
        self._pause_s = 0.0  # what the last refusal asked for
        self._cancelled_status = cancelled.SerializeToString()
        self._calls: dict[int, Call] = {}  # call id |-> call that is not over
        self._noted: set[Call] = set()  # those of `_news`
        self._news: deque[tuple[int, Call | None]] = deque()  # None: it was cancelled
        self._has_news = asyncio.Event()  # there are some, or the calls are over
        self._is_taken = asyncio.Event()
        self._is_closed = False  # the caller starts no more
        self._error: Exception | None = None

    def start(self, message: Any) -> None:
        """Start the call that a GenerateManyRequest asks for.

        Raises:
            InvalidRequest: A call with this id still runs.
        """
        call_id = message.call_id
        if call_id in self._calls:
            raise InvalidRequest("call_id", f"{call_id}, which still runs", "one that does not")
        call = self._calls[call_id] = self._make_call(partial(self._note, call_id))
        pace = _PACE
        if message.interval_ms:
            least_s = min(message.interval_ms / 1000, _LONGEST_INTERVAL_S)
            pace = Pace(message_us=SHARED_CALL_US, least_s=least_s)
        call.begin(message.start, message.timeout_ms / 1000 or None, pace)
        if isinstance(call.error, Overloaded):
            self._num_refused += 1
            self._pause_s = call.error.retry_delay_s
        else:
            self._num_refused = 0

    def cancel(self, call_id: int) -> None:
        """Cancel a call, if it still runs."""
        call = self._calls.pop(call_id, None)
        if call:
            call.cancel()
            self._news.append((call_id, None))
            self._has_news.set()

    def close(self, error: Exception | None = None) -> None:
        """Note that no more calls start; an error ends the stream at once."""
        self._is_closed = True
        self._error = error
        self._has_news.set()

    async def take(self) -> Any:
        """Wait for news, and return some as a GenerateManyResponse; None: all calls are over.

        Raises:
            Exception: The argument of `close`.
        """
        response = wire.many_response()
        results = response.results
        while not results:
            while not self._news and not self._error:
                if self._is_closed and not self._calls:
                    return None
                self._has_news.clear()
                await self._has_news.wait()
            if self._error:
                raise self._error
            # A caller that reads late gets much at once, but no message may be too long.
            while self._news and len(results) < MOST_RESULTS:
                call_id, call = self._news.popleft()
                if call is None:
                    results.add(call_id=call_id, error_status=self._cancelled_status)
                else:
                    self._noted.discard(call)
                    self._take(call_id, call, results)
            self._is_taken.set()
        return response

    async def wait_taken(self) -> None:
        """Wait while there is much news. Starting a call waits as well: each ends with a result."""
        while len(self._news) >= _MOST_NEWS:
            self._is_taken.clear()
            await self._is_taken.wait()

    async def wait_for_retry(self) -> None:
        """After many refusals in a row, wait as long as the latest one asked, within bounds."""
        if self._is_one_caller and self._num_refused >= _MOST_REFUSED:
            await asyncio.sleep(min(self._pause_s, _LONGEST_PAUSE_S))

    def stop(self) -> None:
        """Cancel running calls."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.cancel()

    def _note(self, call_id: int) -> None:
        call = self._calls.get(call_id)
        if call is not None and call not in self._noted:
            self._noted.add(call)
            self._news.append((call_id, call))
            self._has_news.set()

    def _take(
        self,
        call_id: int,
        call: Call,
        results: Any,
    ) -> None:
        if self._calls.get(call_id) is not call:
            return  # it was cancelled
        call.take(lambda: results.add(call_id=call_id).response)
        if call.is_over:
            del self._calls[call_id]
            call.close()
            if call.error:
                status = status_of(call.error).SerializeToString()
                results.add(call_id=call_id, error_status=status)
