"""The shapes of models that kernels support. Imports neither torch nor Triton, which are slow."""

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 16
MAX_GROUP = 16  # query heads of one key-value head
MAX_VOCAB_SIZE = 1 << 20  # times the largest mass, 2**40, is far from the end of int64


def head_dim_refusal(head_dim: int) -> str:
    """Return the allowed values of head_dim; empty: it is supported."""
    if HEAD_DIM_STEP <= head_dim <= MAX_HEAD_DIM and head_dim % HEAD_DIM_STEP == 0:
        return ""
    return f"a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"


def group_refusal(group: int) -> str:
    """Return the allowed numbers of query heads per key-value head; empty: it is supported."""
    return "" if 1 <= group <= MAX_GROUP else f"1 to {MAX_GROUP}"
