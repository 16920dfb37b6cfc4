"""What a client saw of one request, and the checker that judges it afterwards.

The rules are R1, R2, R3 and R6 of the router's contract:
  one end        every request ends exactly once, with a result or with one status
  no gap         the token indices of each choice are 0, 1, 2 ... without gap or repetition
  nothing after  after the end of a choice none of its tokens come, after the last message none
  right tokens   every token is the oracle's, whatever happened on the way
  bounded work   no more resumptions than allowed
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llm_engine.drawing import FinishReason
from tests.support.oracle import ExpectedChoice, RequestSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """One message of the stream."""

    at: float
    request_id: str
    choice: int
    first_index: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Any = None  # protos Usage, in the last message only


@dataclass(kw_only=True, slots=True)
class RequestHistory:
    """Everything in order; `ends` has one entry in a right history."""

    spec: RequestSpec
    arrived_at: float = 0.0
    deltas: list[Delta] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)  # "OK", "CANCELLED" by the client, or a code
    ended_at: float = 0.0
    details: str = ""  # of the status

    @property
    def usage(self) -> Any:
        return self.deltas[-1].usage if self.deltas else None

    def tokens(self, choice: int) -> tuple[int, ...]:
        return tuple(
            token for delta in self.deltas if delta.choice == choice for token in delta.tokens
        )


def check_history(
    history: RequestHistory,
    expected: Sequence[ExpectedChoice],
    *,
    allowed_ends: Sequence[str] = ("OK",),
    max_resumptions: int = 3,
) -> list[str]:
    """Return the violations, each a sentence; none for a right history."""
    spec = history.spec
    allowed = {*allowed_ends, *(() if spec.cancels_after_s is None else ("CANCELLED",))}
    violations = []
    if len(history.ends) != 1:
        violations.append(f"it ended {len(history.ends)} times: {history.ends}")
    elif history.ends[0] not in allowed:
        violations.append(f"it ended {history.ends[0]} ({history.details})")
    if len({delta.request_id for delta in history.deltas}) > 1:
        violations.append("its messages carry several request ids")
    for choice in sorted({delta.choice for delta in history.deltas} - set(range(spec.n))):
        violations.append(f"choice {choice} was not asked for")
    is_complete = history.ends == ["OK"]
    for choice, answer in enumerate(expected):
        deltas = [delta for delta in history.deltas if delta.choice == choice]
        for violation in _check_choice(deltas, answer, is_complete):
            violations.append(f"choice {choice}: {violation}")
    violations += _check_usage(history, is_complete, max_resumptions)
    return [f"request {spec.name}: {violation}" for violation in violations]


def _check_choice(
    deltas: Sequence[Delta], expected: ExpectedChoice, is_complete: bool
) -> list[str]:
    violations = []
    tokens: list[int] = []
    reason: FinishReason | None = None
    for delta in deltas:
        if reason is not None:
            violations.append(f"index {delta.first_index} came after the end")
        if delta.first_index != len(tokens):
            violations.append(f"index {delta.first_index} came where {len(tokens)} was due")
        tokens += delta.tokens
        reason = delta.finish_reason or reason
    if tuple(tokens) != expected.tokens[: len(tokens)]:
        at = next(
            index
            for index, token in enumerate(tokens)
            if index >= len(expected.tokens) or token != expected.tokens[index]
        )
        violations.append(
            f"token {at} of {len(tokens)} is wrong; the oracle has {len(expected.tokens)}"
        )
    if reason is not None and reason is not expected.finish_reason:
        violations.append(f"finished by {reason}, not by {expected.finish_reason}")
    if reason is not None and len(tokens) < len(expected.tokens):
        violations.append(f"finished with {len(tokens)} of {len(expected.tokens)} tokens")
    if is_complete and reason is None:
        violations.append("never finished though the call ended OK")
    return violations


def _check_usage(history: RequestHistory, is_complete: bool, max_resumptions: int) -> list[str]:
    violations = []
    if any(delta.usage is not None for delta in history.deltas[:-1]):
        violations.append("usage came before the last message")
    usage = history.usage
    if usage is None:
        return [*violations, "no usage at the end"] if is_complete else violations
    num_tokens = sum(len(delta.tokens) for delta in history.deltas)
    if usage.prompt_tokens != len(history.spec.prompt) or usage.completion_tokens != num_tokens:
        violations.append(
            f"usage counts {usage.prompt_tokens} + {usage.completion_tokens} tokens, "
            f"the stream had {len(history.spec.prompt)} + {num_tokens}"
        )
    stats = usage.stats
    num_computed = stats.prefill_computed_tokens + stats.decode_computed_tokens
    if num_tokens and not num_computed:  # the prompt's last token is never cached
        violations.append("usage says that nothing was computed")
    if stats.resumptions > max_resumptions:
        violations.append(f"{stats.resumptions} resumptions, allowed {max_resumptions}")
    return violations
