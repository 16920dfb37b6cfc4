"""A request's share of its workers' load, counted at the moment of the decision."""

from router.worker import Worker


class Placement:
    """The place of one attempt of a request; released exactly once.

    Args:
        decode: The worker that owns the request.
        prefill: Candidates, best first.
        computing: The worker that is expected to compute the prompt.
        num_computed_tokens: Tokens that it has to compute.
        prompt_len: Tokens of the prompt.
        num_pages: Pages that the decode worker has to find for it.
        num_sequences: Choices of the request.
    """

    def __init__(
        self,
        decode: Worker,
        prefill: list[Worker],
        *,
        computing: Worker,
        num_computed_tokens: int,
        prompt_len: int,
        num_pages: int,
        num_sequences: int,
    ) -> None:
        self.decode = decode
        self.prefill = prefill
        self._computing = computing
        self._num_computed_tokens = num_computed_tokens
        self._prompt_len = prompt_len
        self._num_pages = num_pages
        self._num_sequences = num_sequences
        self._started_at: float | None = None  # loop time of the first token
        self._is_released = False
        decode.num_requests += 1
        decode.num_sequences += num_sequences
        decode.num_waiting += 1
        decode.num_waiting_tokens += prompt_len
        decode.num_awaited_pages += num_pages
        computing.queued_tokens += num_computed_tokens

    def prefilled(self, now: float) -> None:
        """Note the first token: the prompt is computed, and its pages are held."""
        if self._started_at is None and not self._is_released:
            self._started_at = now
            self._stop_waiting()
            self.decode.holding.start(now)

    def release(self, now: float) -> None:
        """Note the end of the attempt."""
        if self._is_released:
            return
        self._is_released = True
        if self._started_at is None:
            self._stop_waiting()
        else:
            self.decode.holding.end(self._started_at, now)
        self.decode.num_requests -= 1
        self.decode.num_sequences -= self._num_sequences

    def _stop_waiting(self) -> None:
        self._computing.queued_tokens -= self._num_computed_tokens
        self.decode.num_waiting -= 1
        self.decode.num_waiting_tokens -= self._prompt_len
        self.decode.num_awaited_pages -= self._num_pages
