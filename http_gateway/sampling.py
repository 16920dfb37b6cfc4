"""The sampling fields, which all generating endpoints share."""

from collections.abc import Mapping
from typing import Any, cast

from http_gateway.constraints import take_constraint
from http_gateway.errors import HttpError, http_error, joined
from http_gateway.fields import Fields
from pagewire import InvalidRequestError, SamplingOptions
from pagewire.arguments import MAX_SEED, MAX_UINT32, check_sampling
from pagewire.shown import shown

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
# name, least, most: a seed of OpenAI's API may be negative, and -1 turns vLLM's top_k off
_OF_OTHER_RANGES = (("seed", -(2**63), MAX_SEED), ("top_k", -1, MAX_UINT32))


def take_sampling(
    fields: Fields,
    names: dict[str, str],
    *,
    openai: tuple[str, ...] = _OPENAI,
    max_tokens: tuple[str, ...],
) -> SamplingOptions:
    """Take the sampling fields of a request, which the client's validator checks.

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
    wrong: list[HttpError] = []
    for name, low, high in _OF_OTHER_RANGES:
        try:
            options[name] = fields.integer(name, low, high)
        except HttpError as error:
            wrong.append(error)
    if wrong:
        try:
            check_sampling(options)
        except InvalidRequestError as error:  # those that are wrong, too
            wrong.append(http_error(error, lambda field: field_name(field, names)))
        raise joined(wrong)
    if options["seed"] is not None:
        options["seed"] %= 2**64
    if options["top_k"] == -1:
        options["top_k"] = 0
    return cast(SamplingOptions, options)


def field_name(field: str, names: Mapping[str, str]) -> str:
    """Return a request's name of a field in gRPC: sampling.top_p -> top_p."""
    if not field.startswith("sampling."):
        return field
    name, bracket, rest = field.removeprefix("sampling.").partition("[")
    return names.get(name, name) + bracket + rest
