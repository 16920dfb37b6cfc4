"""What one generation uses of its tenant's limits."""

import asyncio

from router.tenants.tenant import Tenant


class Account:
    """The use of one generation, from the moment when it may begin.

    Raises:
        Overloaded: It may not; see Tenant.begin.
    """

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self._num_prompt_tokens = 0
        self._num_generated = 0  # counted
        tenant.begin(_now())

    def use_prompt(self, num_tokens: int) -> None:
        """Count the prompt; Overloaded: see Tenant.use_prompt."""
        self.tenant.use_prompt(num_tokens, _now())
        self._num_prompt_tokens = num_tokens

    def skip(self, num_tokens: int) -> None:
        """Leave out an earlier call's generated tokens: they count as part of this prompt."""
        self._num_generated = num_tokens

    def use_generated(self, num_tokens: int) -> None:
        """Count the new tokens; `num_tokens` is how many there are in all."""
        if num_new := num_tokens - self._num_generated:
            self._num_generated = num_tokens
            self.tenant.use_generated(num_new, _now())

    def undo(self) -> None:
        """Give back what was counted for a generation that was refused before any work."""
        self.tenant.give_back(self._num_prompt_tokens, _now())


def _now() -> float:
    return asyncio.get_running_loop().time()
