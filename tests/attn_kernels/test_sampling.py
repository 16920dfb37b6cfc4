from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from attn_kernels.errors import CapacityError, DeviceError, DtypeError, ShapeError, StrideError
from attn_kernels.sampling import bodies_gumbel as kernels
from attn_kernels.sampling import reference
from attn_kernels.sampling.launch import SamplingShape, TokenSampler
from attn_kernels.sampling.reference_gumbel import draw_bases, gumbel_noise, random_bits
from attn_kernels.sampling.rows import LogitEdits
from tests.attn_kernels.sampling_case import (
    KINDS,
    TINY,
    Row,
    draw,
    draw_with_torch,
    kept_tokens,
    logits_of_kind,
    random_rows,
    row_params,
    rows_at_the_cut,
    rows_of_each_token,
)
from tests.support.rarely import rarely
from tests.support.triton_interpreter import patched

BIG_SEED = 2**63 - 1


@triton.jit
def noise_kernel(bits_ptr, noise_ptr, seed_ptr, position_ptr, N: tl.constexpr):
    tokens = tl.arange(0, N)
    base = kernels.draw_base(tl.load(seed_ptr), tl.load(position_ptr))
    bits = kernels.random_bits(base, tokens)
    tl.store(bits_ptr + tokens, bits.to(tl.int64, bitcast=True))
    tl.store(noise_ptr + tokens, kernels.gumbel_noise(bits))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 1), (-1, 131_071), (BIG_SEED, 5)])
def test_bits_are_those_of_the_reference_and_noise_is_as_close_as_float64(
    device: str, seed: int, position: int
):
    bits = torch.empty(1024, dtype=torch.int64, device=device)
    noise = torch.empty(1024, dtype=torch.float64, device=device)
    keys = [torch.tensor([key], device=device) for key in (seed, position)]

    noise_kernel[(1,)](bits, noise, *keys, N=1024)

    base = draw_bases(torch.tensor([seed]), torch.tensor([position]))
    assert torch.equal(bits.cpu(), random_bits(base, 1024)[0])
    torch.testing.assert_close(noise.cpu(), gumbel_noise(base, 1024)[0], rtol=1e-14, atol=1e-14)


SHIPPED = ["ties", "nearly flat", "mostly -inf"]  # with the shipped sizes, in each run


@pytest.mark.parametrize(
    ("kind", "vocab_size", "shape"),
    [
        *((kind, 157, TINY) for kind in KINDS),
        *((kind, 2500, None) for kind in SHIPPED),
        *rarely(*((kind, 2500, None) for kind in KINDS if kind not in SHIPPED)),
        *rarely(*((kind, 97, TINY) for kind in KINDS)),
    ],
)
def test_tokens_are_those_of_the_reference(
    device: str, kind: str, vocab_size: int, shape: SamplingShape | None
):
    rows = random_rows(14, vocab_size, seed=vocab_size + KINDS.index(kind))
    logits = logits_of_kind(kind, len(rows), vocab_size)

    assert draw(logits.to(device), rows, shape=shape) == draw_with_torch(logits, rows)


def test_the_small_sizes_take_every_path(device: str):
    rows = random_rows(20, 157, seed=157)
    statuses: set[int] = set()
    for kind in ("normal", "two levels"):
        logits = logits_of_kind(kind, len(rows), 157).to(device)
        sampler = TokenSampler(vocab_size=157, max_rows=20, device=device, shape=TINY)

        sampler.sample(logits, row_params(rows, device))

        statuses |= set(sampler._state[:, 0].tolist())
    assert statuses == {0, 1, 2, 3}  # settled, uncut, binned, crowded


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("ties", Row(top_p=0.6)),
        ("normal", Row(top_k=9, top_p=0.8, temperature=3.0)),
        ("ties", Row(min_p=0.4)),
        ("normal", Row(top_k=30, top_p=0.9, min_p=0.3)),
        *rarely(
            ("normal", Row(top_p=0.6)),
            ("ties", Row(top_k=9, top_p=0.8, temperature=3.0)),
            ("normal", Row(min_p=0.4)),
            ("ties", Row(top_k=30, top_p=0.9, min_p=0.3)),
        ),
    ],
    ids=str,
)
def test_exactly_the_tokens_that_sorting_keeps_are_drawn(device: str, kind: str, row: Row):
    logits = logits_of_kind(kind, 1, 41).to(device) / 3
    assert len(rows_of_each_token(logits[0], row)) == 41
    rows = rows_at_the_cut(logits[0], row)

    drawn = draw(logits.expand(len(rows), -1), rows, shape=TINY)

    assert set(drawn) == kept_tokens(logits[0], row)


@pytest.mark.parametrize(
    ("kind", "num_low", "row"),
    [
        ("normal", 0, Row(top_k=10)),
        ("normal", 0, Row(top_p=0.3)),
        ("ties", 0, Row(top_k=12, top_p=0.5)),
        ("normal", 13, Row(top_k=25, top_p=0.5)),
    ],
    ids=str,
)
def test_exactly_the_tokens_that_sorting_keeps_are_drawn_from_a_crowded_row(
    device: str, kind: str, num_low: int, row: Row
):
    """All tokens in one bin, or the k-th largest below all bins."""
    logits = 2.0**-13 * logits_of_kind(kind, 1, 33).to(device)
    logits[:, 33 - num_low :] -= 100.0
    assert len(rows_of_each_token(logits[0], row)) == 33 - num_low
    rows = rows_at_the_cut(logits[0], row)
    sampler = TokenSampler(vocab_size=33, max_rows=len(rows), device=device, shape=TINY)

    drawn = sampler.sample(logits.expand(len(rows), -1), row_params(rows, device))

    status, num_in_window = sampler._state[0, :2].tolist()
    assert (status, num_in_window > TINY.capacity) in [(2, True), (3, False)]  # binned, crowded
    assert set(drawn.tolist()) == kept_tokens(logits[0], row)


def test_all_tokens_that_tie_with_the_last_kept_one_are_kept(device: str):
    logits = torch.tensor([[0.0, 3.0, 1.0, 1.0, 1.0, 3.0]], device=device)

    def drawn(**changes: float) -> set[int]:
        rows = list(rows_of_each_token(logits[0], Row(**changes)).values())
        return set(draw(logits.expand(6, -1), rows, shape=TINY))

    assert drawn(top_k=1) == {1, 5}
    assert drawn(top_k=3) == {1, 2, 3, 4, 5}
    assert drawn(top_p=0.4) == {1, 5}
    # Below 3.0 is 0.063 of the mass of three, and 0.169 of that of five.
    assert drawn(top_k=3, top_p=0.93) == {1, 5}
    assert drawn(top_k=5, top_p=0.93) == {1, 2, 3, 4, 5}


def test_a_row_draws_the_same_in_any_slot(device: str):
    rows = random_rows(10, 157, seed=3)
    logits = logits_of_kind("normal", 10, 157).to(device)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1))

    together = draw(logits, rows, shape=TINY)

    shuffled = draw(logits[order.to(device)], [rows[i] for i in order], shape=TINY)
    assert shuffled == [together[i] for i in order]
    assert [draw(logits[i : i + 1], rows[i : i + 1])[0] for i in range(10)] == together


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits(device: str, dtype: torch.dtype):
    rows = random_rows(14, 157, seed=4)
    logits = logits_of_kind("normal", 14, 157).to(dtype)

    assert draw(logits.to(device), rows, shape=TINY) == draw_with_torch(logits, rows)


def bitmaps(is_allowed: torch.Tensor) -> torch.Tensor:
    """Pack booleans [rows, vocab_size] as the kernels read them."""
    padded = torch.nn.functional.pad(is_allowed, (0, -is_allowed.shape[1] % 32))
    bits = padded.view(len(padded), -1, 32).long() << torch.arange(32)
    return bits.sum(-1).to(torch.int32)


def test_a_mask_allows_exactly_its_tokens(device: str):
    rows = random_rows(20, 301, seed=5)
    logits = logits_of_kind("normal", 20, 301)
    is_allowed = torch.rand(20, 301, generator=torch.Generator().manual_seed(2)) < 0.3
    is_allowed[:5] = False
    is_allowed[:5, 77] = True

    drawn = draw(logits.to(device), rows, shape=TINY, mask=bitmaps(is_allowed).to(device))

    assert drawn == draw_with_torch(logits.masked_fill(~is_allowed, -torch.inf), rows)
    assert drawn[:5] == [77] * 5


@pytest.mark.parametrize("row", [Row(temperature=0), Row(), Row(top_k=4, top_p=0.9)], ids=str)
def test_a_row_without_a_valid_largest_logit_gives_minus_one_and_harms_no_other(
    device: str, row: Row
):
    logits = logits_of_kind("normal", 6, 301)
    bad = logits.clone()
    bad[1, 300] = torch.nan
    bad[2] = -torch.inf
    bad[3, 8] = torch.inf
    bad[4, 9] = torch.nan  # but it is masked
    is_allowed = torch.ones(6, 301, dtype=torch.bool)
    is_allowed[4, 9] = False

    drawn = draw(bad.to(device), [row] * 6, shape=TINY, mask=bitmaps(is_allowed).to(device))

    assert drawn[1:4] == [-1, -1, -1]
    expected = draw_with_torch(logits.masked_fill(~is_allowed, -torch.inf), [row] * 6)
    assert [drawn[i] for i in (0, 4, 5)] == [expected[i] for i in (0, 4, 5)]


def test_nothing_beyond_the_vocabulary_is_read(device: str):
    rows = random_rows(20, 301, seed=6)
    logits = logits_of_kind("normal", 20, 301)
    poisoned = torch.full((20, 350), torch.nan)
    poisoned[:, 20:321] = logits

    assert draw(poisoned.to(device)[:, 20:321], rows) == draw_with_torch(logits, rows)


def test_edits_hold_for_one_call_and_fillers_do_nothing(device: str):
    logits = torch.tensor([[2.0, -2.0, 1.9, 0.0]] * 2, device=device)
    before = logits.clone()
    edits = LogitEdits(
        rows=torch.tensor([0, 0, -1, 1], dtype=torch.int32, device=device),
        tokens=torch.tensor([0, 1, 99, 0], dtype=torch.int32, device=device),
        repetition=torch.tensor([2.0, 2.0, 1.0, 1.0], device=device),
        subtract=torch.tensor([0.0, 0.0, 0.0, torch.inf], device=device),
    )
    sampler = TokenSampler(vocab_size=4, max_rows=2, device=device, shape=TINY)
    params = row_params([Row(temperature=0)] * 2, device)

    edited = sampler.sample(logits, params, edits=edits)

    assert edited.tolist() == [2, 2]
    assert torch.equal(logits, before)
    assert sampler.sample(logits, params).tolist() == [0, 0]


def test_logprobs_are_of_the_plain_logits_with_ties_by_lowest_id(device: str):
    logits = logits_of_kind("ties", 6, 301)
    logits[4, 5:] = -torch.inf
    tokens = torch.tensor([0, 300, 7, 8, 3, -1], dtype=torch.int32)
    sampler = TokenSampler(vocab_size=301, max_rows=6, device=device, shape=TINY)

    found = sampler.logprobs(logits.to(device), tokens.to(device), 9)

    expected = logits.double().log_softmax(-1)
    order = (-expected).sort(dim=-1, stable=True).indices[:, :9]
    order[4, 5:] = -1
    assert found.top_tokens.tolist() == order.tolist()
    top = expected.gather(1, order.clamp(min=0)).masked_fill(order < 0, -torch.inf)
    torch.testing.assert_close(found.top.cpu().double(), top, atol=2e-6, rtol=1e-6)
    own = expected[range(5), tokens[:5].long()]
    torch.testing.assert_close(found.chosen[:5].cpu().double(), own, atol=2e-6, rtol=1e-6)
    assert found.chosen[5].isnan()


@pytest.mark.parametrize("kind", [TokenSampler, reference.TokenSampler])
def test_tokens_of_no_probability_are_not_among_the_most_probable(
    device: str, kind: type[TokenSampler] | type[reference.TokenSampler]
):
    logits = torch.tensor([[-torch.inf, 2.0, -torch.inf, 2.0], [-torch.inf] * 4], device=device)
    tokens = torch.tensor([3, -1], dtype=torch.int32, device=device)

    found = kind(vocab_size=4, max_rows=2, device=device).logprobs(logits, tokens, 5)

    assert found.top_tokens.tolist() == [[1, 3, -1, -1, -1], [-1] * 5]
    assert found.top[0, 2:].tolist() == [-torch.inf] * 3


@pytest.mark.parametrize(
    ("vocab_size", "shape", "dtype"),
    [
        (301, TINY, torch.float32),
        (304, TINY, torch.bfloat16),
        (2501, None, torch.float32),
        *rarely(
            (301, TINY, torch.bfloat16), (304, TINY, torch.float32), (2501, None, torch.bfloat16)
        ),
    ],
)
def test_logprobs_have_the_same_bits_in_any_batch_and_at_any_place(
    device: str, vocab_size: int, shape: SamplingShape | None, dtype: torch.dtype
):
    logits = logits_of_kind("normal", 7, vocab_size).to(device, dtype)
    tokens = torch.arange(7, dtype=torch.int32, device=device)
    sampler = TokenSampler(vocab_size=vocab_size, max_rows=7, device=device, shape=shape)
    whole = sampler.logprobs(logits, tokens, 5)

    batches = [slice(3, 7), slice(1, 2), torch.tensor([6, 0, 3], device=device)]
    for rows in batches:
        found = sampler.logprobs(logits[rows], tokens[rows], 5)
        assert torch.equal(found.chosen, whole.chosen[rows])
        assert torch.equal(found.top, whole.top[rows])


class TestBadInput:
    """Checks come before any launch: neither a GPU nor the interpreter is needed."""

    @pytest.fixture(autouse=True)
    def _no_launch(self):
        def fail(*args: object, **kwargs: object) -> None:
            raise AssertionError("launched")

        with patched(run=fail, call=fail):
            yield

    @pytest.mark.parametrize(
        ("logits", "error", "message"),
        [
            (torch.zeros(2, 8).double(), DtypeError, "logits is torch.float64"),
            (torch.zeros(2, 9), ShapeError, r"logits has shape \[2, 9\], must be \[any, 8\]"),
            (torch.zeros(8, 2).T, StrideError, "logits has strides"),
            (torch.zeros(2, 8, device="meta"), DeviceError, "logits is on meta"),
            (torch.zeros(5, 8), CapacityError, "logits have 5 rows, the sampler has 4"),
        ],
    )
    def test_logits(self, logits: torch.Tensor, error: type[Exception], message: str):
        sampler = TokenSampler(vocab_size=8, max_rows=4, device="cpu")

        with pytest.raises(error, match=message):
            sampler.sample(logits, row_params([Row()] * len(logits), "cpu"))

    def test_params_mask_edits_and_out(self):
        sampler = TokenSampler(vocab_size=40, max_rows=4, device="cpu")
        logits, params = torch.zeros(2, 40), row_params([Row()] * 2, "cpu")
        int32 = torch.zeros(3, dtype=torch.int32)
        edits = LogitEdits(rows=int32, tokens=int32, repetition=int32, subtract=torch.zeros(3))
        wrong = replace(params, top_k=params.top_k.int())

        with pytest.raises(DtypeError, match="params is None, must be RowParams"):
            sampler.sample(logits, None)
        with pytest.raises(DtypeError, match="edits is 3, must be LogitEdits or None"):
            sampler.sample(logits, params, edits=3)
        with pytest.raises(DtypeError, match=r"top_k is torch\.int32, must be torch\.int64"):
            sampler.sample(logits, wrong)
        with pytest.raises(ShapeError, match=r"seeds has shape \[3\], must be \[2\]"):
            sampler.sample(logits, replace(params, seeds=torch.zeros(3, dtype=torch.int64)))
        with pytest.raises(ShapeError, match=r"mask has shape \[2, 1\], must be \[2, 2\]"):
            sampler.sample(logits, params, mask=torch.zeros(2, 1, dtype=torch.int32))
        with pytest.raises(DtypeError, match=r"repetition is torch\.int32, must be torch\.float"):
            sampler.sample(logits, params, edits=edits)
        with pytest.raises(DtypeError, match=r"must be torch.float32 to be edited"):
            sampler.sample(logits.half(), params, edits=edits)
        with pytest.raises(DtypeError, match="out is torch"):
            sampler.sample(logits, params, out=torch.zeros(2, dtype=torch.int64))
        with pytest.raises(ShapeError, match="num_top is 65, must be 0 to 64"):
            sampler.logprobs(logits, int32[:2], 65)
        with pytest.raises(DtypeError, match=r"num_top is 2\.5, must be an int"):
            sampler.logprobs(logits, int32[:2], 2.5)

    def test_rows_that_share_memory_are_not_edited(self):
        """An edit of one would hold for the other, too."""
        sampler = TokenSampler(vocab_size=4, max_rows=2, device="cpu")
        row = torch.zeros(1, dtype=torch.int32)
        edits = LogitEdits(
            rows=row, tokens=row, repetition=torch.ones(1), subtract=torch.tensor([torch.inf])
        )

        for logits in (torch.zeros(1, 4).expand(2, 4), torch.zeros(7).as_strided((2, 4), (3, 1))):
            with pytest.raises(StrideError, match="logits has stride"):
                sampler.sample(logits, row_params([Row(temperature=0)] * 2, "cpu"), edits=edits)

    @pytest.mark.parametrize("sizes", [{"vocab_size": 0, "max_rows": 1}, {"vocab_size": 2**20 + 1}])
    def test_sizes(self, sizes: dict[str, int]):
        with pytest.raises(ShapeError, match="vocab_size is"):
            TokenSampler(**{"max_rows": 1, **sizes}, device="cpu")

    @pytest.mark.parametrize(("name", "size"), [("vocab_size", "100"), ("max_rows", 2.5)])
    def test_sizes_that_are_no_ints(self, name: str, size: object):
        with pytest.raises(DtypeError, match=f"{name} is {size!r}, must be an int"):
            TokenSampler(**{"vocab_size": 100, "max_rows": 1, name: size}, device="cpu")
