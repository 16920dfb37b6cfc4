"""What a simulated request asks for, and what it must get: pure functions of its own values."""

from dataclasses import dataclass, field

from llm_engine.drawing import FinishReason, finish_reason
from llm_engine.sampling import SamplingParams
from tests.support.fake_engine import FakeModel, fake_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSpec:
    """One request of a run."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    arrives_at: float = 0.0
    cancels_after_s: float | None = None  # the client leaves so long after its arrival
    reads_slowly_s: float = 0.0  # the client pauses so long after each message
    timeout_s: float = 300.0  # a request that takes longer counts as lost
    router: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedChoice:
    """The only right answer for one choice."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason


def expected_choices(
    spec: RequestSpec, *, model: FakeModel, max_context_tokens: int
) -> tuple[ExpectedChoice, ...]:
    """Return the answer of every choice, in order."""
    return tuple(
        _expected_choice(spec, choice, model, max_context_tokens) for choice in range(spec.n)
    )


def _expected_choice(
    spec: RequestSpec, choice: int, model: FakeModel, max_context_tokens: int
) -> ExpectedChoice:
    tokens = fake_tokens(
        spec.prompt,
        spec.params,
        model=model,
        choice=choice,
        max_context_tokens=max_context_tokens,
    )
    reason = finish_reason(
        spec.params,
        num_prompt_tokens=len(spec.prompt),
        output_token_ids=tokens,
        eos_token_ids=model.eos_token_ids,
        max_context_tokens=max_context_tokens,
    )
    assert reason is not None, "the oracle stopped before the end"
    return ExpectedChoice(tokens=tuple(tokens), finish_reason=reason)
