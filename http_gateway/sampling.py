"""The fields that say how tokens are drawn, which all ways to generate share."""

from collections.abc import Mapping
from typing import Any, cast

from http_gateway.constraints import take_constraint
from http_gateway.fields import Fields
from pagewire import SamplingOptions

# By the names of OpenAI's API, which are those of the client
_OPENAI = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "stop", "n")
# Further ones, as vLLM names them
_FURTHER = (
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
)


def take_sampling(
    fields: Fields,
    names: dict[str, str],
    *,
    openai: tuple[str, ...] = _OPENAI,
    max_tokens: tuple[str, ...],
) -> SamplingOptions:
    """Take the sampling fields of a request, which the client's validator then checks.

    Args:
        fields: Of the request.
        names: Gets what the request calls options that have another name there.
        openai: Fields of OpenAI's API that this request has, without `seed`.
        max_tokens: What it calls the number of tokens; the last one given counts.
    """
    options: dict[str, Any] = {name: fields.take(name) for name in (*openai, *_FURTHER)}
    for name in max_tokens:
        if (value := fields.take(name)) is not None:
            options["max_tokens"], names["max_tokens"] = value, name
    options["constraint"] = take_constraint(fields, names)
    options["seed"] = _seed(fields.take("seed"))
    top_k = fields.take("top_k")
    options["top_k"] = 0 if type(top_k) is int and top_k == -1 else top_k  # off, as vLLM has it
    return cast(SamplingOptions, options)


def field_name(field: str, names: Mapping[str, str]) -> str:
    """Return what a request calls a field that gRPC names: sampling.top_p -> top_p."""
    if not field.startswith("sampling."):
        return field
    name, bracket, rest = field.removeprefix("sampling.").partition("[")
    return names.get(name, name) + bracket + rest


def _seed(seed: object) -> object:
    """Return a seed of OpenAI's API, which may be negative, as one of 64 bits without a sign."""
    is_negative = type(seed) is int and -(2**63) <= seed < 0
    return seed % 2**64 if is_negative else seed  # type: ignore[operator]
