"""The state of one request's streams: fed with a worker's deltas, drained by the client's call.

It is pure: no clock, no waiting.

Rules, in the order in which a delta meets them:
- it is of an earlier attempt, or its choice is over: dropped;
- tokens that were received before (first_index below the next index): dropped;
- what no worker can mean, such as tokens missing in between, more than max_tokens, an end before
  tokens that came, or log probabilities that are not one per token: WrongDelta, the request is
  resumed elsewhere;
- with max_tokens tokens, the choice ends, whether the worker says so or not;
- a stop string after the first min_tokens tokens: the choice ends there, whatever else the worker
  reports about it.

A call that began at another router starts with the part that its client has; see `resume`.

Output that a client has not taken merges into one per choice, so that a request's memory is bounded
by its tokens. Its text is decoded when it is taken, from all tokens at once; if a stop string may
end the choice, it is decoded token by token as they arrive.

Nearly all news of a choice is one more token. It has a shorter path, in and out (`add_token`,
`take_token`), with the same result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from observability.token_gaps import TokenGaps
from observability.tracing import NO_SPAN
from pagewire.protos.token_ids import unpack_token_ids
from router.detokenizer import Decoder, Detokenizer
from router.errors import InvalidRequest, WrongDelta
from router.request import GenerationRequest
from router.resumption import ReceivedChoice
from router.stop_strings import StopStrings
from router.tokenizer import Tokenizer, WithSpecialTokens


class Finish(Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(kw_only=True, slots=True)  # not frozen: to make one would take many times as long
class WorkerStats:
    """The cost of a request; see RequestStats in protos/common.proto."""

    decode_cached_tokens: int = 0
    prefill_cached_tokens: int = 0
    prefill_computed_tokens: int = 0
    decode_computed_tokens: int = 0
    pages_moved: int = 0
    bytes_moved: int = 0
    preemptions: int = 0
    prefill_retries: int = 0
    resumptions: int = 0
    queue_ms: int = 0
    cached_tokens: int | None = None  # None: no worker has reported it

    def plus(self, other: "WorkerStats") -> "WorkerStats":
        """Return the sum by field; tokens that one attempt computed count as found by none."""
        sums = {
            each.name: getattr(self, each.name) + getattr(other, each.name)
            for each in fields(self)
            if each.name != "cached_tokens"
        }
        told = [each for each in (self.cached_tokens, other.cached_tokens) if each is not None]
        return WorkerStats(**sums, cached_tokens=min(told, default=None))


_NO_STATS = WorkerStats()


@dataclass(kw_only=True, slots=True)  # not frozen: to make one would take many times as long
class Delta:
    """New tokens of one choice, from a decode worker."""

    attempt: int
    choice: int
    first_index: int  # in the output
    token_ids: list[int]
    logprobs: Sequence[Any] = ()  # one per token, or none; passed on as they are
    finish: Finish | None = None
    stats: WorkerStats | None = None  # of the attempt until now


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A request that a decode worker ended without a result."""

    attempt: int
    code: int  # google.rpc.Code
    message: str
    failed_passes: int = 0  # that computed for the request, on all its workers
    is_leaving: bool = False  # the worker leaves as planned


@dataclass(slots=True)
class Output:
    """Output of a choice since the client last took some."""

    choice: int
    first_index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish: Finish | None = None
    stopped_by: str = ""


@dataclass(kw_only=True, slots=True)  # not frozen: to make one would take many times as long
class Timings:
    """Of one finished request, as Usage in protos/inference.proto defines them."""

    ttft_ms: float
    total_ms: float
    tpot_ms: float


class Choice:
    """One of a request's n streams.

    Invariant: `token_ids` are the tokens that the client has or will get, gapless and once each.
    """

    def __init__(self, index: int, request: GenerationRequest, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.is_finished = False
        self.last_token_at: float | None = None  # loop time
        self._end_token_ids = request.end_token_ids
        self._tokenizer = tokenizer
        self._detokenizer = _detokenizer(request, tokenizer)
        self._stop_strings = StopStrings(request.sampling.stop) if request.sampling.stop else None
        self._min_tokens = request.sampling.min_tokens
        self._max_tokens = request.sampling.max_tokens
        # What the client has not taken, besides the tokens from `_num_taken` on.
        self._num_taken = 0
        self._textless: list[int] = []  # tokens that are not decoded yet
        self._text = ""
        self._logprobs: list[Any] = []
        self._told_finish: Finish | None = None
        self._stopped_by = ""
        self.num_resumed = 0  # tokens that the client had before this router began
        self.num_chars_had = 0  # of the text to be decoded, characters that the client has

    def add_token(self, token_id: int, index: int) -> bool:
        """Take over the next token, after which the choice goes on; False: `accept` has to."""
        token_ids = self.token_ids
        if index != len(token_ids) or self.is_finished or self._stop_strings is not None:
            return False
        if index >= self._max_tokens - 1:
            return False
        token_ids.append(token_id)
        self._textless.append(token_id)
        return True

    def accept(self, delta: Delta) -> int:
        """Take over a delta; return how many of its tokens are new.

        Raises:
            WrongDelta: It does not fit; nothing was taken.
        """
        if self.is_finished:
            return 0
        next_index = len(self.token_ids)
        if delta.first_index > next_index:
            raise WrongDelta(
                f"choice {self.index}: tokens {next_index} to {delta.first_index - 1} are missing"
            )
        end = delta.first_index + len(delta.token_ids)
        if end > max(next_index, self._max_tokens):
            raise WrongDelta(
                f"choice {self.index}: found {end} tokens; allowed: at most {self._max_tokens}"
            )
        if len(delta.logprobs) not in (0, len(delta.token_ids)):
            raise WrongDelta(
                f"choice {self.index}: found {len(delta.logprobs)} log probabilities; "
                f"allowed: {len(delta.token_ids)}, one per token"
            )
        finish = delta.finish
        if finish is not None and end < next_index:
            raise WrongDelta(
                f"choice {self.index}: found its end after {end} tokens; allowed: {next_index} or "
                "more, those that came"
            )
        if finish is None and end >= self._max_tokens:
            finish = Finish.LENGTH
        num_known = next_index - delta.first_index
        new_ids = delta.token_ids[num_known:]
        logprobs = delta.logprobs[num_known:]
        has_end = finish is Finish.STOP and bool(new_ids) and new_ids[-1] in self._end_token_ids
        text_ids = new_ids[:-1] if has_end else new_ids
        if self._stop_strings is None:
            self._add(new_ids, logprobs, text_ids)
        else:
            for offset in range(len(new_ids)):
                here = slice(offset, offset + 1)
                self._add(new_ids[here], logprobs[here], text_ids[here])
                self._make_text()
                if self.is_finished:
                    return offset + 1
        if finish is not None:
            self._finish(finish, stopped_by=self._end_token_text(finish))
        return len(new_ids)

    def resume(self, received: ReceivedChoice) -> None:
        """Start after the client's part; that part is decoded again, and its text cut off."""
        token_ids = unpack_token_ids(received.packed_token_ids)
        if received.is_finished:
            self.token_ids = token_ids
            self.is_finished = True
        else:
            self.num_chars_had = received.text_chars
            finish = self._finish_of(token_ids)
            self.accept(
                Delta(
                    attempt=0, choice=self.index, first_index=0, token_ids=token_ids, finish=finish
                )
            )
            self._make_text()
        self.num_resumed = self._num_taken = len(self.token_ids)

    def take(self) -> Output | None:
        """Return what the client has not got yet, if anything."""
        self._make_text()
        first_index = self._num_taken
        new_ids = self.token_ids[first_index:]
        if not new_ids and not self._text and self._told_finish is None:
            return None
        output = Output(
            choice=self.index,
            first_index=first_index,
            token_ids=new_ids,
            text=self._text,
            logprobs=self._logprobs,
            finish=self._told_finish,
            stopped_by=self._stopped_by,
        )
        self._num_taken = len(self.token_ids)
        self._text, self._logprobs = "", []
        self._told_finish, self._stopped_by = None, ""
        return output

    def take_token(self) -> tuple[int, int, str] | None:
        """Return what the client has not got, if that is one token: its index, it, its text."""
        index = self._num_taken
        if len(self.token_ids) != index + 1 or self._told_finish is not None or self._logprobs:
            return None
        self._make_text()
        self._num_taken = index + 1
        text, self._text = self._text, ""
        return index, self.token_ids[index], text

    def _add(self, token_ids: list[int], logprobs: Sequence[Any], text_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self._logprobs += logprobs
        self._textless += text_ids

    def _make_text(self) -> None:
        if token_ids := self._textless:
            self._textless = []
            if self._detokenizer is not None:
                text = self._detokenizer.push(token_ids)
                if self._stop_strings is None and not self.num_chars_had:
                    self._text += text
                else:
                    self._add_text(text)

    def _add_text(self, text: str) -> None:
        if self._stop_strings is None or len(self.token_ids) <= self._min_tokens:
            self._text += self._new(text)
            return
        result = self._stop_strings.push(text)
        self._text += self._new(result.text)
        if result.stopped_by:
            self._end(Finish.STOP, result.stopped_by)

    def _finish(self, finish: Finish | None, *, stopped_by: str) -> None:
        self._make_text()
        if self._detokenizer:
            self._add_text(self._detokenizer.finish())
            if self.is_finished:  # the last half character made up a stop string
                return
        if self._stop_strings is not None:
            self._text += self._new(self._stop_strings.finish())
        self._end(finish, stopped_by)

    def _end(self, finish: Finish | None, stopped_by: str) -> None:
        self.is_finished = True
        self._told_finish, self._stopped_by = finish, stopped_by

    def _new(self, text: str) -> str:
        """Return the part of the next text that the client does not have."""
        had = min(self.num_chars_had, len(text))
        self.num_chars_had -= had
        return text[had:]

    def _finish_of(self, token_ids: Sequence[int]) -> Finish | None:
        """Return the reason with which a worker would have ended these tokens."""
        if token_ids and token_ids[-1] in self._end_token_ids:
            return Finish.STOP
        return Finish.LENGTH if len(token_ids) >= self._max_tokens else None

    def _end_token_text(self, finish: Finish | None) -> str:
        if finish is not Finish.STOP or not self._tokenizer or not self.token_ids:
            return ""
        return self._tokenizer.token_text(self.token_ids[-1])


class Generation:
    """All choices of a request over all its attempts."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.choices = [Choice(i, request, tokenizer) for i in range(request.sampling.n)]
        self.attempt = -1  # of the last begin_attempt
        self.failed_passes = 0  # as told by the last worker that gave up; the next one must know
        self.num_refusals = 0  # attempts that their workers refused
        self.num_resumptions = 0  # attempts that continued an earlier one
        self.decode_workers: list[str] = []  # in order of use
        self.device = ""  # type of the one that drew the newest tokens; empty: unknown
        self.token_gaps: TokenGaps | None = None  # where time between tokens is counted
        self.sent_at = 0.0  # to its first worker; loop time
        self.first_token_at: float | None = None
        self.prefill_s: float | None = None  # first token - begin of the prompt at the worker
        self.last_token_at: float | None = None
        self.finished_at = 0.0  # valid when is_finished
        self.span = NO_SPAN  # of the call
        self.num_unfinished = len(self.choices)
        self.num_tokens = 0  # generated ones of all choices
        self._past_stats: WorkerStats | None = None  # of the attempts before the current one
        self._stats = _NO_STATS  # the newest that the current attempt reported
        self._running: set[int] = set()  # choices that the current worker still works on
        self._stopped: set[int] = set()  # those of them that have ended here

    def resume(self, received: Sequence[ReceivedChoice]) -> None:
        """Go on after the client's part of a call that began at another router.

        Call it first, once; it takes as long as decoding all these tokens.

        Raises:
            InvalidRequest: The client claims more text than its tokens have.
        """
        self.num_resumptions = 1
        for index, each in enumerate(received):
            choice = self.choices[each.choice]
            choice.resume(each)
            if choice.num_chars_had:
                most = each.text_chars - choice.num_chars_had
                raise InvalidRequest(
                    f"resume.choices[{index}].text_chars",
                    str(each.text_chars),
                    f"at most {most}, the characters of its token_ids",
                )
        self.num_unfinished = sum(not choice.is_finished for choice in self.choices)
        self.num_tokens = sum(len(choice.token_ids) for choice in self.choices)

    @property
    def is_finished(self) -> bool:
        return self.num_unfinished == 0

    @property
    def may_have_run(self) -> bool:
        """Whether a worker may have computed something: not all attempts were refused."""
        return self.attempt + 1 > self.num_refusals

    @property
    def is_running_at_worker(self) -> bool:
        """Whether the current attempt's worker holds anything that a cancel would free."""
        return bool(self._running)

    @property
    def stats(self) -> WorkerStats:
        """The cost of all attempts, as far as they reported it."""
        return self._past_stats.plus(self._stats) if self._past_stats else self._stats

    def begin_attempt(self, worker_id: str) -> list[tuple[int, Sequence[int]]]:
        """Count a new attempt and return the choices to continue: (choice, tokens so far)."""
        if self.attempt >= 0:
            self._past_stats, self._stats = self.stats, _NO_STATS
        self.attempt += 1
        self.decode_workers.append(worker_id)
        unfinished = [choice for choice in self.choices if not choice.is_finished]
        self._running = {choice.index for choice in unfinished}
        self._stopped = set()
        return [(choice.index, tuple(choice.token_ids)) for choice in unfinished]

    def accept(self, delta: Delta, now: float) -> bool:
        """Take over a delta; False means that it was stale.

        Raises:
            WrongDelta: It does not fit its choice.
        """
        if delta.attempt != self.attempt or delta.choice >= len(self.choices):
            return False
        if delta.stats:
            self._stats = delta.stats
        choice = self.choices[delta.choice]
        was_finished = choice.is_finished
        if num_new := choice.accept(delta):
            self._count(choice, num_new, now)
        if choice.is_finished and not was_finished:
            self.num_unfinished -= 1
            self._stopped.add(delta.choice)
        if delta.finish is not None:
            self._running.discard(delta.choice)
            self._stopped.discard(delta.choice)
        self.finished_at = now
        return True

    def add_token(self, choice: Choice, token_id: int, index: int, now: float) -> bool:
        """Take over the next token of a choice that goes on; False: `accept` has to."""
        if not choice.add_token(token_id, index):
            return False
        self._count(choice, 1, now)
        return True

    def take_stopped(self) -> list[int]:
        """Return the choices that a stop string ended while others go on; each only once.

        The worker knows no stop strings, so it must be told.
        """
        if not self._stopped or self.is_finished:  # then the whole request is cancelled
            return []
        stopped, self._stopped = list(self._stopped), set()
        self._running.difference_update(stopped)
        return stopped

    def fail_attempt(self, attempt: int) -> bool:
        """Note that the worker gave up; False means that the failure was stale."""
        if attempt != self.attempt:
            return False
        self._running.clear()
        self._stopped.clear()
        return True

    def timings(self) -> "Timings":
        """Return the times of a request that has finished."""
        first_at, last_at = self.first_token_at, self.last_token_at
        if first_at is None or last_at is None:
            first_at = last_at = self.finished_at
        num_gaps = max(len(each.token_ids) - each.num_resumed for each in self.choices) - 1
        return Timings(
            ttft_ms=1000 * (first_at - self.request.arrived_at),
            total_ms=1000 * (self.finished_at - self.request.arrived_at),
            tpot_ms=1000 * (last_at - first_at) / num_gaps if num_gaps > 0 else 0.0,
        )

    def take_outputs(self) -> list[Output]:
        """Return the output that the client does not have yet, at most one per choice."""
        return [output for choice in self.choices if (output := choice.take())]

    def _count(self, choice: Choice, num_new: int, now: float) -> None:
        self.num_tokens += num_new
        if self.first_token_at is None:
            self.first_token_at = now
            begun_at = self.sent_at + self.stats.queue_ms / 1000  # told with the first token
            self.prefill_s = max(0.0, now - begun_at)
        if self.token_gaps and choice.last_token_at is not None:
            self.token_gaps.add(now - choice.last_token_at, num_new)
        self.last_token_at = choice.last_token_at = now


def _detokenizer(request: GenerationRequest, tokenizer: Tokenizer | None) -> Detokenizer | None:
    if tokenizer is None:
        return None
    decoder: Decoder = tokenizer
    if not request.sampling.skip_special_tokens:
        decoder = WithSpecialTokens(tokenizer)
    return Detokenizer(decoder)
