"""Assembles the deltas of a stream into a completion. Pure."""

from dataclasses import dataclass, field

from pagewire.types import Choice, Completion, Delta, TokenLogprob, Usage


@dataclass(kw_only=True, slots=True)
class _ChoiceSoFar:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stopped_by: str | None = None


class CompletionBuilder:
    """Collects deltas of interleaved choices; `completion` is the answer so far."""

    def __init__(self, num_choices: int) -> None:
        self._choices = [_ChoiceSoFar() for _ in range(num_choices)]
        self._request_id = ""
        self._usage: Usage | None = None

    def add(self, delta: Delta) -> None:
        """Append one delta."""
        choice = self._choices[delta.choice]
        choice.text.append(delta.text)
        choice.token_ids += delta.token_ids
        self._request_id = delta.request_id
        if delta.logprobs:
            choice.logprobs += delta.logprobs
        if delta.finish_reason:
            choice.finish_reason, choice.stopped_by = delta.finish_reason, delta.stopped_by
        if delta.usage:
            self._usage = delta.usage

    @property
    def completion(self) -> Completion:
        """The answer so far; `usage` is set once the stream has ended."""
        return Completion(
            request_id=self._request_id,
            choices=tuple(
                Choice(
                    text="".join(choice.text),
                    token_ids=tuple(choice.token_ids),
                    logprobs=tuple(choice.logprobs),
                    finish_reason=choice.finish_reason,
                    stopped_by=choice.stopped_by,
                )
                for choice in self._choices
            ),
            usage=self._usage,
        )
