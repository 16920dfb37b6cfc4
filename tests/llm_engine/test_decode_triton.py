"""Pages that rows of a pass share are read once, with the bits that each row has by itself."""

from pathlib import Path

import numpy as np
import pytest
import torch

from attn_kernels.cascade.launch import CascadeAttention, HopperSharedTile, SharedTile, shared_tile
from attn_kernels.cascade.prefix_tree import prefix_tree
from llm_engine import decode_triton
from llm_engine.attention_torch import TorchAttention
from llm_engine.attention_triton import TritonAttention
from llm_engine.decode_graphs import NUM_ROWS
from llm_engine.decode_triton import TritonDecode, few_rows, reads_prefixes_once
from llm_engine.sampling import SamplingParams
from tests.attn_kernels.shared_tables import check_tree
from tests.llm_engine.driver import DrivenSequence, computed_kv, run, small_engine
from tests.llm_engine.launch_recorder import LaunchRecorder
from tests.llm_engine.shared_pages import SLICES, attend, make_backend, make_pages
from tests.support.triton_interpreter import interpreted


# Slice 4 is longer than the window, and reads its own.
@pytest.mark.parametrize("window", [None, 290])
def test_shared_pages_are_read_once_with_the_bits_of_reading_them_for_each_row(
    device: torch.device,
    shared_items: list[int],
    monkeypatch: pytest.MonkeyPatch,
    window: int | None,
) -> None:
    cascade = attend(make_backend(TritonAttention, device, window), SLICES, device)
    assert shared_items == [1]  # rows of slices 1, 3 and 4; one plan for all layers
    monkeypatch.setattr(decode_triton, "reads_prefixes_once", lambda pages, window: False)
    flat = attend(make_backend(TritonAttention, device, window), SLICES, device)
    expected = attend(make_backend(TorchAttention, device, window), SLICES, device)

    assert shared_items == [1]
    assert torch.equal(cascade, flat)
    torch.testing.assert_close(cascade, expected, atol=0.02, rtol=0.02)


def test_several_launches_share_as_well(
    device: torch.device, shared_items: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = attend(make_backend(TritonAttention, device), SLICES, device)
    monkeypatch.setattr("llm_engine.attention_triton.MAX_DECODE_ROWS", 4)
    shared_items.clear()

    out = attend(make_backend(TritonAttention, device), SLICES, device)

    # Rows by their keys: 261, 11, 261, 262 | 263, 264, 301, 251 | 252 to 255, too short to share.
    # The first launch is planned with the pass, then all are for each layer.
    assert shared_items == [1, 1, 1, 0, 1, 1, 0]
    assert torch.equal(out, expected)


def test_rows_of_one_table_share_what_their_lengths_have_in_common() -> None:
    resumed, other = range(100, 170), [*range(100, 116), *range(200, 240)]
    lens = np.array([250, 257, 512, 513, 530, 1100, 700])
    starts = np.array([0, 0, 0, 0, 0, 0, len(resumed)])

    nodes = prefix_tree(starts, np.array([*resumed, *other]), lens, page_size=16, unit_len=256)

    check_tree(nodes)
    found = [(node.begin, node.end, sorted(node.members.tolist()), node.parent) for node in nodes]
    # A row needs one more token than it shares: 512 tokens share 256.
    assert found == [(0, 256, [1, 2, 3, 4, 5, 6], None), (256, 512, [3, 4, 5], 0)]


@pytest.mark.parametrize(
    ("dtype", "sliding_window", "expected"),
    [
        (torch.bfloat16, None, True),
        (torch.float16, None, True),
        (torch.float32, None, False),
        (torch.bfloat16, 256, False),  # rows share 256 tokens at least, and each has one more
        (torch.bfloat16, 257, True),
    ],
)
def test_only_half_precision_and_a_window_of_some_length_share(
    dtype: torch.dtype, sliding_window: int | None, expected: bool
) -> None:
    pages = torch.zeros(4, 1, 2, 1, 16, 64, dtype=dtype)
    with interpreted():
        decode = TritonDecode(pages, num_qo_heads=1, scale=1.0, sliding_window=sliding_window)

    assert reads_prefixes_once(pages, sliding_window) is expected
    assert {isinstance(each, CascadeAttention) for each in decode._attentions} == {expected}


@pytest.mark.parametrize(("major", "expected"), [(8, False), (9, True), (10, False)])
def test_a_gpu_shares_where_its_instructions_are_known_to_give_the_bits(
    monkeypatch: pytest.MonkeyPatch, major: int, expected: bool
) -> None:
    class CudaPages:
        is_cuda, device = True, torch.device("cuda", 0)
        shape = (1, 1, 2, 1, 16, 64)

        def element_size(self) -> int:
            return 2

    monkeypatch.setattr("attn_kernels.tiles.major_capability", lambda device: major)

    assert reads_prefixes_once(CudaPages(), None) is expected  # type: ignore[arg-type]


def test_kernels_are_loaded_by_a_launch_that_shares_and_changes_no_page(
    device: torch.device, shared_items: list[int]
) -> None:
    pages = make_pages(device)[:1].contiguous()  # the smallest pool
    before = pages.clone()

    TritonDecode(pages, num_qo_heads=4, scale=1.0, sliding_window=None).load_kernels()
    TritonDecode(pages, num_qo_heads=4, scale=1.0, sliding_window=256).load_kernels()
    num_launched = len(shared_items)
    TritonDecode(pages, num_qo_heads=4, scale=1.0, sliding_window=257).load_kernels()

    assert len(shared_items) == 2 * num_launched > 0
    assert min(shared_items) > 0
    assert torch.equal(pages, before)


@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_launches_of_few_and_of_many_rows_are_loaded(
    monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    launched = []

    def run(self: CascadeAttention, *_: object) -> None:
        launched.append((self.decode.max_requests, self.num_shared_items > 0))

    monkeypatch.setattr(CascadeAttention, "run", run)
    pages = torch.zeros(1, 1, 2, 2, page_size, 64, dtype=torch.bfloat16)
    with interpreted():
        TritonDecode(pages, num_qo_heads=2, scale=1.0, sliding_window=None).load_kernels()

    assert launched == [(128, True), (1024, True)]


@pytest.mark.parametrize("group", range(1, 17))
def test_few_rows_are_all_for_which_cascade_chooses_narrow_tiles(group: int) -> None:
    pages = torch.zeros(1, 1, 2, 1, 16, 64, dtype=torch.bfloat16)
    num_rows = few_rows(group)

    assert isinstance(shared_tile(pages, num_rows * group, is_hopper=True), SharedTile)
    assert isinstance(shared_tile(pages, 2 * num_rows * group, is_hopper=True), HopperSharedTile)
    assert num_rows in NUM_ROWS, "no size of a recording has both"


def test_sequences_that_share_pages_draw_the_tokens_they_draw_alone(
    tmp_path: Path, shared_items: list[int], recorders: list[LaunchRecorder]
) -> None:
    prefix = [(7 * index) % 199 for index in range(256)]
    params = SamplingParams(max_tokens=3, seed=3)

    def sequence(last: int, page_ids: list[int]) -> DrivenSequence:
        return DrivenSequence(prompt=[*prefix, last], page_ids=page_ids, params=params)

    engine = small_engine(tmp_path, num_pages=40)
    expected = []
    for last in (5, 9):
        alone = sequence(last, [*range(17)])
        run(engine, [alone])
        expected.append((alone.tokens, computed_kv(engine, alone)))
    assert max(shared_items) == 0
    together = [sequence(last, [*range(16), 20 + last]) for last in (5, 9)]
    for each in together:
        each.num_computed = 256

    run(engine, together)

    for each, (tokens, kv) in zip(together, expected, strict=True):
        assert each.tokens == tokens
        assert torch.equal(computed_kv(engine, each), kv)
    assert shared_items[-2:] == [1, 1]
