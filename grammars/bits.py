"""Sets of tokens as bitmaps, which grammars write and samplers read."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

# Bit i of word j: whether token 32 j + i is in the set; [cdiv(vocab_size, 32)]
TokenBits: TypeAlias = npt.NDArray[np.int32]
ALL_BITS = -1  # a word with all its tokens
