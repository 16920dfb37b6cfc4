"""How many prompt tokens a step may compute beside decodes without making them late.

Prefill that shares a step with decodes lengthens the step, and so the time between two tokens of
every sequence that decodes here. A chunk's cost depends on the model, the device, the context and
on whether steps are recorded, so it is measured, not configured. Pure: durations come in as values.

Source: chunks that are sized to a latency target, as in Sarathi-Serve (Agrawal et al., 2024).
"""

from llm_engine.engine_api import FULL_SHARE

MIN_SHARE = 0.5  # of the decodes' time: what prompts get even if the budget leaves them less
MAX_SHARED = 32  # steps with decodes and a chunk, after which one without shows what decodes take
LIMIT_BOUND = FULL_SHARE  # of the limit: from this size on a step shows whether more would fit


class ChunkBudget:
    """Adapts the limit of prompt tokens to the durations of steps.

    The limit moves to the size whose measured cost fills the time that the decodes leave of the
    budget. It changes by at most a factor of two per step, so a single slow step, which any stall
    of the host can cause, costs little. While all steps have chunks, now and then one goes without,
    since the batch changes, and what its decodes take with it.

    Args:
        budget_s: How long a step that also decodes may take, or half as long again as its decodes
            alone if that is more; 0: no limit.
        min_tokens: Lower bound of the limit, kept even if it takes longer: prompts make progress.
        max_tokens: Upper bound of the limit.
    """

    def __init__(self, *, budget_s: float, min_tokens: int, max_tokens: int) -> None:
        self._budget_s = budget_s
        self._min_tokens = min(min_tokens, max_tokens)
        self._max_tokens = max_tokens
        self._limit = float(self._min_tokens if budget_s else max_tokens)
        self._decode_s = 0.0  # the last step without a chunk; 0: unknown
        self._num_shared = 0  # steps with decodes and a chunk since then

    @property
    def num_tokens(self) -> int:
        """Return how many prompt tokens a step with decodes may compute."""
        return int(self._limit) if self._num_shared < MAX_SHARED else 0

    def observe(self, *, num_decodes: int, num_chunk_tokens: int, seconds: float) -> None:
        """Take the duration of a step into account."""
        if not self._budget_s or seconds <= 0:
            return
        if not num_chunk_tokens:
            self._decode_s = seconds
            self._num_shared = 0
            return
        self._num_shared += num_decodes > 0
        if num_decodes and seconds <= self._decode_s:
            self._decode_s = 0.0  # that step had stalled: unknown until the next without a chunk
        decode_s = self._decode_s if num_decodes else 0.0
        # Proportional: the larger the chunk, the less this overstates its cost per token.
        budget_s = max(self._budget_s, (1 + MIN_SHARE) * self._decode_s)
        left_s = budget_s - self._decode_s
        fits = num_chunk_tokens * left_s / max(seconds - decode_s, 1e-6)
        is_late = num_decodes > 0 and seconds > budget_s
        # In whole tokens, as chunks are chosen. Otherwise a full pass just below the bound would be
        # chosen again and again, and the limit would never change.
        if is_late or num_chunk_tokens >= LIMIT_BOUND * int(self._limit):
            fits = min(max(fits, self._limit / 2), self._limit * 2)
            self._limit = min(max(fits, self._min_tokens), self._max_tokens)
