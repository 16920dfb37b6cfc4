"""The one validator of clients' requests, for all front ends.

Each refusal is an `InvalidRequest` that names the field, the value found and what is allowed; for
sampling parameters it names all wrong fields.
"""

from collections.abc import Callable

import numpy as np

from grammars.constraint import MAX_BYTES, MAX_CHOICES, Constraint, ConstraintKind
from pagewire.chat_arguments import MAX_MESSAGES
from pagewire.protos.token_ids import TOKEN_BYTES
from protos.sampling_limits import MAX_LOGPROBS, MAX_SEED, MAX_STOP_TOKENS, RANGES
from router.errors import InvalidRequest, PromptTooLong, UnknownModel
from router.request import AskedSampling, Sampling, SamplingDefaults, ServedModel
from router.resumption import Resumption

MAX_STOP_STRINGS = 16
_PACKED = np.dtype("<u4")
MAX_STOP_CHARS = 1024
MAX_REQUEST_FIELDS = 10 * MAX_MESSAGES  # with their messages; nine make one with a call of a tool


def check_model(name: str, model: ServedModel) -> None:
    """Refuse a model name that is not served; empty means the only model."""
    if name and name != model.name:
        raise UnknownModel("model", quote(name), f"{quote(model.name)}, or empty")


def check_packed_token_ids(field: str, packed: bytes) -> None:
    """Refuse packed ids that are cut off."""
    if len(packed) % TOKEN_BYTES:
        raise InvalidRequest(field, f"{len(packed)} bytes", "packed uint32: a multiple of 4 bytes")


def check_text(field: str, text: str, max_chars: int) -> None:
    """Refuse an empty text, and one that is too long to tokenize."""
    if not text:
        raise InvalidRequest(field, "an empty text", "at least one character")
    if len(text) > max_chars:
        raise PromptTooLong(field, f"{len(text)} characters", f"at most {max_chars}")


def check_num_messages(field: str, num_messages: int) -> None:
    """Refuse a chat with so many messages that checking each would take long."""
    if num_messages > MAX_MESSAGES:
        raise InvalidRequest(field, f"{num_messages} messages", f"at most {MAX_MESSAGES}")


def check_prompt(packed: bytes, model: ServedModel) -> None:
    """Refuse a prompt that is empty, leaves no room for output or has foreign token ids."""
    num_tokens = len(packed) // TOKEN_BYTES
    if not num_tokens:
        raise InvalidRequest("prompt", "no tokens", "at least one token")
    if num_tokens >= model.max_context_tokens:
        raise PromptTooLong(
            "prompt",
            f"{num_tokens} tokens",
            f"at most {model.max_context_tokens - 1}: the context holds"
            f" {model.max_context_tokens} with at least one token of output",
        )
    _check_vocabulary("prompt.token_ids", packed, model)


def check_tokens(field: str, packed: bytes, model: ServedModel) -> None:
    """Refuse more tokens than the context holds, and foreign token ids."""
    num_tokens = len(packed) // TOKEN_BYTES
    if num_tokens > model.max_context_tokens:
        allowed = f"at most {model.max_context_tokens}, what the context holds"
        raise InvalidRequest(field, f"{num_tokens} tokens", allowed)
    if packed:
        _check_vocabulary(field, packed, model)


def _check_vocabulary(field: str, packed: bytes, model: ServedModel) -> None:
    token_ids = np.frombuffer(packed, dtype=_PACKED)
    if np.maximum.reduce(token_ids) >= model.vocab_size:  # max() is a detour through Python
        index = int(np.argmax(token_ids >= model.vocab_size))  # the first
        found, allowed = str(token_ids[index]), f"0 to {model.vocab_size - 1}"
        raise InvalidRequest(f"{field}[{index}]", found, allowed)


def check_resumption(resumption: Resumption, sampling: Sampling, model: ServedModel) -> None:
    """Refuse output that no caller can have received of a request."""
    seen: set[int] = set()
    for index, each in enumerate(resumption.choices):
        field = f"resume.choices[{index}]"
        if each.choice >= sampling.n or each.choice in seen:
            allowed = f"0 to {sampling.n - 1}, each once"
            raise InvalidRequest(f"{field}.choice", str(each.choice), allowed)
        seen.add(each.choice)
        check_packed_token_ids(f"{field}.token_ids", each.packed_token_ids)
        num_tokens = len(each.packed_token_ids) // TOKEN_BYTES
        if num_tokens > sampling.max_tokens:
            allowed = f"at most {sampling.max_tokens}, the max_tokens of the call"
            raise InvalidRequest(f"{field}.token_ids", f"{num_tokens} tokens", allowed)
        if num_tokens:
            _check_vocabulary(f"{field}.token_ids", each.packed_token_ids, model)
    if sum(each.is_finished for each in resumption.choices) == sampling.n:
        raise InvalidRequest("resume.choices", "all finished", "one or more to continue with")


def complete_sampling(
    asked: AskedSampling,
    *,
    defaults: SamplingDefaults,
    model: ServedModel,
    prompt_len: int,
    has_tokenizer: bool,
    draw_seed: Callable[[], int],
) -> Sampling:
    """Check sampling parameters and fill in unset ones.

    Args:
        asked: The client's parameters.
        defaults: The defaults of the router and the model, checked when they started.
        model: Limits.
        prompt_len: Tokens of the prompt, which is checked already.
        has_tokenizer: Whether stop strings and constraints can be served.
        draw_seed: Called when no seed is given, so that a resumed stream draws the same tokens.

    Raises:
        InvalidRequest: A value is out of range, not finite or contradicts another.
    """
    refusals = _Refusals()
    integer, number = refusals.integer, refusals.number
    room = model.max_context_tokens - prompt_len
    max_tokens = integer("max_tokens", asked.max_tokens, room, 1, 2**32 - 1)
    min_tokens = integer("min_tokens", asked.min_tokens, 0, 0, 2**32 - 1)
    if min_tokens > min(max_tokens, room):
        refusals.add(
            "min_tokens",
            str(min_tokens),
            f"at most {min(max_tokens, room)}, the most tokens that an answer may have here",
        )
    top_k = integer("top_k", asked.top_k, defaults.top_k, 0, 2**32 - 1)
    _check_stop_strings(asked.stop, refusals, has_tokenizer=has_tokenizer)
    _check_constraint(asked, model, refusals, has_tokenizer=has_tokenizer)
    _check_stop_tokens(asked, model, refusals)
    sampling = Sampling(
        temperature=number("temperature", asked.temperature, defaults.temperature),
        top_p=number("top_p", asked.top_p, defaults.top_p),
        top_k=0 if top_k >= model.vocab_size else top_k,
        min_p=number("min_p", asked.min_p, defaults.min_p),
        repetition_penalty=number(
            "repetition_penalty", asked.repetition_penalty, defaults.repetition_penalty
        ),
        presence_penalty=number("presence_penalty", asked.presence_penalty, 0.0),
        frequency_penalty=number("frequency_penalty", asked.frequency_penalty, 0.0),
        seed=draw_seed() if asked.seed is None else integer("seed", asked.seed, 0, 0, MAX_SEED),
        max_tokens=min(max_tokens, room),
        min_tokens=min_tokens,
        stop=asked.stop,
        stop_token_ids=asked.stop_token_ids,
        ignore_eos=asked.ignore_eos,
        n=integer("n", asked.n, 1, 1, model.max_choices),
        logprobs=(
            None
            if asked.logprobs is None
            else integer("logprobs", asked.logprobs, 0, 0, min(MAX_LOGPROBS, model.vocab_size))
        ),
        skip_special_tokens=asked.skip_special_tokens,
        constraint=asked.constraint,
    )
    refusals.raise_any()
    return sampling


def end_token_ids(sampling: Sampling, model: ServedModel) -> frozenset[int]:
    """Return the tokens that end a choice."""
    eos = () if sampling.ignore_eos else model.eos_token_ids
    return frozenset(eos) | frozenset(sampling.stop_token_ids)


class _Refusals:
    """Collects the faults of sampling parameters, so that a caller learns all of them at once."""

    def __init__(self) -> None:
        self._errors: list[InvalidRequest] = []

    def add(self, name: str, found: str, allowed: str) -> None:
        """Note a wrong field; one note for each keeps a status small enough for gRPC."""
        self._errors.append(InvalidRequest(f"sampling.{name}", found, allowed))

    def number(self, name: str, value: float | None, default: float) -> float:
        """Return the value, or the default where there is none or a wrong one."""
        if value is None:
            return default
        if not RANGES[name].holds(value):
            self.add(name, repr(value), RANGES[name].allowed)
            return default
        return value

    def integer(self, name: str, value: int | None, default: int, low: int, high: int) -> int:
        """Return the value, or the default where there is none or a wrong one."""
        if value is None:
            return default
        if not low <= value <= high:
            self.add(name, str(value), f"{low} to {high}")
            return default
        return value

    def raise_any(self) -> None:
        """Raise one error for all faults."""
        if self._errors:
            first, *others = self._errors
            raise InvalidRequest(first.field, first.found, first.allowed, *others)


def _check_stop_strings(stop: tuple[str, ...], refusals: _Refusals, *, has_tokenizer: bool) -> None:
    if stop and not has_tokenizer:
        allowed = "none: this router has no tokenizer and makes no text; use stop_token_ids"
        refusals.add("stop", f"{len(stop)} strings", allowed)
        return
    if len(stop) > MAX_STOP_STRINGS:
        refusals.add("stop", f"{len(stop)} strings", f"at most {MAX_STOP_STRINGS}")
        return
    for index, each in enumerate(stop):
        if not 1 <= len(each) <= MAX_STOP_CHARS:
            allowed = f"1 to {MAX_STOP_CHARS} characters"
            refusals.add(f"stop[{index}]", f"{len(each)} characters", allowed)
            return


def _check_constraint(
    asked: AskedSampling, model: ServedModel, refusals: _Refusals, *, has_tokenizer: bool
) -> None:
    """Note parameters that contradict a constraint, which alone decides where an answer ends."""
    if asked.constraint is None:
        return
    kind = asked.constraint.kind.value
    if not has_tokenizer:
        refusals.add("constraint", kind, "none: this router has no tokenizer to try it with")
    elif not model.eos_token_ids:
        refusals.add("constraint", kind, "none: the model has no end token, so no answer could end")
    elif (num_bytes := asked.constraint.num_bytes) > MAX_BYTES:
        refusals.add(f"constraint.{kind}", f"{num_bytes} bytes", f"at most {MAX_BYTES} bytes")
    elif asked.constraint.kind is ConstraintKind.CHOICE:
        _check_choices(asked.constraint, refusals)
    if asked.ignore_eos:
        refusals.add("ignore_eos", "true", f"false where constraint says {kind}")
    if asked.min_tokens:
        refusals.add("min_tokens", str(asked.min_tokens), f"0 where constraint says {kind}")


def _check_choices(constraint: Constraint, refusals: _Refusals) -> None:
    if not 1 <= len(constraint.choices) <= MAX_CHOICES:
        found = f"{len(constraint.choices)} texts"
        refusals.add("constraint.choice", found, f"1 to {MAX_CHOICES}")
    elif "" in constraint.choices:
        field = f"constraint.choice[{constraint.choices.index('')}]"
        refusals.add(field, "an empty text", "at least one character")


def _check_stop_tokens(asked: AskedSampling, model: ServedModel, refusals: _Refusals) -> None:
    if len(asked.stop_token_ids) > MAX_STOP_TOKENS:
        found = f"{len(asked.stop_token_ids)} ids"
        refusals.add("stop_token_ids", found, f"at most {MAX_STOP_TOKENS}")
        return
    for index, token_id in enumerate(asked.stop_token_ids):
        if not 0 <= token_id < model.vocab_size:
            allowed = f"0 to {model.vocab_size - 1}"
            refusals.add(f"stop_token_ids[{index}]", str(token_id), allowed)
            return
    eos = () if asked.ignore_eos else model.eos_token_ids
    if asked.min_tokens and len({*eos, *asked.stop_token_ids}) >= model.vocab_size:
        refusals.add(
            "stop_token_ids",
            "every token of the vocabulary",
            "fewer, or min_tokens 0: before min_tokens no stop token can be drawn",
        )


def quote(name: str) -> str:
    """Return a name as an error shows it."""
    return repr(name if len(name) <= 100 else name[:100] + "...")
