"""Sets of tokens as tests read them."""

from collections.abc import Iterator

import numpy as np

from grammars.bits import TokenBits


def token_ids(bits: TokenBits) -> Iterator[int]:
    """Yield the tokens of a set, ascending."""
    yield from map(int, np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")))
