"""Whether a submitted request can be served here at all, before it costs anything."""

from collections.abc import Sequence

from decode_worker.config import DecodeConfig
from decode_worker.errors import InvalidRequest
from decode_worker.request import Request
from protos.sampling_limits import MAX_CHOICES
from worker.errors import Overloaded
from worker.identity import ModelInfo
from worker.sampling_check import check_sampling

# Above them, numbers of the answers would not fit their fields, and end the session with it.
MAX_FIRST_STREAM = 2**64 - MAX_CHOICES
MAX_FAILED_PASSES = 2**32 - 2  # one more may fail, which ends the request


def check_request(
    request: Request, *, config: DecodeConfig, model: ModelInfo, num_waiting: int
) -> None:
    """Check a request against the limits of worker and model.

    Routers validate what clients send. This check keeps a router's bug from harming others.

    Raises:
        InvalidRequest: Names the field, the value and what is allowed.
        Overloaded: Too many requests wait already.
    """
    if not request.prompt:
        raise InvalidRequest("prompt_token_ids: found none; allowed: one or more")
    if not 1 <= len(request.emitted) <= config.max_choices:
        raise InvalidRequest(
            f"choices: found {len(request.emitted)} entries; allowed: 1 to {config.max_choices}"
        )
    _check_tokens("prompt_token_ids", request.prompt, model)
    if not 0 < request.cache_share <= 1:  # nor NaN
        raise InvalidRequest(f"cache_share: found {request.cache_share}; allowed: above 0, up to 1")
    for name, value, most in (
        ("first_stream", request.first_stream, MAX_FIRST_STREAM),
        ("failed_passes", request.num_failed_passes, MAX_FAILED_PASSES),
    ):
        if value > most:
            raise InvalidRequest(f"{name}: found {value}; allowed: 0 to {most}")
    params = request.params
    try:
        check_sampling(params, model)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    for index, output in request.emitted.items():
        if index >= MAX_CHOICES:
            raise InvalidRequest(f"choices: found choice {index}; allowed: 0 to {MAX_CHOICES - 1}")
        if output:
            _check_tokens(f"emitted_token_ids of choice {index}", output, model)
        if len(output) >= params.max_tokens:
            raise InvalidRequest(
                f"choice {index}: found {len(output)} emitted tokens; "
                f"allowed: fewer than {params.max_tokens}, the max_tokens"
            )
        num_tokens = len(request.prompt) + len(output)
        if num_tokens >= model.max_context_tokens:
            raise InvalidRequest(
                f"choice {index}: found {num_tokens} tokens before it; "
                f"allowed: fewer than {model.max_context_tokens}, what the context holds"
            )
    if num_waiting >= config.max_waiting_requests:
        raise Overloaded(f"{num_waiting} of {config.max_waiting_requests} places to wait are taken")


def _check_tokens(field: str, token_ids: Sequence[int], model: ModelInfo) -> None:
    try:
        model.check_tokens(field, token_ids)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
