from collections.abc import Iterator

import pytest
import torch

from tests.support.triton_interpreter import interpreted


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where Triton kernels of a test run: in the interpreter on CPU tensors, or on the GPU."""
    if request.param == "interpreter":
        with interpreted():
            yield torch.device("cpu")
    elif torch.cuda.is_available():
        yield torch.device("cuda")
    else:
        pytest.skip("no CUDA device")
