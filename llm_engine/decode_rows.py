"""The drawn tokens of a pass, each as a row of decode attention; numpy on the host."""

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from llm_engine.forward_batch import ForwardBatch

IntArray: TypeAlias = npt.NDArray[np.int64]


class DecodeRows(NamedTuple):
    """Drawn tokens as the decode kernel sees them, as columns with a value for each."""

    kv_lens: IntArray  # tokens that it attends to, itself included
    rows: IntArray  # in the queries
    table_starts: IntArray  # in the page table: where its sequence begins


def decode_rows(batch: ForwardBatch) -> DecodeRows:
    """Return the drawn tokens of a batch."""
    qo_lens = np.array(batch.qo_lens, dtype=np.int64)
    num_drawn = qo_lens - np.array(batch.prompt_lens, dtype=np.int64)
    owner = np.repeat(np.arange(len(qo_lens)), num_drawn)
    # How many tokens of its slice follow a token: those of a slice count down to 0.
    behind = np.cumsum(num_drawn)[owner] - 1 - np.arange(len(owner))
    return DecodeRows(
        kv_lens=np.array(batch.kv_lens, dtype=np.int64)[owner] - behind,
        rows=np.cumsum(qo_lens)[owner] - 1 - behind,
        table_starts=batch.table_starts[owner],
    )


def decode_launches(rows: DecodeRows, *, max_rows: int, max_tokens: int) -> list[DecodeRows]:
    """Cut drawn tokens into launches.

    Args:
        rows: In the order of the page table.
        max_rows: Most rows of a launch.
        max_tokens: Most keys of a launch, unless it has one row.
    """
    launches = []
    first = 0
    ends = np.cumsum(rows.kv_lens)
    while first < len(ends):
        limit = max_tokens + (int(ends[first - 1]) if first else 0)
        end = max(int(np.searchsorted(ends, limit, side="right")), first + 1)
        end = min(end, first + max_rows)
        launches.append(DecodeRows(*(column[first:end] for column in rows)))
        first = end
    return launches
