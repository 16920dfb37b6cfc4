import pytest
import torch

from attn_kernels.merge import reference
from attn_kernels.merge.launch import merge_states
from tests.attn_kernels.tolerance import assert_within_twice

ATOL = 4e-6  # of values up to 4, by weights whose exponents (up to 16) are off by a last place
LSE_ATOL = 4e-6  # a few units in the last place of float32 for sums up to 16


def states(device: str, num_states: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    outs = torch.randn(num_states, 5, 3, 24, generator=generator).to(dtype)
    lses = 4 * torch.randn(num_states, 5, 3, generator=generator)
    return outs.to(device), lses.to(device)


def check(out: torch.Tensor, lse: torch.Tensor, outs: torch.Tensor, lses: torch.Tensor) -> None:
    """Compare with torch, which merges in float32 and rounds once."""
    expected_out, expected_lse = reference.merge_states(outs, lses)
    assert_within_twice(out, expected_out.to(outs.dtype), expected_out, atol=ATOL)
    assert_within_twice(lse, expected_lse, expected_lse, atol=LSE_ATOL)


@pytest.mark.parametrize("num_states", [1, 2, 3, 7])
def test_states_join_to_the_softmax_over_all_keys(device: str, num_states: int):
    outs, lses = states(device, num_states)

    out, lse = merge_states(outs, lses)

    check(out, lse, outs, lses)


def test_halves_of_a_softmax_join_to_the_whole(device: str):
    scores = torch.tensor([1.0, 1.0, 2.0])
    values = torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 1.0]])

    def state(keys: slice):
        out = torch.softmax(scores[keys], 0) @ values[keys]
        lse = torch.logsumexp(scores[keys], 0)
        return out.view(1, 1, 2).to(device), lse.view(1, 1).to(device)

    halves = zip(state(slice(0, 2)), state(slice(2, 3)), strict=True)
    out, lse = merge_states(*(torch.stack(each) for each in halves))

    whole_out, whole_lse = state(slice(0, 3))
    assert_within_twice(out, whole_out, whole_out, atol=ATOL)
    assert_within_twice(lse, whole_lse, whole_lse, atol=LSE_ATOL)


def test_an_empty_state_contributes_nothing_even_where_it_holds_nan(device: str):
    outs, lses = states(device, 3)
    outs[1] = float("nan")
    lses[1] = float("-inf")

    out, lse = merge_states(outs, lses)

    check(out, lse, outs[[0, 2]], lses[[0, 2]])


def test_all_states_empty_give_zeros_and_no_keys(device: str):
    outs, lses = states(device, 2)

    out, lse = merge_states(outs, torch.full_like(lses, float("-inf")))

    assert (out == 0).all()
    assert (lse == float("-inf")).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_outputs_are_merged_in_float32(device: str, dtype: torch.dtype):
    outs, lses = states(device, 7, dtype)

    out, lse = merge_states(outs, lses)

    assert out.dtype == dtype
    check(out, lse, outs, lses)
