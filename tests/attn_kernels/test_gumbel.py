import math

import numpy as np
import pytest
import torch

from attn_kernels.sampling import reference_gumbel
from attn_kernels.sampling.reference_gumbel import draw_bases, gumbel_noise, random_bits

MASK = (1 << 64) - 1

# (seed, position, token id) |-> 64 bits. Frozen: another value would change every sampled stream.
VECTORS = {
    (0, 0, 0): 0x568A9B0B1A2C05EC,
    (0, 0, 1): 0x44E5B8B147EF718B,
    (0, 1, 0): 0xD37690236F2CBF70,
    (1, 0, 0): 0x6EC85F1F8547BC0C,
    (42, 17, 128255): 0xD9EAD06DF96BAC3B,
    (MASK, 131071, 31999): 0x11ED1FB273F21E3E,
}


def splitmix64_from(state: int, count: int) -> list[int]:
    """Return the first outputs of splitmix64, written from its published definition."""
    outputs = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append(z ^ (z >> 31))
    return outputs


def base_of(seed: int, position: int) -> torch.Tensor:
    seeds = torch.from_numpy(np.array([seed], dtype=np.uint64).view(np.int64))
    return draw_bases(seeds, torch.tensor([position]))


def bits(seed: int, position: int, num_tokens: int) -> list[int]:
    values = random_bits(base_of(seed, position), num_tokens)[0].tolist()
    return [value & MASK for value in values]


@pytest.mark.parametrize("key", VECTORS)
def test_bits_are_frozen(key: tuple[int, int, int]) -> None:
    seed, position, token_id = key

    assert bits(seed, position, token_id + 1)[token_id] == VECTORS[key]


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 1), (MASK, 100_000), (1 << 63, 3)])
def test_bits_of_a_draw_are_the_splitmix64_sequence_of_its_base(seed: int, position: int) -> None:
    base = int(base_of(seed, position))

    assert bits(seed, position, 50) == splitmix64_from(base & MASK, 50)


def test_bits_do_not_depend_on_the_row_or_the_number_of_tokens() -> None:
    bases = draw_bases(torch.arange(6), torch.full((6,), 5))

    together = random_bits(bases, 100)

    for row in range(6):
        assert (random_bits(bases[row : row + 1], 40)[0] == together[row, :40]).all()


def test_seeds_positions_and_tokens_all_matter() -> None:
    values = {
        value for seed in range(8) for position in range(8) for value in bits(seed, position, 64)
    }

    assert len(values) == 8 * 8 * 64


def test_noise_is_finite_and_has_the_distribution_of_gumbel() -> None:
    bases = draw_bases(torch.arange(40), torch.full((40,), 9))

    noise = gumbel_noise(bases, 5000).flatten()

    count = len(noise)
    assert noise.isfinite().all()
    # Standard Gumbel: mean 0.5772, variance pi**2 / 6; five standard errors of each.
    assert abs(noise.mean().item() - np.euler_gamma) < 5 * math.pi / math.sqrt(6 * count)
    assert abs(noise.var().item() / (math.pi**2 / 6) - 1) < 5 * math.sqrt(4.4 / count)
    # Its distribution function turns it into uniform numbers.
    deciles = torch.histc(torch.exp(-torch.exp(-noise)), bins=10, min=0, max=1)
    assert ((deciles - count / 10) ** 2 / (count / 10)).sum() < 27.9  # chi-square, 9 df, p = 0.001


def test_the_smallest_and_largest_bits_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([[0, -1, 1 << 62, -(1 << 63)]])
    monkeypatch.setattr(reference_gumbel, "random_bits", lambda bases, num_tokens: extremes)

    assert gumbel_noise(torch.zeros(1, dtype=torch.int64), 4).isfinite().all()
