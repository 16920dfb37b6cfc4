"""Charges one generation, or one call of Tokenize, to its tenant's limits."""

import asyncio

from router.tenants.bucket import Charge
from router.tenants.tenant import Tenant


class Account:
    """The charges of one generation or call of Tokenize; `close` it at the end.

    Raises:
        Overloaded: It may not begin; see Tenant.begin.
    """

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self._num_generated = 0  # tokens that are counted
        # Charges that are not decided yet:
        self._request: Charge | None = tenant.begin(_now())
        self._prompt: Charge | None = None

    def use_prompt(self, num_tokens: int) -> None:
        """Charge the prompt; raises as Tenant.use_prompt does."""
        self._prompt = self.tenant.use_prompt(num_tokens, _now())

    def skip(self, num_tokens: int) -> None:
        """Do not count the tokens that an earlier call generated: this prompt contains them."""
        self._num_generated = num_tokens

    def use_generated(self, num_tokens: int, now: float) -> None:
        """Count the tokens that are new among `num_tokens` in all; `now` is the loop's time."""
        if num_new := num_tokens - self._num_generated:
            self._num_generated = num_tokens
            if self._request or self._prompt:
                self._decide(keeps_request=True, keeps_prompt=True)
            self.tenant.use_generated(num_new, now)

    def close(self, *, may_have_run: bool, is_refused: bool) -> None:
        """Decide the charges; the first token has decided them already.

        Args:
            may_have_run: Whether a worker may have computed something. If none has, the prompt is
                given back.
            is_refused: Whether the cluster had no place for it. Then the request is given back,
                too. A caller that cancels, or whose request is wrong, has used one.
        """
        if self._request or self._prompt:
            self._decide(keeps_request=may_have_run or not is_refused, keeps_prompt=may_have_run)

    def _decide(self, *, keeps_request: bool, keeps_prompt: bool) -> None:
        tenant, now = self.tenant, _now()
        if self._request:
            decide = tenant.keep_request if keeps_request else tenant.give_back_request
            decide(self._request, now)
        if self._prompt:
            decide = tenant.keep_prompt if keeps_prompt else tenant.give_back_prompt
            decide(self._prompt, now)
        self._request = self._prompt = None


def _now() -> float:
    return asyncio.get_running_loop().time()
