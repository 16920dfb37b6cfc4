from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from attn_kernels.cascade.launch import CascadeAttention
from attn_kernels.cascade.plan import CascadeEstimate
from attn_kernels.decode import launch as decode_launch
from llm_engine import decode_triton, recordings
from tests.llm_engine.launch_recorder import LaunchRecorder
from tests.llm_engine.used_up import overwrite_what_is_used_up
from tests.llm_engine.whole_kernels import WHOLE_KERNELS
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


@pytest.fixture
def recorders() -> Iterator[list[LaunchRecorder]]:
    """Kernels are interpreted, or computed as a whole; the list gets decoders' recorders.

    What a step of a DeviceRunner has used up is overwritten at once.
    """
    made: list[LaunchRecorder] = []

    def make_recorder() -> LaunchRecorder:
        made.append(LaunchRecorder())
        return made[-1]

    # Patches end before the interpreter does: they would put its launch back.
    with interpreted(), pytest.MonkeyPatch.context() as monkeypatch:
        launch = JITFunction.run

        def noted(self: JITFunction, *args: Any, **options: Any) -> Any:
            for each in made:
                each.note(self, args, options)
            if any(each.is_recording for each in made):
                return None
            return WHOLE_KERNELS.get(self, partial(launch, self))(*args, **options)

        monkeypatch.setattr(JITFunction, "run", noted)
        monkeypatch.setattr(recordings, "CudaGraphRecorder", make_recorder)
        # As few as share work: the interpreter takes as long for a program's start as for a row.
        monkeypatch.setattr(decode_launch, "programs_for", lambda *_: 2)
        overwrite_what_is_used_up(monkeypatch)
        yield made


@pytest.fixture
def shared_items(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let every plan share what it can; the list gets the number of its items."""
    num_items = []

    class EagerCascade(CascadeAttention):
        def plan(self, *args: object, **options: object) -> CascadeEstimate:
            self.model = self.model.sharing_all()
            estimate = super().plan(*args, **options)  # type: ignore[arg-type]
            num_items.append(self.num_shared_items)
            return estimate

    monkeypatch.setattr(decode_triton, "CascadeAttention", EagerCascade)
    return num_items
