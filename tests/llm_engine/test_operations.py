"""What a decoder computes between attention calls, in torch and by own kernels."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llm_engine.load_engine import load_engine
from llm_engine.operations import Operations, TorchOperations
from llm_engine.operations_triton import TritonOperations
from llm_engine.sampling import SamplingParams
from tests.llm_engine.driver import make_sequences, run
from tests.support.checkpoints import write_checkpoint
from tests.support.triton_interpreter import interpreted

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operations", [TorchOperations(), TritonOperations()], ids=type)
def test_adding_where_the_norm_is_computed_gives_the_bits_of_adding_before(
    operations: Operations, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 5, 96, generator=generator).to(dtype)
    weight = torch.randn(96, generator=generator).to(dtype)
    total = x + residual

    with interpreted():
        expected = operations.rms_norm(total, weight, 1e-5)
        normed = operations.add_rms_norm(x, residual, weight, 1e-5)

    assert torch.equal(normed, expected)
    assert torch.equal(residual, total)


def test_a_decoder_adds_where_it_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, num_hidden_layers=3)
    engine = load_engine(tmp_path, page_size=8, num_pages=16, device="cpu")
    calls: Counter[str] = Counter()
    for name in ("rms_norm", "add_rms_norm"):
        method = getattr(TorchOperations, name)

        def counted(*args: object, name: str = name, method: object = method) -> Tensor:
            calls[name] += 1
            return method(*args)

        monkeypatch.setattr(TorchOperations, name, counted)

    run(engine, make_sequences(engine, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1)))

    # Two norms a layer and one before the head. Only the first of all has nothing to add, and the
    # last one norms few of the rows; torch's addition calls rms_norm.
    assert calls == {"add_rms_norm": 5, "rms_norm": 5 + 2}
