"""Rows of logits with parameters, and what sampling them must keep, by sorting in float64."""

import random
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attn_kernels.sampling import reference
from attn_kernels.sampling.launch import SamplingShape, TokenSampler
from attn_kernels.sampling.reference_gumbel import draw_bases, gumbel_noise
from attn_kernels.sampling.rows import RowParams

# In small vocabularies, each path of a row is taken only with small sizes.
TINY = SamplingShape(
    tile=64,
    stream_tile=32,
    group=4,
    capacity=32,
    max_gathered=16,
    num_bins=32,
    num_warps=1,
)


@dataclass(frozen=True, slots=True)
class Row:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


def row_params(rows: list[Row], device: str) -> RowParams:
    def upload(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return RowParams(
        temperature=upload([row.temperature for row in rows], torch.float64),
        top_k=upload([row.top_k for row in rows], torch.int64),
        top_p=upload([row.top_p for row in rows], torch.float64),
        min_p=upload([row.min_p for row in rows], torch.float64),
        seeds=upload([row.seed for row in rows], torch.int64),
        positions=upload([row.position for row in rows], torch.int64),
    )


def draw(
    logits: Tensor,
    rows: list[Row],
    *,
    shape: SamplingShape | None = None,
    mask: Tensor | None = None,
) -> list[int]:
    sampler = TokenSampler(
        vocab_size=logits.shape[1], max_rows=len(rows), device=logits.device, shape=shape
    )
    tokens: list[int] = sampler.sample(
        logits, row_params(rows, str(logits.device)), mask=mask
    ).tolist()
    return tokens


def draw_with_torch(logits: Tensor, rows: list[Row]) -> list[int]:
    """Draw as the reference does, which defines what the kernels must draw."""
    sampler = reference.TokenSampler(
        vocab_size=logits.shape[1], max_rows=len(rows), device=logits.device
    )
    tokens: list[int] = sampler.sample(logits, row_params(rows, str(logits.device))).tolist()
    return tokens


def kept_tokens(logits: Tensor, row: Row) -> set[int]:
    """Return the tokens of one row that the filters keep."""
    values = logits.float().cpu().numpy()
    with np.errstate(divide="ignore"):
        scaled = ((values - values.max()).astype(np.float64) / row.temperature).astype(np.float32)
        log_min_p = np.log(np.float64(row.min_p))
    scaled = scaled.astype(np.float64)
    ranked = np.sort(scaled)[::-1][: row.top_k or None]
    masses = np.exp(ranked)
    before = np.cumsum(masses) - masses
    is_in = (before < row.top_p * masses.sum()) | (row.top_p >= 1)
    is_in[0] = True
    is_kept = (scaled >= ranked[is_in][-1]) & (scaled >= log_min_p) & (scaled > -np.inf)
    return set(np.flatnonzero(is_kept).tolist())


def rows_of_each_token(logits: Tensor, row: Row, num_positions: int = 4096) -> dict[int, Row]:
    """Return the row at positions of which each draws another token when nothing is filtered out.

    Of these, a filter that keeps a token too many or too few is sure to change one.
    """
    positions = torch.arange(num_positions)
    noise = gumbel_noise(draw_bases(torch.full_like(positions, row.seed), positions), len(logits))
    drawn = (logits.double().cpu() / row.temperature + noise).argmax(1).tolist()
    position_of = {token: position for position, token in enumerate(drawn)}
    return {token: replace(row, position=position) for token, position in position_of.items()}


def rows_at_the_cut(logits: Tensor, row: Row) -> list[Row]:
    """Return the rows of the tokens that the filters keep, and of the largest that they do not."""
    rows, kept = rows_of_each_token(logits, row), kept_tokens(logits, row)
    others = sorted(rows.keys() - kept, key=lambda token: -float(logits[token]))
    return [rows[token] for token in (*sorted(kept), *others[:4])]


def random_rows(count: int, vocab_size: int, seed: int) -> list[Row]:
    """Mix all filters, off and on, narrow and wide."""
    rng = random.Random(seed)
    return [
        Row(
            temperature=rng.choice([1.0, 1.0, 0.7, 2.5, 0.0]),
            top_k=rng.choice([0, 0, 1, 3, 20, vocab_size // 3, vocab_size - 1]),
            top_p=rng.choice([1.0, 1.0, 0.9, 0.5, 0.999, 1e-6]),
            min_p=rng.choice([0.0, 0.0, 0.02, 0.5, 1.0]),
            seed=rng.randrange(-(2**63), 2**63),
            position=rng.randrange(2**20),
        )
        for _ in range(count)
    ]


def logits_of_kind(kind: str, num_rows: int, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(kind))
    logits = 3 * torch.randn(num_rows, vocab_size, generator=generator)
    if kind == "ties":
        return (logits * 2).round() / 2
    if kind == "flat":
        return torch.full_like(logits, 7.0)
    if kind == "nearly flat":
        return 1e-3 * logits
    if kind == "one-hot":
        tokens = torch.randint(vocab_size, (num_rows, 1), generator=generator)
        return torch.full_like(logits, -torch.inf).scatter(1, tokens, -3.0)
    if kind == "mostly -inf":
        return logits.masked_fill(torch.rand(logits.shape, generator=generator) < 0.9, -torch.inf)
    if kind == "two levels":
        return torch.where(logits > 3, 50.0, logits * 1e-6)
    if kind == "wide":
        return logits * 300
    return logits


KINDS = ["normal", "ties", "flat", "nearly flat", "one-hot", "mostly -inf", "two levels", "wide"]
