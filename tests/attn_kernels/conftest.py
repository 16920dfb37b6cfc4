from collections.abc import Iterator

import pytest
import torch

from tests.support.triton_interpreter import interpreted


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where kernels of a test run: Triton's interpreter on CPU tensors, or the GPU."""
    if request.param == "interpreter":
        with interpreted():
            yield "cpu"
    elif torch.cuda.is_available():
        yield "cuda"
    else:
        pytest.skip("no CUDA device")
