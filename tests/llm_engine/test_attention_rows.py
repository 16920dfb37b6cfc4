"""Which kernel computes which token, and that a resumed sequence gets the same bits from it."""

from pathlib import Path

import pytest
import torch

from attn_kernels.linear.launch_triton import linear_tiles
from llm_engine import operations_triton
from llm_engine.decode_rows import DecodeRows, decode_launches, decode_rows
from llm_engine.forward_batch import ForwardBatch, build_forward_batch
from llm_engine.sampling import SamplingParams, SequenceSlice
from llm_engine.weights import DecoderWeights, LayerWeights, LinearWeights
from tests.llm_engine.driver import computed_kv, make_sequences, run, small_engine
from tests.llm_engine.launch_recorder import LaunchRecorder


def test_all_linear_kernels_are_launched_before_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear_weights(num_out: int, num_in: int) -> LinearWeights:
        return LinearWeights(weight=torch.ones(num_out, num_in).half(), bias=None)

    norm = torch.ones(8)
    layer = LayerWeights(
        input_norm=norm,
        qkv=linear_weights(24, 8),
        q_norm=None,
        k_norm=None,
        output=linear_weights(8, 16),
        mlp_norm=norm,
        gate_up=linear_weights(32, 8),
        down=linear_weights(8, 64),
    )
    head = torch.ones(40, 8).half()
    launched = set()
    monkeypatch.setattr(
        operations_triton,
        "linear",
        lambda x, weight, bias, *, tile: launched.add((*weight.shape, x.shape[1], tile)),
    )
    monkeypatch.setattr(
        operations_triton,
        "gated_linear",
        lambda x, weight, bias, *, tile: launched.add(("gated", *weight.shape, tile)),
    )

    operations_triton.load_linear_kernels(
        DecoderWeights(embedding=head, layers=(layer, layer), final_norm=norm, lm_head=head)
    )

    shapes = {(24, 8, 8), (8, 16, 16), ("gated", 32, 8), (8, 64, 64), (40, 8, 8)}
    assert launched == {(*shape, tile) for shape in shapes for tile in linear_tiles(torch.float16)}


def batch_of(*starts_lens_prompts: tuple[int, int, int]) -> ForwardBatch:
    """Build a batch of slices (start, new tokens, prompt tokens of the sequence)."""
    slices = [
        SequenceSlice(
            token_ids=[1] * length,
            start=start,
            page_ids=list(range(8)),
            num_prompt_tokens=num_prompt_tokens,
        )
        for start, length, num_prompt_tokens in starts_lens_prompts
    ]
    return build_forward_batch(slices, 16, torch.device("cpu"))


def launches_of(batch: ForwardBatch, *, max_rows: int, max_tokens: int) -> list[DecodeRows]:
    return decode_launches(decode_rows(batch), max_rows=max_rows, max_tokens=max_tokens)


def test_drawn_tokens_are_rows_and_prompt_tokens_are_not() -> None:
    batch = batch_of((0, 5, 5), (9, 1, 10), (10, 1, 10), (7, 6, 10), (20, 3, 10))

    (launch,) = launches_of(batch, max_rows=1000, max_tokens=1000)

    assert batch.prompt_lens == (5, 1, 0, 3, 0)
    assert launch.kv_lens.tolist() == [11, 11, 12, 13, 21, 22, 23]
    assert launch.rows.tolist() == [6, 10, 11, 12, 13, 14, 15]
    starts = batch.table_starts
    assert launch.table_starts.tolist() == [starts[2], *[starts[3]] * 3, *[starts[4]] * 3]


def test_many_keys_take_several_launches_each_bounded_and_with_at_least_one_row() -> None:
    batch = batch_of((10, 4, 10), (40, 1, 10))

    launches = launches_of(batch, max_rows=1000, max_tokens=25)

    assert [launch.kv_lens.tolist() for launch in launches] == [[11, 12], [13], [14], [41]]
    assert launches_of(batch_of((0, 4, 10)), max_rows=1000, max_tokens=25) == []


def test_many_rows_take_several_launches() -> None:
    launches = launches_of(batch_of((10, 4, 10), (40, 3, 10)), max_rows=3, max_tokens=1000)

    assert [launch.kv_lens.tolist() for launch in launches] == [
        [11, 12, 13],
        [14, 41, 42],
        [43],
    ]


def test_a_resumed_sequence_leaves_the_same_bits_in_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorders: list[LaunchRecorder]
) -> None:
    monkeypatch.setattr("llm_engine.attention_triton.MAX_DECODE_TOKENS", 300)  # several launches
    engine = small_engine(tmp_path, num_layers=2, num_pages=40)
    params = SamplingParams(max_tokens=5, seed=3)
    prompts = [[7] * 5, list(range(3, 200)) + list(range(58))]  # a split of decode ends at 256
    sequences = make_sequences(engine, prompts, params)
    run(engine, sequences)
    expected = [(list(each.tokens), computed_kv(engine, each)) for each in sequences]
    engine.storage.pages.fill_(torch.nan)
    for each in sequences:
        each.num_computed = 0
        each.tokens.pop()

    run(engine, sequences, chunk_size=200)

    for each, (tokens, kv) in zip(sequences, expected, strict=True):
        assert each.tokens == tokens
        assert torch.equal(computed_kv(engine, each), kv)
