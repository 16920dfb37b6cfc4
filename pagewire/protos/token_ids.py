"""Token ids as they appear in messages: packed little-endian uint32."""

import sys
from array import array
from collections.abc import Sequence

TOKEN_BYTES = 4
_TYPE = "I"  # of four bytes, in the order of the host
assert array(_TYPE).itemsize == TOKEN_BYTES, "a C compiler whose unsigned int has no four bytes"


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Return four bytes per id; of what `token_array` returned it is a copy of memory."""
    if sys.byteorder == "little" and isinstance(token_ids, array) and token_ids.typecode == _TYPE:
        return token_ids.tobytes()
    ids = array(_TYPE, token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def token_array(packed: bytes) -> "array[int]":
    """Return the ids that `pack_token_ids` packed, as integers that lie side by side in memory.

    To make, cut, join and pack it takes a hundredth of the time of a list.

    Raises:
        ValueError: If the length is not a multiple of four bytes.
    """
    if len(packed) % TOKEN_BYTES:
        raise ValueError(f"token ids take {len(packed)} bytes, which is not a multiple of 4")
    ids = array(_TYPE, packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def unpack_token_ids(packed: bytes) -> list[int]:
    """Return the same as a list."""
    return token_array(packed).tolist()
