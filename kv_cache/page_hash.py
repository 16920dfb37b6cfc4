"""The identity of a page across workers: a keyed hash chain over all tokens up to its end.

    root    = H(fingerprint, salt)
    page k  = H(page k-1 or root, tokens of page k)        each 16 bytes, BLAKE2b with a key

Equal hashes mean the same model, tenant salt and tokens from position 0 on. Workers report pages by
these hashes and the router computes the same from a prompt. The prefix cache compares tokens.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def page_hashes(
    token_ids: Sequence[int],
    page_size: int,
    *,
    fingerprint: str,
    salt: bytes = b"",
    key: bytes = b"",
) -> list[bytes]:
    """Return the hash of each full page of `token_ids`; a partial last page has none.

    Args:
        fingerprint: Identity of weights and configuration, as in KVLayout.
        salt: Separates tenants: equal tokens under different salts have different hashes.
        key: Secret of the cluster, at most 64 bytes; without it hashes can be computed by anyone.
    """
    hashes = []
    parent = root_hash(fingerprint, salt, key)
    for page_tokens in split_pages(token_ids, page_size):
        parent = child_hash(parent, page_tokens, key)
        hashes.append(parent)
    return hashes


def split_pages(token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """Return the tokens of each full page, packed little-endian uint32."""
    num_tokens = len(token_ids) // page_size * page_size
    packed = struct.pack(f"<{num_tokens}I", *token_ids[:num_tokens])
    return [packed[at : at + 4 * page_size] for at in range(0, 4 * num_tokens, 4 * page_size)]


def root_hash(fingerprint: str, salt: bytes, key: bytes) -> bytes:
    """Return the parent of first pages."""
    name = fingerprint.encode()
    # The length keeps (fingerprint, salt) pairs with equal concatenations apart.
    material = struct.pack("<I", len(name)) + name + salt
    return blake2b(material, digest_size=HASH_BYTES, key=key, person=b"pagewire root").digest()


def child_hash(parent: bytes, page_tokens: bytes, key: bytes) -> bytes:
    """Return the hash of the page with these packed tokens below `parent`."""
    material = parent + page_tokens
    return blake2b(material, digest_size=HASH_BYTES, key=key, person=b"pagewire page").digest()
