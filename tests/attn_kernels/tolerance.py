"""What error a kernel may have: twice that of torch in the same dtype, and a stated part."""

from torch import Tensor


def assert_within_twice(actual: Tensor, eager: Tensor, expected: Tensor, *, atol: float) -> None:
    """Accept twice the error of eager torch, plus a small absolute part.

    Args:
        actual: What the kernel gave.
        eager: The same by torch operations in the kernel's dtype, each of which rounds.
        expected: The same in float32 throughout.
        atol: The absolute part, for what the kernel's own functions and order of sums may cost in
            float32.
    """
    assert actual.shape == expected.shape == eager.shape
    assert not actual.isnan().any()
    error = (actual.float() - expected.float()).abs().max()
    eager_error = (eager.float() - expected.float()).abs().max()
    assert error <= 2 * eager_error + atol, f"error {error}, torch in {eager.dtype} {eager_error}"
