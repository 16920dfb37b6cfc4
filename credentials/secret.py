"""The cluster's secret, and the keys that each process derives from it.

Keys form a tree, so that a process holds only the keys that it needs:

    secret                                   the cluster's controller alone
    ├── accepting key of a role              the processes of that role, to check their callers
    │   └── calling key of a named caller    that caller, for its calls to processes of the role
    ├── key of page hashes                   workers and routers
    └── key of resume tokens                 routers
        └── the cluster's bearer token       users of the cluster's Ray, as clients

A router can therefore not pass for a decode or prefill worker, nor decode-0 for decode-1. Keys are
derived by HMAC-SHA256 (RFC 2104), used as a pseudorandom function.
"""

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from credentials.party import Role
from options.kept_by_name import kept_by_name

SECRET_BYTES = 32
KEY_BYTES = 32  # of every derived key and proof
HASH_KEY_BYTES = 16

# caller |-> the roles that it calls
CALLEES: Mapping[Role, tuple[Role, ...]] = {
    "router": ("prefill", "decode", "controller"),
    "decode": ("prefill",),
    "prefill": (),
    "controller": (),
}


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class PartyKeys:
    """The keys of one named process, the same at every start. Keep them out of logs."""

    role: Role
    name: str
    accepting: bytes = field(repr=False)  # derives the keys of its callers
    calling: Mapping[Role, bytes] = field(repr=False)  # role of the callee |-> its own key


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class RouterKeys:
    """All keys of a router. Routers may share a name, and with it these."""

    party: PartyKeys
    page_hashes: bytes = field(repr=False)
    resume_tokens: bytes = field(repr=False)

    @property
    def cluster_token(self) -> str:
        """The cluster's own bearer token, for calls to its routers."""
        return derive(self.resume_tokens, b"cluster token").hex()


class ClusterSecret:
    """The root of all keys of a cluster. Only its controller, which starts the others, holds it."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SECRET_BYTES:
            raise ValueError(f"a secret of {len(secret)} bytes; at least {SECRET_BYTES} are needed")
        self._secret = secret

    @classmethod
    def generate(cls) -> "ClusterSecret":
        """Return a new random secret."""
        return cls(secrets.token_bytes(SECRET_BYTES))

    def keys_of(self, role: Role, name: str) -> PartyKeys:
        """Return only the keys that one process needs."""
        return PartyKeys(
            role=role,
            name=name,
            accepting=self._accepting_key(role),
            calling={
                callee: calling_key(self._accepting_key(callee), role, name)
                for callee in CALLEES[role]
            },
        )

    def router_keys(self, name: str) -> RouterKeys:
        """Return only the keys that a router needs."""
        return RouterKeys(
            party=self.keys_of("router", name),
            page_hashes=self.page_hash_key,
            resume_tokens=derive(self._secret, b"resume tokens"),
        )

    @property
    def page_hash_key(self) -> bytes:
        """The key of page hashes, which is secret from clients."""
        return derive(self._secret, b"page hashes")[:HASH_KEY_BYTES]

    def _accepting_key(self, role: Role) -> bytes:
        return derive(self._secret, b"accepting", role.encode())


def calling_key(accepting: bytes, role: Role, name: str) -> bytes:
    """Return the key with which a named caller calls the holders of an accepting key."""
    return derive(accepting, b"calling", role.encode(), name.encode())


def derive(key: bytes, *parts: bytes) -> bytes:
    """Return HMAC-SHA256 of the parts and their lengths, so that different lists never collide."""
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(key, message, "sha256")
