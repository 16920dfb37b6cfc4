"""The credentials of one start of one process: it proves its calls and checks those of others.

A call carries, in its metadata, a header:

    version (1) | role (1) | incarnation (8) | callee's incarnation (8) | number (8) | name
    | proof (32)

The proof is HMAC-SHA256, under the caller's key, over the rest of the header, the callee's role
and name, and the method: a header is valid once, for one method of one start of one worker. The
answer carries HMAC-SHA256 of that proof under the same key, which only the intended worker can
compute. All integers are big-endian. Proofs are compared in constant time.
"""

import hmac
import itertools
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from credentials.errors import NotProven, WrongIncarnation
from credentials.party import Party, Role
from credentials.replay import MAX_CALLERS
from credentials.secret import KEY_BYTES, PartyKeys, calling_key, derive
from pagewire.protos import common_pb2

VERSION = 1
MAX_NAME_BYTES = 64
_HEAD = struct.Struct("!BBQQQ")  # without name and proof
_ROLE_NUMBERS: Mapping[Role, int] = {
    "router": common_pb2.CALLER_ROUTER,
    "decode": common_pb2.CALLER_DECODE,
}
CALLER_ROLES: Mapping[int, Role] = {number: role for role, number in _ROLE_NUMBERS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvenCall:
    """A call with a proven caller."""

    caller: Party
    number: int  # of this call among the caller's; a repeated number is a replay
    answer: bytes  # the callee's proof for the caller


class Callee:
    """One peer that this process calls."""

    def __init__(
        self, party: Party, *, caller: Party, key: bytes, numbers: "itertools.count[int]"
    ) -> None:
        self.party = party
        self._caller = caller
        self._key = key
        self._numbers = numbers

    def prove(self, method: str) -> tuple[bytes, bytes]:
        """Return the header of one call of a method, and the answer that its callee must give."""
        caller = self._caller
        head = _HEAD.pack(
            VERSION,
            _ROLE_NUMBERS[caller.role],
            caller.incarnation,
            self.party.incarnation,
            next(self._numbers),
        )
        head += caller.name.encode()
        proof = _call_proof(self._key, head, self.party, method)
        return head + proof, _answer_proof(self._key, proof)


class ClusterCredentials:
    """Proves and checks calls for one start of one process.

    Args:
        keys: The keys of this process, from ClusterSecret.
        incarnation: The incarnation of this start.
    """

    def __init__(self, keys: PartyKeys, incarnation: int) -> None:
        self.party = Party(role=keys.role, name=keys.name, incarnation=incarnation)
        self._keys = keys
        self._numbers = itertools.count()
        # genuine caller |-> its key, as long as few others have come; it can be derived again
        self._callers: dict[tuple[Role, str], bytes] = {}

    def callee(self, party: Party) -> Callee:
        """Return a peer to call: this start of it and no other.

        Raises:
            KeyError: If processes of this role never call those of the peer's.
        """
        key = self._keys.calling[party.role]
        return Callee(party, caller=self.party, key=key, numbers=self._numbers)

    def check(self, method: str, header: bytes | None) -> ProvenCall:
        """Identify the caller of a method of this process, without checking whether it may call.

        Raises:
            NotProven: The header is missing, or is not that of a genuine call to this process.
            WrongIncarnation: A genuine caller means another start of this process.
        """
        if not header:
            raise NotProven("the call carries no proof")
        caller, meant_incarnation, number = _read(header)
        known = self._callers.get((caller.role, caller.name))
        key = known or self._calling_key(caller)
        proof = header[-KEY_BYTES:]
        if not hmac.compare_digest(
            _call_proof(key, header[:-KEY_BYTES], self.party, method), proof
        ):
            raise NotProven("the proof is not genuine")
        self._callers[caller.role, caller.name] = key
        if len(self._callers) > MAX_CALLERS:
            del self._callers[next(iter(self._callers))]
        if meant_incarnation != self.party.incarnation:
            raise WrongIncarnation(
                f"the call is for incarnation {meant_incarnation}, this is "
                f"{self.party.incarnation}",
                self.party.incarnation,
            )
        return ProvenCall(caller=caller, number=number, answer=_answer_proof(key, proof))

    def transfer_key(self, connection_id: str, *, sender: Party, receiver: Party) -> bytes:
        """Return the key of one connection for pages, which only its two sides can derive.

        Args:
            connection_id: Made by the receiver.
            sender: A prefill worker.
            receiver: A decode worker. One of the two is this process.
        """
        is_receiver = self.party == receiver
        key = self._keys.calling[sender.role] if is_receiver else self._calling_key(receiver)
        return derive(
            key,
            b"transfer",
            connection_id.encode(),
            *(sender.name.encode(), sender.incarnation.to_bytes(8, "big")),
            *(receiver.name.encode(), receiver.incarnation.to_bytes(8, "big")),
        )

    def _calling_key(self, caller: Party) -> bytes:
        return calling_key(self._keys.accepting, caller.role, caller.name)


def _read(header: bytes) -> tuple[Party, int, int]:
    """Return the caller that a header claims, the incarnation that it means, and its number."""
    name = header[_HEAD.size : -KEY_BYTES]
    if len(header) <= _HEAD.size + KEY_BYTES or len(name) > MAX_NAME_BYTES:
        raise NotProven(f"a header of {len(header)} bytes")
    version, role, incarnation, meant_incarnation, number = _HEAD.unpack_from(header)
    if version != VERSION or role not in CALLER_ROLES:
        raise NotProven(f"a header of version {version} and role {role}")
    try:
        caller = Party(role=CALLER_ROLES[role], name=name.decode(), incarnation=incarnation)
    except UnicodeDecodeError:
        raise NotProven("a header without a readable name") from None
    return caller, meant_incarnation, number


def _call_proof(key: bytes, head: bytes, callee: Party, method: str) -> bytes:
    return derive(key, b"call", head, callee.role.encode(), callee.name.encode(), method.encode())


def _answer_proof(key: bytes, call_proof: bytes) -> bytes:
    return derive(key, b"answer", call_proof)
