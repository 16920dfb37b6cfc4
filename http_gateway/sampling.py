"""The sampling fields, which all generating endpoints share."""

from collections.abc import Mapping
from typing import Any, cast

from http_gateway.constraints import take_constraint
from http_gateway.fields import Fields
from pagewire import SamplingOptions
from pagewire.arguments import MAX_SEED, MAX_UINT32, shown

# Names of OpenAI's API, which the client shares
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
        fields: The fields of the request.
        names: Gets the request's names of options that it names differently.
        openai: Fields of OpenAI's API that this request has, without `seed`.
        max_tokens: Its names of the token limit; where it gives several, they must agree.
    """
    options: dict[str, Any] = {name: fields.take(name) for name in (*openai, *_FURTHER)}
    for name in max_tokens:
        if (value := fields.take(name)) is not None:
            if options.get("max_tokens", value) != value:
                first = names["max_tokens"]
                allowed = f"absent with {first}, or equal to it"
                raise fields.refused(name, f"{shown(value)} beside {first}", allowed)
            options["max_tokens"], names["max_tokens"] = value, name
    options["constraint"] = take_constraint(fields, names)
    seed = fields.integer("seed", -(2**63), MAX_SEED)  # of OpenAI's API, which may be negative
    options["seed"] = None if seed is None else seed % 2**64
    top_k = fields.integer("top_k", -1, MAX_UINT32)
    options["top_k"] = 0 if top_k == -1 else top_k  # off, as vLLM has it
    return cast(SamplingOptions, options)


def field_name(field: str, names: Mapping[str, str]) -> str:
    """Return a request's name of a field in gRPC: sampling.top_p -> top_p."""
    if not field.startswith("sampling."):
        return field
    name, bracket, rest = field.removeprefix("sampling.").partition("[")
    return names.get(name, name) + bracket + rest
