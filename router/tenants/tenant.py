"""One tenant: what it may do, does and has done. Pure: times are arguments."""

import re
from dataclasses import dataclass, field
from math import inf
from typing import Any

from options.option import check_options, option
from router.errors import InvalidRequest, Overloaded
from router.tenants.bucket import Bucket, Charge

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)
NAME_ALLOWED = "1 to 64 letters, digits, - and _, the first a letter or digit"


def _is_name_or_empty(value: Any) -> bool:
    return isinstance(value, str) and (not value or NAME.fullmatch(value) is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantRules:
    """What is configured for a tenant. The options are those of the tenants file."""

    name: str  # empty: the only tenant, without a file
    token_digests: frozenset[bytes] = field(default=frozenset(), repr=False)  # SHA-256 of each

    requests_per_s: float = option(
        0.0,
        "Generations and calls of Tokenize that may begin each second, on average; 0: any number.",
        at_least=0,
        at_most=1_000_000,
    )
    burst: int = option(
        0,
        "How many of them may begin at once after a pause; 0: those of one second, at least one.",
        at_least=0,
        at_most=1_000_000,
    )
    tokens_per_minute: int = option(
        0,
        "Tokens of prompts and answers each minute, on average; 0: any number. Those of a "
        "minute are saved up at most. A generation begins unless more were used, and then runs to "
        "its end.",
        at_least=0,
        at_most=1_000_000_000_000,
    )
    max_active_requests: int = option(
        0,
        "Answers at a time: a call that asks for several counts as that many; 0: any number, in as "
        "many calls as router.max_active_requests leaves.",
        at_least=0,
    )
    weight: float = option(
        1.0,
        "While the workers are busy, waiting tenants share them in proportion to their weights.",
        above=0,
        at_most=1000,
    )
    cache: str = option(
        "",
        "Tenants that name the same cache share cached pages, and can find out from response times "
        "which prompts the others use; empty: a separate cache.",
        accepts=_is_name_or_empty,
        accepted=f"empty, or {NAME_ALLOWED}",
    )
    cache_share: float = option(
        1.0,
        "Largest part of each worker's pages that it may keep; 1: all. Cached pages beyond "
        "it are evicted, the least recently used first; running requests lose nothing. Tenants of "
        "one cache have the same share.",
        above=0,
        at_most=1,
    )
    operator: bool = option(
        False, "May see the whole cluster and all tenants: status, /cluster and /metrics."
    )

    @property
    def burst_requests(self) -> float:
        """Generations and calls of Tokenize that may begin at once."""
        return self.burst or max(1.0, self.requests_per_s)

    @property
    def weight_of_room(self) -> float:
        """Its weight where tenants share room; the only one may have all."""
        return self.weight if self.name else inf

    @property
    def cache_salt(self) -> bytes:
        """Part of the identity of all its pages; of no one else's, unless both name one cache."""
        if self.cache:
            return b"cache " + self.cache.encode()
        return b"tenant " + self.name.encode() if self.name else b""

    def __post_init__(self) -> None:
        check_options(self)


NO_TENANT = TenantRules(name="")  # of the router's own work, and where callers are not told apart


@dataclass(kw_only=True, slots=True)
class TenantCounts:
    """Sums since the router's start; they never fall."""

    requests: int = 0  # generations and calls of Tokenize, once they count for good
    refused: int = 0  # calls, because of a limit or because the cluster is full
    prompt_tokens: int = 0  # likewise
    generated_tokens: int = 0


class Tenant:
    """A tenant as one router sees it; lives in the router's event loop.

    It outlives a change of its rules: what it has used stays used.
    """

    def __init__(self, rules: TenantRules, now: float) -> None:
        self.rules = rules
        self.counts = TenantCounts()
        self.num_active = 0  # calls that hold a place among the router's active requests
        self.num_answers = 0  # that these calls ask for; 1 each where a call generates nothing
        self._requests = Bucket(**_request_rate(rules), now=now)
        self._tokens = Bucket(**_token_rate(rules), now=now)

    @property
    def name(self) -> str:
        return self.rules.name

    def change(self, rules: TenantRules, now: float) -> None:
        """Apply other rules."""
        self._requests.change(**_request_rate(rules), now=now)
        self._tokens.change(**_token_rate(rules), now=now)
        self.rules = rules

    def check_active(self, num_answers: int, retry_delay_s: float) -> None:
        """Refuse a call that asks for more answers than this tenant may have now.

        Raises:
            InvalidRequest: It may never have as many.
            Overloaded: With the delay, which is a guess: nobody knows when a call ends.
        """
        limit = self.rules.max_active_requests
        if not limit or self.num_answers + num_answers <= limit:
            return
        if num_answers > limit:
            allowed = f"at most {limit}, this tenant's max_active_requests"
            raise InvalidRequest("sampling.n", str(num_answers), allowed)
        raise Overloaded(
            f"max_active_requests: found {self.num_answers} active answers of this tenant, and "
            f"{num_answers} more; allowed: {limit}",
            retry_delay_s,
        )

    def begin(self, now: float) -> Charge:
        """Charge a generation or a call of Tokenize; `keep_request` or `give_back_request` decides.

        Raises:
            Overloaded: It may not yet; a generation may begin after the delay, if it is the next.
        """
        self.check_tokens(now)
        if wait_s := self._requests.wait_s(now):
            rate, burst = self.rules.requests_per_s, self.rules.burst_requests
            raise Overloaded(
                "requests_per_s: found more requests of this tenant than it may begin; "
                f"allowed: {rate:g} each second, {burst:g} at once",
                wait_s,
            )
        return self._requests.charge(1, now)

    def check_tokens(self, now: float) -> None:
        """Refuse to use more tokens while the tenant is in debt.

        Raises:
            Overloaded: With the delay until the debt is paid off, if no more tokens are used.
        """
        if wait_s := self._tokens.wait_s(now):
            raise Overloaded(
                "tokens_per_minute: found more tokens of this tenant than it may use; "
                f"allowed: {self.rules.tokens_per_minute} each minute",
                wait_s,
            )

    def use_prompt(self, num_tokens: int, now: float) -> Charge:
        """Charge a prompt; `keep_prompt` or `give_back_prompt` decides.

        Raises:
            Overloaded: As check_tokens does: other prompts came first. It is not charged.
        """
        self.check_tokens(now)
        return self._tokens.charge(num_tokens, now)

    def use_generated(self, num_tokens: int, now: float) -> None:
        """Count tokens that were generated."""
        self._tokens.take(num_tokens, now)
        self.counts.generated_tokens += num_tokens

    def keep_request(self, charge: Charge, now: float) -> None:
        """Let a generation or a call of Tokenize count for good."""
        self._requests.keep(charge, now)
        self.counts.requests += 1

    def keep_prompt(self, charge: Charge, now: float) -> None:
        """Let a prompt count for good."""
        self._tokens.keep(charge, now)
        self.counts.prompt_tokens += int(charge.amount)

    def give_back_request(self, charge: Charge, now: float) -> None:
        """Go on as if a generation had not begun."""
        self._requests.give_back(charge, now)

    def give_back_prompt(self, charge: Charge, now: float) -> None:
        """Go on as if a prompt had not come."""
        self._tokens.give_back(charge, now)


def _request_rate(rules: TenantRules) -> dict[str, float]:
    return {"rate_per_s": rules.requests_per_s, "capacity": rules.burst_requests}


def _token_rate(rules: TenantRules) -> dict[str, float]:
    return {"rate_per_s": rules.tokens_per_minute / 60, "capacity": rules.tokens_per_minute}
