"""The calls of one GenerateMany stream: begins each, and collects the news of all for its writer.

A call with news is noted, and the writer takes what each noted one has. While the writer is
blocked, the calls' generations merge what arrives. A call holds its place until the writer has
taken its end.

Nearly all news of a call is one more token. To a caller that reads columns, the tokens of all calls
go in these, which cost a fraction of a message within the message for each.

After many refusals in a row, the caller's next messages are read more slowly.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from google.rpc import status_pb2

from router import wire
from router.call import Call
from router.errors import InvalidRequest, Overloaded, StreamIdle
from router.idle_streams import IDLE_S, IdleStreams
from router.pacing import ROW_US, SHARED_CALL_US, Pace
from router.statuses import status_of

MOST_RESULTS = 128  # that a message begins to add to
_MOST_NEWS = 1024  # that wait for the writer before no more calls begin
_LONGEST_INTERVAL_S = 10.0  # as protos/inference.proto says; some memory is held as long
_MOST_REFUSED = 16  # one after the other, before the caller has to wait
_LONGEST_PAUSE_S = 1.0  # cancellations wait as long
_PACE, _ROW_PACE = Pace(message_us=SHARED_CALL_US), Pace(message_us=ROW_US)


class ManyCalls:
    """Owns the calls of a stream.

    Args:
        make_call: Makes a call, given what is to be told of its news.
        cancelled: The status of a call that its caller cancels.
        is_one_caller: Whether all calls are of one tenant, which may be made to wait.
        reads_tokens: Whether the caller reads GenerateManyResponse.tokens.
        idle: Ends this stream if no call runs for too long.
    """

    def __init__(
        self,
        make_call: Callable[[Callable[[], None]], Call],
        *,
        cancelled: status_pb2.Status,
        is_one_caller: bool,
        reads_tokens: bool,
        idle: IdleStreams,
    ) -> None:
        self._make_call = make_call
        self._is_one_caller = is_one_caller
        self._reads_tokens = reads_tokens
        self._num_refused = 0  # of the latest calls, one after the other, as they began
        self._pause_s = 0.0  # what the last refusal asked for
        self._cancelled_status = cancelled.SerializeToString()
        self._calls: dict[int, _Begun] = {}  # call id |-> call that is not over
        self._news: deque[_Begun] = deque()  # each once
        self._has_news = asyncio.Event()  # there are some, or the calls are over
        self._is_taken = asyncio.Event()
        self._is_closed = False  # the caller starts no more
        self._error: Exception | None = None
        self._idle = idle
        self._note_idle()

    def start(self, message: Any) -> None:
        """Start the call that a GenerateManyRequest asks for.

        Raises:
            InvalidRequest: A call with this id still runs.
        """
        call_id = message.call_id
        if call_id in self._calls:
            raise InvalidRequest("call_id", f"{call_id}, which still runs", "one that does not")
        self._idle.discard(self)
        begun = self._calls[call_id] = _Begun(call_id, self._news, self._has_news)
        call = begun.call = self._make_call(begun.note)
        sampling = message.start.sampling
        in_rows = self._reads_tokens and sampling.n <= 1 and not sampling.HasField("logprobs")
        pace = _ROW_PACE if in_rows else _PACE
        if message.interval_ms:
            pace = replace(pace, least_s=min(message.interval_ms / 1000, _LONGEST_INTERVAL_S))
        call.begin(message.start, message.timeout_ms / 1000 or None, pace)
        if isinstance(call.error, Overloaded):
            self._num_refused += 1
            self._pause_s = call.error.retry_delay_s
        else:
            self._num_refused = 0

    def cancel(self, call_id: int) -> None:
        """Cancel a call, if it still runs."""
        begun = self._calls.pop(call_id, None)
        if begun:
            begun.is_cancelled = True
            begun.call.cancel()
            del begun.call  # news may wait long, and prompts are large
            begun.note()
            self._note_idle()

    def close(self, error: Exception | None = None) -> None:
        """Note that no more calls start; an error ends the stream at once."""
        self._idle.discard(self)
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
        tokens = _Columns()
        while not results and not tokens.call_ids:
            while not self._news and not self._error:
                if self._is_closed and not self._calls:
                    return None
                self._has_news.clear()
                await self._has_news.wait()
            if self._error:
                raise self._error
            # A caller that reads late gets much at once, but no message may be too long.
            now = asyncio.get_running_loop().time()
            while self._news and len(results) + len(tokens.call_ids) < MOST_RESULTS:
                begun = self._news.popleft()
                if begun.is_cancelled:  # and stays noted: a timer of its stream may call again
                    results.add(call_id=begun.call_id, error_status=self._cancelled_status)
                    continue
                begun.is_noted = False
                if self._calls.get(begun.call_id) is begun:
                    token = begun.call.take_token(now) if self._reads_tokens else None
                    if token is not None:
                        tokens.add(begun.call_id, *token)
                    else:
                        self._take(begun, results)
            self._is_taken.set()
        if tokens.call_ids:
            tokens.write(response.tokens)
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
        self._idle.discard(self)
        calls, self._calls = self._calls, {}
        for begun in calls.values():
            begun.call.cancel()
            del begun.call

    def _take(self, begun: "_Begun", results: Any) -> None:
        call_id, call = begun.call_id, begun.call
        call.take(lambda: results.add(call_id=call_id).response)
        if call.is_over:
            del self._calls[call_id], begun.call
            call.close()
            if call.error:
                status = status_of(call.error).SerializeToString()
                results.add(call_id=call_id, error_status=status)
            self._note_idle()

    def _note_idle(self) -> None:
        if not self._calls and not self._is_closed:
            self._idle.add(self, lambda: self.close(StreamIdle(IDLE_S)))


class _Begun:
    """A call that was begun.

    A timer of its stream may hold this for long after its end, which `call` does not outlast.
    """

    __slots__ = ("_has_news", "_news", "call", "call_id", "is_cancelled", "is_noted")

    call: Call

    def __init__(self, call_id: int, news: "deque[_Begun]", has_news: asyncio.Event) -> None:
        self.call_id = call_id
        self.is_cancelled = False
        self.is_noted = False  # among the news
        self._news = news
        self._has_news = has_news

    def note(self) -> None:
        """Note that it has news."""
        if not self.is_noted:
            self.is_noted = True
            if not self._news:
                self._has_news.set()
            self._news.append(self)


class _Columns:
    """The content of a CallTokens message."""

    def __init__(self) -> None:
        self.call_ids: list[int] = []
        self._indices: list[int] = []
        self._token_ids: list[int] = []
        self._texts: list[str] = []

    def add(self, call_id: int, index: int, token_id: int, text: str) -> None:
        """Add a token of a call that has none here."""
        self.call_ids.append(call_id)
        self._indices.append(index)
        self._token_ids.append(token_id)
        self._texts.append(text)

    def write(self, message: Any) -> None:
        """Write all into an empty message."""
        message.call_ids.extend(self.call_ids)
        message.indices.extend(self._indices)
        message.token_ids.extend(self._token_ids)
        message.texts.extend(self._texts)
