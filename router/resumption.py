"""Resume tokens: with one, a caller can continue its call at any other router.

A router stores nothing for a call that another one may resume. The caller sends its request again,
the output that it has received, and the token of the first message. The token holds the choices of
the first router, and a proof over them and over all that the output depends on:

    version (1) | expires at (8) | seed (8) | most tokens (4) | request id (16) | proof (32)

The proof is BLAKE2b under a key that only the routers of a cluster have (RFC 7693); HMAC-SHA256
takes twice as long for so short a message. Another prompt, sampling, model or tenant gives another
proof. The prompt enters as the hash of its last full page, which stands for all tokens up to its
end, and the tokens after that. Integers are big-endian; times are seconds since 1970 by the
routers' clocks.
"""

import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from hashlib import blake2b
from operator import attrgetter

from credentials.secret import KEY_BYTES
from pagewire.protos.token_ids import TOKEN_BYTES
from router.errors import InvalidRequest
from router.request import AskedSampling, GenerationRequest, Sampling

VERSION = 2
TOKEN_FIELD = "resume.token"  # noqa: S105 - the name of a field
_HEAD = struct.Struct("!BQQI16s")  # all but the proof
_PERSON = b"pagewire resume"
_values = attrgetter(*(each.name for each in fields(Sampling)))
_ALLOWED = (
    "the resume_token of the call that is resumed, with the same request otherwise, from a router "
    "of the same cluster, tenant and model"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedChoice:
    """The part of one choice that a caller has."""

    choice: int
    packed_token_ids: bytes
    text_chars: int
    is_finished: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """The part of a lost call that its caller has."""

    token: bytes
    choices: tuple[ReceivedChoice, ...]

    @property
    def num_bytes_to_compute(self) -> int:
        """Packed token ids that a worker computes again."""
        return sum(len(each.packed_token_ids) for each in self.choices if not each.is_finished)


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """The choices of the router that began a call; trustworthy once the token is checked."""

    request_id: str
    seed: int
    max_tokens: int


class ResumeTokens:
    """Makes and checks the tokens of one cluster. A token is useless to another tenant.

    Args:
        key: Key of the cluster's routers; empty: no call can be resumed.
        lifetime_s: Lifetime of a token.
        wall_clock: Returns seconds since 1970.
    """

    def __init__(self, *, key: bytes, lifetime_s: float, wall_clock: Callable[[], float]) -> None:
        self._key = key
        self._lifetime_s = lifetime_s
        self._wall_clock = wall_clock

    def issue(self, request: GenerationRequest, asked: AskedSampling, fingerprint: str) -> bytes:
        """Return the token of a call; empty: it cannot be resumed."""
        if not self._key:
            return b""
        head = _HEAD.pack(
            VERSION,
            int(self._wall_clock() + self._lifetime_s),
            request.sampling.seed,
            request.sampling.max_tokens,
            bytes.fromhex(request.request_id),
        )
        return head + self._proof(head, request, asked, fingerprint)

    def read(self, token: bytes) -> Begun:
        """Return the contents of a token, which are not checked yet.

        Raises:
            InvalidRequest: It is no token.
        """
        if not self._key:
            raise InvalidRequest("resume", "a resumption", "none: this router has no key for it")
        if len(token) != _HEAD.size + KEY_BYTES or token[0] != VERSION:
            raise InvalidRequest(TOKEN_FIELD, f"{len(token)} bytes that are no token", _ALLOWED)
        _, _, seed, max_tokens, request_id = _HEAD.unpack_from(token)
        return Begun(request_id=request_id.hex(), seed=seed, max_tokens=max_tokens)

    def check(
        self, token: bytes, request: GenerationRequest, asked: AskedSampling, fingerprint: str
    ) -> None:
        """Refuse a token of another request, or one that is too old.

        Args:
            token: One that `read` has read.
            request: Complete, with the token's contents.
            asked: As the caller sent it now.
            fingerprint: The fingerprint of the model.

        Raises:
            InvalidRequest: Names the field.
        """
        head, proof = token[: _HEAD.size], token[_HEAD.size :]
        if not hmac.compare_digest(self._proof(head, request, asked, fingerprint), proof):
            raise InvalidRequest(TOKEN_FIELD, "one that does not fit the request", _ALLOWED)
        age_s = self._wall_clock() - _HEAD.unpack_from(head)[1]
        if age_s > 0:
            allowed = f"a token for up to {self._lifetime_s:.0f} s after the call began"
            raise InvalidRequest(TOKEN_FIELD, f"one that expired {age_s:.0f} s ago", allowed)

    def _proof(
        self, head: bytes, request: GenerationRequest, asked: AskedSampling, fingerprint: str
    ) -> bytes:
        # The most tokens that were asked for, too: of the request the token says how many.
        sampling = (*_values(request.sampling), asked.max_tokens, sorted(request.end_token_ids))
        parts = (
            head,
            request.tenant.name.encode(),
            fingerprint.encode(),
            *_prompt(request),
            repr(sampling).encode(),
        )
        # With their lengths, so that different lists never collide.
        message = b"".join([len(part).to_bytes(4, "big") + part for part in parts])
        return blake2b(message, digest_size=KEY_BYTES, key=self._key, person=_PERSON).digest()


def _prompt(request: GenerationRequest) -> tuple[bytes, bytes]:
    """Return what stands for a prompt: the last hash, of all full pages, and the other tokens."""
    if not request.page_hashes:
        return b"", request.packed_token_ids
    num_bytes = len(request.page_hashes) * request.page_size * TOKEN_BYTES
    return request.page_hashes[-1], request.packed_token_ids[num_bytes:]
