"""Kernel body that edits single logits: penalties and bans, and back."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_entries"])
def edit_logits_kernel(
    logits_ptr,  # [num_rows, vocab_size], float32, edited in place
    saved_ptr,  # [num_entries], float32: what stood there
    rows_ptr,  # [num_entries], int32; -1: no entry
    tokens_ptr,  # [num_entries], int32
    repetition_ptr,  # [num_entries], float32
    subtract_ptr,  # [num_entries], float32
    logits_stride,
    num_entries,
    RESTORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Grid: (cdiv(num_entries, BLOCK),)
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(rows_ptr + entries, mask=entries < num_entries, other=-1).to(tl.int64)
    is_entry = rows >= 0
    tokens = tl.load(tokens_ptr + entries, mask=is_entry, other=0)
    places = logits_ptr + rows * logits_stride + tokens
    if RESTORE:
        tl.store(places, tl.load(saved_ptr + entries, mask=is_entry), mask=is_entry)
    else:
        values = tl.load(places, mask=is_entry, other=0.0)
        tl.store(saved_ptr + entries, values, mask=is_entry)
        repetition = tl.load(repetition_ptr + entries, mask=is_entry, other=1.0)
        subtract = tl.load(subtract_ptr + entries, mask=is_entry, other=0.0)
        repeated = tl.where(values < 0, values * repetition, tl.div_rn(values, repetition))
        tl.store(places, repeated - subtract, mask=is_entry)
