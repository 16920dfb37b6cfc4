import pytest

from kv_cache.page_hash import HASH_BYTES, page_hashes, split_pages
from pagewire.protos.token_ids import pack_token_ids

VECTORS: list[tuple[list[int], int, str, bytes, bytes, list[str]]] = [
    (
        [1, 2, 3, 4, 5],
        2,
        "model",
        b"",
        b"",
        ["34bfb8c13bf15e2fe6652ed621a66c53", "a22fa1c7c82c3dc79c15343b8a7f04ee"],
    ),
    (
        [0, 4294967295],
        1,
        "model",
        b"tenant",
        b"",
        ["9ccc7db9f418d608d5c964741c8c4d7d", "eff5a110593b609aa2415c1a9b2d49b1"],
    ),
    (
        [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7],
        16,
        "model",
        b"tenant",
        b"cluster key",
        ["c8422c1e37c97169003dc3983661c510"],
    ),
]


def test_only_full_pages_have_a_hash() -> None:
    for num_tokens in range(10):
        hashes = page_hashes(pack_token_ids(range(num_tokens)), 4, fingerprint="m")
        assert len(hashes) == num_tokens // 4
        assert all(len(page_hash) == HASH_BYTES for page_hash in hashes)


def test_a_hash_depends_on_everything_before_it() -> None:
    tokens = list(range(12))
    hashes = page_hashes(pack_token_ids(tokens), 4, fingerprint="m")
    changed = page_hashes(pack_token_ids([99, *tokens[1:]]), 4, fingerprint="m")
    last = page_hashes(pack_token_ids([*tokens[:11], 99]), 4, fingerprint="m")

    assert all(a != b for a, b in zip(hashes, changed, strict=True))
    assert [a == b for a, b in zip(hashes, last, strict=True)] == [True, True, False]


def test_model_salt_key_and_page_size_separate_hashes() -> None:
    tokens = [1] * 8
    variants = [
        page_hashes(pack_token_ids(tokens), 4, fingerprint="m"),
        page_hashes(pack_token_ids(tokens), 4, fingerprint="n"),
        page_hashes(pack_token_ids(tokens), 4, fingerprint="m", salt=b"tenant"),
        page_hashes(pack_token_ids(tokens), 4, fingerprint="m", key=b"key"),
        page_hashes(pack_token_ids(tokens), 2, fingerprint="m"),
        page_hashes(pack_token_ids(tokens), 4, fingerprint="ms", salt=b"alt"),
        page_hashes(pack_token_ids(tokens), 4, fingerprint="m", salt=b"salt"),
    ]
    flat = [page_hash for hashes in variants for page_hash in hashes]
    assert len(set(flat)) == len(flat)


def test_tokens_are_packed_little_endian() -> None:
    assert split_pages([1, 0x01020304, 5], 2) == [bytes([1, 0, 0, 0, 4, 3, 2, 1])]


@pytest.mark.parametrize(("tokens", "page_size", "fingerprint", "salt", "key", "expected"), VECTORS)
def test_hashes_are_frozen(
    tokens: list[int],
    page_size: int,
    fingerprint: str,
    salt: bytes,
    key: bytes,
    expected: list[str],
) -> None:
    """Routers and workers of different releases must agree."""
    hashes = page_hashes(
        pack_token_ids(tokens), page_size, fingerprint=fingerprint, salt=salt, key=key
    )
    assert [page_hash.hex() for page_hash in hashes] == expected
