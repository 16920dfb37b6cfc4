"""A request's share of its workers' load, counted at the moment of the decision."""

from router.worker_registry import Worker


class Placement:
    """Where one attempt of a request is; released exactly once."""

    def __init__(self, decode: Worker, prefill: list[Worker], uncached_tokens: int) -> None:
        self.decode = decode
        self.prefill = prefill  # candidates, best first
        self._decode_is_counted = True
        self._uncached_tokens = uncached_tokens
        decode.num_requests += 1
        self._computing = prefill[0] if prefill else decode
        self._computing.queued_tokens += uncached_tokens

    def prefilled(self) -> None:
        """The first token is here: the prompt is computed."""
        self._computing.queued_tokens -= self._uncached_tokens
        self._uncached_tokens = 0

    def release(self) -> None:
        self.prefilled()
        if self._decode_is_counted:
            self._decode_is_counted = False
            self.decode.num_requests -= 1
