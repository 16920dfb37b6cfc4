"""The identity of a page across workers: a keyed hash chain over all tokens up to its end.

    root    = H(fingerprint, salt)
    page k  = H(page k-1 or root, tokens of page k)        each 16 bytes, BLAKE2b with a key

Equal hashes mean the same model, tenant salt and tokens from position 0 on. Workers report pages by
these hashes, and the router computes the same hashes from a prompt. The prefix cache compares
tokens.
"""

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

from pagewire.protos.token_ids import pack_token_ids

HASH_BYTES = 16


def page_hashes(
    packed: bytes, page_size: int, *, fingerprint: str, salt: bytes = b"", key: bytes = b""
) -> list[bytes]:
    """Return the hash of each full page of token ids; a partial last page has none.

    Args:
        packed: The token ids as little-endian uint32.
        fingerprint: Identity of weights and configuration, as in KVLayout.
        salt: Separates tenants: equal tokens under different salts have different hashes.
        key: Secret of the cluster, at most 64 bytes; without it hashes can be computed by anyone.
    """
    root = root_hash(fingerprint, salt, key)
    return chained_hashes(root, _split_packed(packed, page_size), key)


def split_pages(token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """Return the tokens of each full page, packed little-endian uint32."""
    return _split_packed(pack_token_ids(token_ids), page_size)


@lru_cache(maxsize=1024)
def root_hash(fingerprint: str, salt: bytes, key: bytes) -> bytes:
    """Return the parent hash of first pages."""
    name = fingerprint.encode()
    # The length keeps (fingerprint, salt) pairs with equal concatenations apart.
    material = struct.pack("<I", len(name)) + name + salt
    return blake2b(material, digest_size=HASH_BYTES, key=key, person=b"pagewire root").digest()


def chained_hashes(parent: bytes, page_tokens: Iterable[bytes], key: bytes) -> list[bytes]:
    """Return the hashes of pages with these packed tokens, the first below `parent`."""
    hashes = []
    empty = _empty_page(key)
    for tokens in page_tokens:
        state = empty.copy()
        state.update(parent)
        state.update(tokens)
        parent = state.digest()
        hashes.append(parent)
    return hashes


@lru_cache(maxsize=16)
def _empty_page(key: bytes) -> blake2b:
    """Return the state before the first byte; a copy of it is cheaper than to begin anew."""
    return blake2b(digest_size=HASH_BYTES, key=key, person=b"pagewire page")


def _split_packed(packed: bytes, page_size: int) -> list[bytes]:
    page_bytes = 4 * page_size
    full_bytes = len(packed) // page_bytes * page_bytes
    return [packed[at : at + page_bytes] for at in range(0, full_bytes, page_bytes)]
