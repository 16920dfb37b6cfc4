"""A request in its two forms: as the client sent it, and complete."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from grammars.constraint import Constraint
from pagewire.protos.token_ids import TOKEN_BYTES
from protos.sampling_limits import MAX_CHOICES
from router.tenants.tenant import NO_TENANT, TenantRules

_CAPACITIES = ("max_context_tokens", "max_choices")  # in which workers may differ
_RANGES = {  # of a model that can be served; a prompt and its output have at least one token each
    "vocab_size": (1, 2**24),
    "max_context_tokens": (2, 2**31 - 1),
    "page_size": (1, 2**20),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The model that the workers serve: the same on all workers of a router, except capacities.

    A worker whose pages hold less than the model's context reports their capacity.
    """

    name: str
    fingerprint: str  # identity of weights and configuration
    vocab_size: int  # token ids are below it
    max_context_tokens: int  # longest prompt plus output
    page_size: int  # token slots in a page
    eos_token_ids: tuple[int, ...] = ()
    max_choices: int = MAX_CHOICES  # of one request

    def fault(self) -> str:
        """Say which field no model can have; empty: none."""
        for name, (least, most) in _RANGES.items():
            if not least <= (found := getattr(self, name)) <= most:
                return f"{name}: found {found}; allowed: {least} to {most}"
        if (largest := max(self.eos_token_ids, default=0)) >= self.vocab_size:
            return f"eos_token_ids: found {largest}; allowed: 0 to {self.vocab_size - 1}"
        return ""

    def differences(self, other: "ServedModel") -> str:
        """Name the fields in which two models differ, capacities aside; empty: the same."""
        return ", ".join(
            f"{each.name} is {getattr(self, each.name)!r}, not {getattr(other, each.name)!r}"
            for each in fields(self)
            if each.name not in _CAPACITIES
            and getattr(self, each.name) != getattr(other, each.name)
        )


@dataclass(kw_only=True, slots=True)  # not frozen: to make one would take many times as long
class AskedSampling:
    """Sampling parameters as a client gave them; None is unset."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True
    constraint: Constraint | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDefaults:
    """Values of parameters that a request does not set.

    The router's options come first, then the model's generation_config, then the values here.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def replaced(self, values: Mapping[str, Any]) -> "SamplingDefaults":
        """Return these with other values, already checked; a top_k of -1 turns it off, too."""
        made = replace(self, **values)
        return replace(made, top_k=max(0, made.top_k))


@dataclass(kw_only=True, slots=True)  # not frozen: to make one would take many times as long
class Sampling:
    """Complete and checked sampling parameters."""

    temperature: float  # 0 is greedy
    top_p: float
    top_k: int  # 0 is off
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    max_tokens: int  # at most what the context holds
    min_tokens: int
    stop: tuple[str, ...]  # the router's own business
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    n: int
    logprobs: int | None  # None: none
    skip_special_tokens: bool = True  # in the text; the router's own business, too
    constraint: Constraint | None = None  # on each choice


@dataclass(kw_only=True, slots=True)  # not frozen: to make one would take many times as long
class GenerationRequest:
    """An admitted request: everything that dispatch needs."""

    request_id: str  # 32 hexadecimal digits
    packed_token_ids: bytes  # the prompt, as pagewire.protos.token_ids packs it
    sampling: Sampling
    end_token_ids: frozenset[int]  # they end a choice and are not part of its text
    page_hashes: tuple[bytes, ...]  # of the prompt's full pages
    page_size: int
    arrived_at: float  # loop time
    deadline_at: float  # loop time
    begins_in_reasoning: bool = False  # see GenerateResponse in protos/inference.proto
    tenant: TenantRules = NO_TENANT  # it is made for
    resumed_from: str = ""  # the request id at the router that was lost; empty: a new call

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.packed_token_ids) // TOKEN_BYTES
