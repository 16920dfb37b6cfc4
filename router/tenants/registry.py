"""All tenants of a router, by name and by token."""

import hmac
from collections.abc import Iterable, Sequence
from itertools import chain

from router.tenants.tenant import Tenant, TenantRules

CLUSTER_NAME = "(cluster)"  # a file cannot contain this name


class Tenants:
    """Finds the tenant of a call by its token's hash. Lives in the router's event loop.

    If `is_open`, tokens are ignored, and all callers are one tenant without limits.

    Args:
        rules: The rules of the tenants file; None: there is no file.
        cluster_digest: SHA-256 of the cluster's own token, whose holder is an operator; empty:
            there is none.
        now: The time of the loop's clock.
    """

    def __init__(
        self,
        rules: Iterable[TenantRules] | None = None,
        *,
        cluster_digest: bytes = b"",
        now: float = 0.0,
    ) -> None:
        self.is_open = rules is None
        own = TenantRules(
            name="" if self.is_open else CLUSTER_NAME,
            token_digests=frozenset({cluster_digest} if cluster_digest else ()),
            operator=True,
        )
        self.own = Tenant(own, now)
        self._by_name: dict[str, Tenant] = {}
        self._by_digest: dict[bytes, tuple[bytes, Tenant]] = {}  # |-> the same digest, its tenant
        self.change(rules or (), now)

    @property
    def told(self) -> Sequence[Tenant]:
        """All tenants for display, sorted by name; none if callers are not told apart."""
        if self.is_open:
            return ()
        return sorted([self.own, *self._by_name.values()], key=lambda each: each.name)

    def change(self, rules: Iterable[TenantRules], now: float) -> None:
        """Apply other rules. Running calls continue; a missing tenant starts no new ones."""
        tenants = {}
        for each in rules:
            tenant = self._by_name.get(each.name)
            if tenant is None:
                tenant = Tenant(each, now)
            else:
                tenant.change(each, now)
            tenants[each.name] = tenant
        self._by_name = tenants
        self._by_digest = {
            digest: (digest, tenant)
            for tenant in chain(tenants.values(), [self.own])
            for digest in tenant.rules.token_digests
        }

    def of(self, digest: bytes) -> Tenant | None:
        """Return the tenant whose token has this SHA-256; None: there is none.

        Its duration reveals nothing about the digests that exist: a caller cannot steer the hash of
        a token, and the last comparison takes the same time however much is equal.
        """
        expected, tenant = self._by_digest.get(digest, (bytes(len(digest)), None))
        return tenant if hmac.compare_digest(expected, digest) else None
