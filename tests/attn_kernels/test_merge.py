import pytest
import torch

from attn_kernels import reference
from attn_kernels.merge import merge_state, merge_states


def states(device: str, num_states: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    outs = torch.randn(num_states, 5, 3, 24, generator=generator).to(dtype)
    lses = 4 * torch.randn(num_states, 5, 3, generator=generator)
    return outs.to(device), lses.to(device)


@pytest.mark.parametrize("num_states", [1, 2, 3, 7])
def test_states_join_to_the_softmax_over_all_keys(device: str, num_states: int):
    outs, lses = states(device, num_states)

    out, lse = merge_states(outs, lses)

    expected_out, expected_lse = reference.merge_states(outs, lses)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


def test_halves_of_a_softmax_join_to_the_whole(device: str):
    scores = torch.tensor([1.0, 1.0, 2.0])
    values = torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 1.0]])

    def state(keys: slice):
        out = torch.softmax(scores[keys], 0) @ values[keys]
        lse = torch.logsumexp(scores[keys], 0)
        return out.view(1, 1, 2).to(device), lse.view(1, 1).to(device)

    out, lse = merge_state(*state(slice(0, 2)), *state(slice(2, 3)))

    whole_out, whole_lse = state(slice(0, 3))
    torch.testing.assert_close(out, whole_out)
    torch.testing.assert_close(lse, whole_lse)


def test_an_empty_state_contributes_nothing_even_where_it_holds_nan(device: str):
    outs, lses = states(device, 3)
    outs[1] = float("nan")
    lses[1] = float("-inf")

    out, lse = merge_states(outs, lses)

    expected_out, expected_lse = reference.merge_states(outs[[0, 2]], lses[[0, 2]])
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


def test_all_states_empty_give_zeros_and_no_keys(device: str):
    outs, lses = states(device, 2)

    out, lse = merge_states(outs, torch.full_like(lses, float("-inf")))

    assert (out == 0).all()
    assert (lse == float("-inf")).all()


def test_half_precision_outputs_are_merged_in_float32(device: str):
    outs, lses = states(device, 2, torch.bfloat16)

    out, _ = merge_states(outs, lses)

    expected, _ = reference.merge_states(outs, lses)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected.to(torch.bfloat16), atol=0.004, rtol=0.008)
