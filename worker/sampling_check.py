"""Checks sampling parameters, from any sender, before they reach an engine.

Routers validate what clients send and fill in defaults. This check keeps a value that an engine
cannot take from getting there all the same: a failed pass costs all requests of its batch.
How much a field may hold was checked when its message was read (see protos/peer_limits.py).
"""

from grammars.constraint import Constraint
from grammars.errors import GrammarError
from llm_engine.sampling import SamplingParams
from protos.sampling_limits import MAX_LOGPROBS, MAX_SEED, RANGES
from worker.identity import ModelInfo


def constraint_refusal(constraint: Constraint, error: GrammarError) -> str:
    """Return the message for a constraint that cannot be followed, the same in both pools."""
    field = f"sampling.constraint.{constraint.kind.value}"
    return f"{field}: found {error.found}; allowed: {error.allowed}"


def check_sampling(params: SamplingParams, model: ModelInfo) -> None:
    """Check complete parameters against the contract and the model.

    Raises:
        ValueError: Names the field, the value and what is allowed.
    """
    for name, allowed in RANGES.items():
        value = getattr(params, name)
        if not allowed.holds(value):
            raise ValueError(f"sampling.{name}: found {value}; allowed: {allowed.allowed}")
    most = {
        "top_k": (0, model.vocab_size),
        "seed": (0, MAX_SEED),
        "max_tokens": (1, 2**32 - 1),
        "min_tokens": (0, params.max_tokens),
        "logprobs": (0, min(MAX_LOGPROBS, model.vocab_size)),
    }
    for name, (low, high) in most.items():
        value = getattr(params, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"sampling.{name}: found {value}; allowed: {low} to {high}")
    model.check_tokens("sampling.stop_token_ids", params.stop_token_ids)
    if params.constraint is not None:
        if params.ignore_eos or not model.eos_token_ids:
            raise ValueError(
                "sampling.constraint: found one; allowed: none where no end token ends"
            )
        if params.min_tokens:
            raise ValueError(
                f"sampling.min_tokens: found {params.min_tokens}; allowed: 0 with a constraint"
            )
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else model.eos_token_ids)}
    if params.min_tokens and len(ends) >= model.vocab_size:
        raise ValueError(
            f"sampling.min_tokens: found {params.min_tokens}; allowed: 0 where every token is a "
            "stop token: none could be drawn before"
        )
