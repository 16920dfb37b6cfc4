import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llm_engine.device_errors import is_device_lost
from tests.support.checkpoints import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
# In a process of its own, which has no device afterwards.
LOSE_A_DEVICE = """
import os
import sys
from pathlib import Path

import torch

from llm_engine.device_errors import is_device_lost
from llm_engine.engine_step import EngineStep
from llm_engine.load_engine import load_engine
from tests.llm_engine.driver import make_sequences

engine = load_engine(Path(sys.argv[1]), page_size=16, num_pages=64, device="cuda", num_seats=4)
steps = [
    EngineStep(slices=(each.next_slice(100),))
    for each in make_sequences(engine, [[1, 2, 3], [4] * 20])
]
engine.launch(steps[0])
torch._assert_async(torch.zeros(1, device="cuda"))
try:
    engine.launch(steps[1])
except Exception as error:
    print("launch", is_device_lost(error), flush=True)
while engine._launched:
    try:
        engine.read()
    except Exception as error:
        print("read", is_device_lost(error), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (torch.AcceleratorError("CUDA error: unspecified launch failure\n#4 capture_end()"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemm`"),
            True,
        ),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (
            torch.AcceleratorError(
                "CUDA error: operation would make the legacy stream depend on a "
                "capturing blocking stream"
            ),
            False,
        ),
        (
            RuntimeError("Triton Error [CUDA]: operation not permitted when stream is capturing"),
            False,
        ),
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_assert_between_two_launched_steps_is_known_as_the_loss_of_the_device(
    tmp_path: Path,
) -> None:
    shape = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
    write_checkpoint(tmp_path, "llama", dtype=torch.bfloat16, **shape)

    lost = subprocess.run(
        [sys.executable, "-c", LOSE_A_DEVICE, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    told = [
        line.split() for line in lost.stdout.splitlines() if line.startswith(("launch", "read"))
    ]
    assert told, lost.stderr
    assert all(is_lost == "True" for _, is_lost in told), lost.stdout + lost.stderr
