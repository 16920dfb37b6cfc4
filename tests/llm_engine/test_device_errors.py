import pytest
import torch

from llm_engine.device_errors import is_device_lost


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemm`"),
            True,
        ),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("CUDA error"), False),
        (AssertionError("page id outside the pool"), False),
    ],
    ids=lambda each: str(each)[:40],
)
def test_only_errors_that_the_device_does_not_survive_cost_it(
    error: Exception, is_lost: bool
) -> None:
    assert is_device_lost(error) is is_lost
