"""Token ids as they travel: packed little-endian uint32."""

from collections.abc import Sequence

import numpy as np


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Return four bytes per id."""
    return np.asarray(token_ids, dtype="<u4").tobytes()


def unpack_token_ids(packed: bytes) -> list[int]:
    """Return the ids; the length must be a multiple of 4 bytes."""
    ids: list[int] = np.frombuffer(packed, dtype="<u4").tolist()
    return ids
