from typing import Any

import numpy as np
import pytest
import torch

from kv_cache import torch_storage
from kv_cache.layout import KVLayout
from kv_cache.page_storage import PageBytes, PageStorage
from kv_cache.torch_storage import TorchPageStorage, digest_multipliers, torch_digest


def build_storage(
    dtype: str = "float32", num_pages: int = 6, device: str = "cpu"
) -> TorchPageStorage:
    layout = KVLayout(
        num_layers=2, num_kv_heads=1, page_size=4, head_dim=3, dtype=dtype, model_fingerprint="m"
    )
    return TorchPageStorage(layout, num_pages, device)


def random_pages(storage: PageStorage, count: int, seed: int = 0) -> PageBytes:
    """Any bit pattern, NaNs included."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, storage.page_bytes), dtype=np.uint8)


def digest_of(storage: PageStorage, contents: PageBytes) -> bytes:
    storage.import_pages([0], contents.reshape(1, -1))
    return storage.digest_pages([0])[0]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pages_come_out_as_they_went_in(dtype: str) -> None:
    storage = build_storage(dtype)
    contents = random_pages(storage, 3)

    storage.import_pages([4, 0, 2], contents)

    assert storage.page_bytes == contents.shape[1] == storage.pages[0].nbytes
    assert np.array_equal(storage.export_pages([2, 4, 0]), contents[[2, 0, 1]])
    assert not storage.export_pages([1, 3, 5]).any()
    assert storage.pages.shape == (6, *storage.layout.page_shape)


def test_no_pages_are_no_special_case() -> None:
    storage = build_storage()
    nothing = storage.export_pages([])
    assert nothing.shape == (0, storage.page_bytes)
    storage.import_pages([], nothing)
    assert storage.digest_pages([]) == []


def test_exported_pages_are_a_copy() -> None:
    storage = build_storage()
    exported = storage.export_pages([0])
    storage.pages.fill_(1)
    assert not exported.any()


def test_copied_pages_overwrite_their_targets_only() -> None:
    storage = build_storage("bfloat16")
    storage.import_pages(range(6), random_pages(storage, 6))
    before = storage.export_pages(range(6))

    storage.copy_pages([(1, 4), (5, 2), (1, 3)])
    storage.copy_pages([])

    assert np.array_equal(storage.export_pages(range(6)), before[[0, 1, 5, 1, 1, 5]])


def test_import_takes_read_only_and_strided_contents() -> None:
    storage = build_storage()
    contents = random_pages(storage, 4)
    contents.flags.writeable = False
    storage.import_pages([0, 1], contents[::2])
    assert np.array_equal(storage.export_pages([0, 1]), contents[::2])


@pytest.mark.parametrize("page_id", [-1, 6])
def test_wrong_page_ids_are_named(page_id: int) -> None:
    storage = build_storage()
    for operation in (storage.export_pages, storage.digest_pages):
        with pytest.raises(IndexError, match=rf"page id {page_id} is not in \[0, 6\)"):
            operation([0, page_id])
    with pytest.raises(IndexError):
        storage.copy_pages([(1, 2), (0, page_id)])


def test_wrong_contents_are_refused() -> None:
    storage = build_storage()
    contents = random_pages(storage, 2)
    wrongs: list[Any] = [contents[:1], contents[:, 4:], contents.view(np.int8)]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="must be uint8"):
            storage.import_pages([0, 1], wrong)


def test_digest_sees_every_flipped_bit() -> None:
    storage = build_storage()
    contents = random_pages(storage, 1)[0]
    digests = {digest_of(storage, contents)}
    for byte in range(storage.page_bytes):
        for bit in range(8):
            changed = contents.copy()
            changed[byte] ^= 1 << bit
            digests.add(digest_of(storage, changed))
    assert len(digests) == 8 * storage.page_bytes + 1


def test_both_lanes_see_every_changed_word() -> None:
    storage = build_storage()
    contents = random_pages(storage, 1)[0]
    before = digest_of(storage, contents)
    for at in range(0, storage.page_bytes, 4):
        changed = contents.copy()
        changed[at + 3] ^= 0x80  # the highest bit, the weakest case
        after = digest_of(storage, changed)
        assert before[:8] != after[:8]
        assert before[8:] != after[8:]


def test_digest_sees_swapped_words_and_swapped_halves() -> None:
    storage = build_storage()
    words = random_pages(storage, 1)[0].view(np.uint32)
    half = len(words) // 2
    orders = [np.arange(len(words)), np.roll(np.arange(len(words)), half)]
    for first in range(len(words)):
        for second in range(first):
            order = np.arange(len(words))
            order[[first, second]] = order[[second, first]]
            orders.append(order)
    digests = {digest_of(storage, words[order].view(np.uint8)) for order in orders}
    assert len(digests) == len(orders)


def test_digest_is_of_bits_not_of_numbers() -> None:
    storage = build_storage()
    storage.pages[1].fill_(-0.0)
    storage.pages[2].fill_(float("nan"))
    storage.pages[3].copy_(storage.pages[2])

    digests = storage.digest_pages([0, 1, 2, 3])

    assert digests[0] != digests[1]
    assert digests[2] == digests[3]
    assert all(len(digest) == 16 for digest in digests)


def test_digest_is_frozen() -> None:
    """Workers of different releases must agree."""
    storage = build_storage()
    contents = (np.arange(storage.page_bytes) * 37 % 256).astype(np.uint8)
    words = contents.view("<i4").tolist()
    lanes = [
        sum(word * multiplier for word, multiplier in zip(words, lane, strict=True)) % 2**64
        for lane in digest_multipliers(len(words)).tolist()
    ]

    digest = digest_of(storage, contents)

    assert digest.hex() == "48b355e07af3657028029c959bd682f0"
    assert digest == b"".join(lane.to_bytes(8, "little") for lane in lanes)


def test_multipliers_are_those_of_splitmix64() -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    multipliers = digest_multipliers(2).T.flatten().tolist()
    assert [value % 2**64 for value in multipliers] == [value | 1 for value in published]


def test_multipliers_are_odd_and_do_not_depend_on_the_page_length() -> None:
    multipliers = digest_multipliers(1000)
    assert (multipliers % 2 != 0).all()
    assert len(set(multipliers.flatten().tolist())) == 2000
    assert torch.equal(digest_multipliers(10), multipliers[:, :10])


@pytest.mark.parametrize("block_words", [1, 7, 48, 100, 150])
def test_digest_does_not_depend_on_the_block_size(
    block_words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = build_storage()
    storage.import_pages(range(6), random_pages(storage, 6))
    expected = storage.digest_pages([5, 0, 3])
    monkeypatch.setattr(torch_storage, "_BLOCK_WORDS", block_words)
    assert storage.digest_pages([5, 0, 3]) == expected


def test_a_digest_kernel_can_take_the_place_of_torch() -> None:
    reference = build_storage()
    calls = []

    def kernel(
        words: torch.Tensor, page_ids: torch.Tensor, multipliers: torch.Tensor
    ) -> torch.Tensor:
        calls.append((words.shape, page_ids.tolist(), multipliers.shape))
        return torch_digest(words, page_ids, multipliers)

    storage = TorchPageStorage(reference.layout, 6, "cpu", digest_kernel=kernel)
    contents = random_pages(storage, 6)
    for each in (storage, reference):
        each.import_pages(range(6), contents)

    assert storage.digest_pages([2, 1]) == reference.digest_pages([2, 1])
    assert calls == [((6, 48), [2, 1], (2, 48))]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_cuda_agrees_with_the_cpu(dtype: str) -> None:
    here, there = build_storage(dtype), build_storage(dtype, device="cuda")
    contents = random_pages(here, 6)
    for storage in (here, there):
        storage.import_pages(range(6), contents)
        storage.copy_pages([(1, 4)])
    torch.cuda.synchronize()
    assert here.digest_pages(range(6)) == there.digest_pages(range(6))
    assert np.array_equal(here.export_pages(range(6)), there.export_pages(range(6)))


def test_digests_on_the_cpu_leave_the_gpus_of_the_host_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def initialize() -> None:
        raise AssertionError("it initializes CUDA")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", initialize)

    assert len(build_storage(device="cpu").digest_pages([0, 1])) == 2


@pytest.mark.gpu
def test_digest_waits_for_no_step() -> None:
    storage = build_storage(device="cuda")
    contents = random_pages(storage, 6)
    storage.import_pages(range(6), contents)
    expected = storage.digest_pages(range(6))
    step = torch.cuda.Event()

    torch.cuda._sleep(4_000_000_000)  # clocks: about two seconds
    step.record()
    digests = storage.digest_pages(range(6))

    assert not step.query(), "it waited for the work of the current stream"
    assert digests == expected


@pytest.mark.gpu
def test_digest_of_large_pages_needs_little_memory() -> None:
    layout = KVLayout(
        num_layers=32,
        num_kv_heads=8,
        page_size=64,
        head_dim=128,
        dtype="bfloat16",
        model_fingerprint="m",
    )
    storage = TorchPageStorage(layout, 40, "cuda")
    storage.digest_pages([0])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    storage.digest_pages(range(40))
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
