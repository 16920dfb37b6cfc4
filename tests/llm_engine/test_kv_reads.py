"""What attention is said to read: exact bytes of small batches, counted by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attn_kernels.cascade.launch import CascadeAttention
from llm_engine import decode_triton, operations_triton  # noqa: F401  # else it stays interpreted
from llm_engine.attention_torch import TorchAttention
from llm_engine.attention_triton import TritonAttention
from llm_engine.engine_step import EngineStep, SeatStart
from llm_engine.forward_batch import build_forward_batch
from llm_engine.kv_reads import KVReads
from llm_engine.load_engine import load_engine
from llm_engine.sampling import SamplingParams, SequenceSlice
from tests.llm_engine.driver import recording, small_engine
from tests.llm_engine.launch_recorder import LaunchRecorder
from tests.llm_engine.shared_pages import (
    HEAD_DIM,
    NUM_LAYERS,
    PAGE_SIZE,
    PREFIX,
    SLICES,
    attend,
    make_backend,
    num_heads,
)
from tests.support.checkpoints import write_checkpoint
from tests.support.triton_interpreter import interpreted

CPU = torch.device("cpu")

# SLICES as rows by their keys: 261, 11, then 261 to 264 of a resumed sequence whose first two
# tokens are prompt, 301, then 251 to 255; PREFIX are 256 tokens of slices 1, 3 and 4.
ROWS = [261, 11, *range(261, 265), 301, *range(251, 256)]
SHARING = [kv_len for kv_len in ROWS if kv_len > 256]


def of_tokens(
    needed: int, read: int, groups: int = 0, rows: int = 0, *, device: torch.device = CPU
) -> KVReads:
    _, num_kv_heads = num_heads(device)
    token_bytes = NUM_LAYERS * 2 * num_kv_heads * HEAD_DIM * 2  # bfloat16
    return KVReads(
        needed_bytes=needed * token_bytes,
        read_bytes=read * token_bytes,
        groups=groups,
        grouped_rows=rows,
    )


def plan_reads(
    kind: type[TorchAttention] | type[TritonAttention],
    slices: list[SequenceSlice] = SLICES,
    window: int | None = None,
) -> KVReads:
    with interpreted():
        backend = make_backend(kind, CPU, window)
        backend.plan(build_forward_batch(slices, PAGE_SIZE, CPU))
    reads = backend.take_reads()
    assert backend.take_reads() == KVReads(), "taken twice"
    return reads


def test_rows_that_share_a_prefix_read_it_once(shared_items: list[int]) -> None:
    spared = 256 * (len(SHARING) - 1)

    assert plan_reads(TritonAttention) == of_tokens(sum(ROWS), sum(ROWS) - spared, 1, len(SHARING))


def test_what_does_not_pay_is_read_by_each_row() -> None:
    assert plan_reads(TritonAttention) == of_tokens(sum(ROWS), sum(ROWS))


def test_torch_and_pools_that_are_read_flat_read_what_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flat = of_tokens(sum(ROWS), sum(ROWS))

    assert plan_reads(TorchAttention) == flat
    monkeypatch.setattr(decode_triton, "reads_prefixes_once", lambda pages, window: False)
    assert plan_reads(TritonAttention) == flat


def test_a_window_hides_keys_and_who_is_beyond_it_shares_nothing(
    shared_items: list[int],
) -> None:
    seen = [min(kv_len, 290) for kv_len in ROWS]
    spared = 256 * (len(SHARING) - 2)  # the row of 301 keys sees others than the first 256

    assert plan_reads(TorchAttention, window=290) == of_tokens(sum(seen), sum(seen))
    assert plan_reads(TritonAttention, window=290) == of_tokens(
        sum(seen), sum(seen) - spared, 1, len(SHARING) - 1
    )


def test_prompts_alone_are_not_counted() -> None:
    prompt = SequenceSlice(token_ids=[1] * 20, start=0, page_ids=[0, 1], num_prompt_tokens=20)

    assert plan_reads(TorchAttention, [prompt]) == KVReads()
    assert plan_reads(TritonAttention, [prompt]) == KVReads()


def test_each_of_several_launches_is_counted_once_for_all_layers(
    device: torch.device,
    shared_items: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llm_engine.attention_triton.MAX_DECODE_ROWS", 4)
    backend = make_backend(TritonAttention, device)

    attend(backend, SLICES, device)

    # Rows by their keys: 261, 11, 261, 262 | 263, 264, 301, 251 | 252 to 255. Three share in each
    # of the first two launches.
    read = sum(ROWS) - 256 * (2 + 2)
    assert backend.take_reads() == of_tokens(sum(ROWS), read, 2, 6, device=device)


@pytest.mark.parametrize("num_prefix_tokens", [256, 0])
def test_an_engine_that_runs_ahead_tells_the_bytes_of_each_step(
    tmp_path: Path,
    recorders: list[LaunchRecorder],
    monkeypatch: pytest.MonkeyPatch,
    num_prefix_tokens: int,
) -> None:
    engine = recording(small_engine(tmp_path, num_layers=2), num_seats=8, records_prompts=False)
    for each in engine.decoder._attention._decode._attentions:  # type: ignore[attr-defined]
        assert isinstance(each, CascadeAttention)
        each.model = each.model.sharing_all()
    prefix = list(range(num_prefix_tokens // 16))
    lens = [num_prefix_tokens + own for own in (3, 15, 9)]
    starts = [
        SeatStart(
            seat=seat,
            prompt_token_ids=[1] * (kv_len - 1),
            output_token_ids=[2],
            page_ids=[*prefix, 30 + 2 * seat, 31 + 2 * seat],
            params=SamplingParams(temperature=0.0),
            choice=0,
            eos_token_ids=(),
        )
        for seat, kv_len in enumerate(lens)
    ]
    token_bytes = engine.layout.page_bytes // 16
    found = []
    engine.launch(EngineStep(started=tuple(starts), decodes=(0, 1, 2)))
    engine.launch(EngineStep(decodes=(0, 1, 2)))
    found.append(engine.read().reads)
    engine.launch(EngineStep(ended=(1,), decodes=(0, 2)))
    found += [engine.read().reads, engine.read().reads]

    spared = [2 * num_prefix_tokens, 2 * num_prefix_tokens, num_prefix_tokens]
    needed = [sum(lens), sum(lens) + 3, lens[0] + lens[2] + 4]
    rows = [3, 3, 2] if num_prefix_tokens else [0, 0, 0]
    assert found == [
        KVReads(
            needed_bytes=of_step * token_bytes,
            read_bytes=(of_step - less) * token_bytes,
            groups=int(num_rows > 0),
            grouped_rows=num_rows,
        )
        for of_step, less, num_rows in zip(needed, spared, rows, strict=True)
    ]


def test_a_launch_that_failed_is_not_counted_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, "llama")
    engine = load_engine(tmp_path, page_size=16, num_pages=8, device="cpu")
    step = EngineStep(
        slices=(SequenceSlice(token_ids=[1], start=3, page_ids=[0], num_prompt_tokens=3),)
    )

    def fail(token_ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder, "run_layers", fail)
        with pytest.raises(RuntimeError, match="planted"):
            engine.launch(step)
    engine.launch(step)

    num_bytes = 4 * engine.layout.page_bytes // 16
    assert engine.read().reads == KVReads(needed_bytes=num_bytes, read_bytes=num_bytes)


def test_sums_add_up() -> None:
    one = KVReads(needed_bytes=8, read_bytes=4, groups=2, grouped_rows=5)

    assert one + replace(one, groups=1) == KVReads(
        needed_bytes=16, read_bytes=8, groups=3, grouped_rows=10
    )


def test_prefix_is_long_enough_to_be_shared() -> None:
    assert len(PREFIX) * PAGE_SIZE == 256
