"""The sampling kernels as launched, compiled for Hopper."""

import pytest
import torch

from attn_kernels.limits import MAX_VOCAB_SIZE
from attn_kernels.sampling.launch import TokenSampler
from attn_kernels.sampling.rows import LogitEdits
from tests.attn_kernels.sampling_case import Row, row_params
from tests.attn_kernels.sm90 import compile_launch, launches_of

KERNELS = [
    "edit_logits_kernel",
    "group_max_kernel",
    "choose_kernel",
    "count_bins_kernel",
    "choose_window_kernel",
    "draw_kernel",
    "finish_kernel",
    "edit_logits_kernel",
    "group_max_kernel",
    "logprobs_kernel",
]


FEW_REGISTERS = 128  # a multiprocessor has room for 16 warps
MORE_REGISTERS = {151_936: 176, MAX_VOCAB_SIZE: 176}  # vocabulary |-> registers: room for 11


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "has_mask"),
    [
        (128_256, torch.float32, True),
        pytest.param(MAX_VOCAB_SIZE, torch.bfloat16, True, marks=pytest.mark.thorough),
        pytest.param(50_257, torch.float16, False, marks=pytest.mark.thorough),
        pytest.param(128_256, torch.float32, False, marks=pytest.mark.thorough),
        pytest.param(151_936, torch.float16, True, marks=pytest.mark.thorough),
        pytest.param(262_208, torch.bfloat16, False, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_kernels_compile_for_hopper_and_keep_tiles_in_registers(
    vocab_size: int, dtype: torch.dtype, has_mask: bool
):
    sampler = TokenSampler(vocab_size=vocab_size, max_rows=2, device="cpu")
    logits = torch.empty(2, vocab_size, dtype=dtype)
    int32 = torch.empty(2, -(-vocab_size // 32), dtype=torch.int32)
    mask = int32 if has_mask else None
    entries = torch.empty(4, dtype=torch.int32)
    has_edits = dtype == torch.float32  # other logits cannot be edited
    floats = torch.empty(4)

    edits = LogitEdits(rows=entries, tokens=entries, repetition=floats, subtract=floats)

    def launch() -> None:
        params = row_params([Row()] * 2, "cpu")
        tokens = sampler.sample(logits, params, mask=mask, edits=edits if has_edits else None)
        sampler.logprobs(logits, tokens, 5)

    launches = launches_of(launch)

    expected = [name for name in KERNELS if has_edits or name != "edit_logits_kernel"]
    assert [each.kernel.fn.__name__ for each in launches] == expected
    for each in launches:
        compiled = compile_launch(each)
        # `choose` may park a few scalars of a row while it searches.
        assert compiled.spill_bytes <= 32, each.kernel.fn.__name__
        assert compiled.shared_bytes <= 48 * 1024
        max_registers = MORE_REGISTERS.get(vocab_size, FEW_REGISTERS)
        assert compiled.registers <= max_registers, each.kernel.fn.__name__
