from collections.abc import Iterator

import pytest
import torch

from attn_kernels.debug_checks import debug
from tests.support.triton_interpreter import interpreted, patched


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


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """What would have been launched: nothing is, and the debug mode is off at first."""
    monkeypatch.setattr(debug, "is_on", False)  # whatever the environment says
    launched: list[object] = []

    def run(self: object, *args: object, **options: object) -> None:
        launched.append(self)

    with patched(run=run, call=run):
        yield launched
