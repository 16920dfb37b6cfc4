"""Tenants for tests, whose tokens are their names."""

from typing import Any

from router.tenants.file import digest_of
from router.tenants.registry import Tenants
from router.tenants.tenant import TenantRules

CLUSTER_TOKEN = "the-clusters-own"


def rules(name: str, **options: Any) -> TenantRules:
    """Rules of a tenant whose token is its name."""
    return TenantRules(name=name, token_digests=frozenset({digest_of(name.encode())}), **options)


def tenants(*known: TenantRules) -> Tenants:
    """These, in a registry; without any two without limits, acme and globex."""
    return Tenants(
        known or (rules("acme"), rules("globex")),
        cluster_digest=digest_of(CLUSTER_TOKEN.encode()),
    )
