"""Sampling without sorting: one token per row of logits, without waiting for the host.

What is drawn is what reference.py defines: per row, each only where asked for, edits (penalties and
bans), a mask, temperature, top-k, top-p over the rest renormalized, min-p relative to the most
probable, then Gumbel-max with noise of (seed, position, token id).

Ties. A filter gives a threshold on the scaled logit, (logit - largest) / temperature in float32.
All tokens that tie with the k-th largest are kept, but the mass that top-p shares out is that of
exactly k. The nucleus ends with the first value whose mass, with all above, reaches top_p of the
whole; all tokens of that value are kept. Greedy rows take the lowest id of the largest.

Life of a row:
1. `group_max`  reads it once and keeps the largest logit of each group of 64 tokens.
2. `choose`     finds in these a bound that no kept token is below: k groups whose largest token is
                above it prove it for top-k, groups with enough mass for top-p. Few tokens are above
                in few groups; they are read again, and filters and draw are exact among them.
                Most rows end here.
3. `count_bins` counts the others in bins of equal width, with their mass as integers, so that the
                bins in which the thresholds lie are known exactly (`choose_window`);
4. `draw`       draws among the tokens above these bins and collects those in them;
5. `finish`     filters the collected ones and takes the best of all. If they are too many, as when
                most logits are nearly equal, it bisects over the row itself: slow, still exact.
Rows without top-k and top-p skip 3. What is launched does not depend on the values.

Sources: Gumbel-max (Gumbel, 1954) for a draw without a sum; bounds from the maxima of groups as in
Dr. Top-k (Gaihre et al., 2021), which calls them delegates. Masses are integers so that a set does
not depend on the order of atomics.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from attn_kernels.chain import chained
from attn_kernels.checks import check_int, check_launchable, check_tensor
from attn_kernels.debug_checks import check_edits, check_values, debug
from attn_kernels.errors import CapacityError, DtypeError, ShapeError, StrideError
from attn_kernels.limits import MAX_VOCAB_SIZE
from attn_kernels.sampling.bodies import NUM_FIELDS, choose_kernel, group_max_kernel
from attn_kernels.sampling.bodies_bins import (
    choose_window_kernel,
    count_bins_kernel,
    draw_kernel,
    finish_kernel,
)
from attn_kernels.sampling.bodies_edits import edit_logits_kernel
from attn_kernels.sampling.bodies_logprobs import logprobs_kernel
from attn_kernels.sampling.rows import LogitEdits, Logprobs, RowParams

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_ROWS = 65_535  # of a grid's second dimension
MAX_TOP_LOGPROBS = 64
EDIT_BLOCK = 256
BUSY_PROGRAMS = 1056  # eight for each multiprocessor of an H200


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingShape:
    """Sizes that the kernels are compiled for, powers of two. Results do not depend on them."""

    tile: int = 2048  # tokens whose groups one program reads
    stream_tile: int = 1024  # tokens read at a time where a program goes over a part of a row
    group: int = 64  # tokens that are judged by their largest logit
    capacity: int = 2048  # candidates that are filtered in registers
    max_gathered: int = 1024  # groups that one program reads again
    num_bins: int = 2048
    num_warps: int = 8  # of programs that have a row for themselves


class TokenSampler:
    """Fixed buffers for up to `max_rows` rows; `sample` and `logprobs` may be captured in a graph.

    One call uses all buffers: two streams need two samplers.

    Args:
        vocab_size: Tokens of a row, 1 to MAX_VOCAB_SIZE.
        max_rows: Most rows of a call, 1 to MAX_ROWS; each takes about 64 KB for a vocabulary of
            128,256.
        device: The device of the logits.
        shape: How the kernels are compiled; None takes the shipped choice.

    Raises:
        ShapeError: If a size is out of range.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_rows: int,
        device: torch.device | str,
        shape: SamplingShape | None = None,
    ) -> None:
        check_int("vocab_size", vocab_size)
        check_int("max_rows", max_rows)
        if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
            raise ShapeError(f"vocab_size is {vocab_size}, must be 1 to {MAX_VOCAB_SIZE}")
        if not 1 <= max_rows <= MAX_ROWS:
            raise ShapeError(f"max_rows is {max_rows}, must be 1 to {MAX_ROWS}")
        self._shape = shape = shape or SamplingShape()
        self._vocab_size, self._max_rows = vocab_size, max_rows
        self._device = torch.device(device)
        self._num_tiles = triton.cdiv(vocab_size, shape.tile)
        self._num_groups = self._num_tiles * (shape.tile // shape.group)

        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((max_rows, *sizes), dtype=dtype, device=self._device)

        self._group_max = empty(self._num_groups)
        self._group_list = empty(self._num_groups, dtype=torch.int32)
        self._tile_max = empty(self._num_tiles)
        self._tile_sum = empty(self._num_tiles)
        self._candidates = empty(shape.capacity)
        self._candidate_tokens = empty(shape.capacity, dtype=torch.int32)
        self._bin_counts = empty(shape.num_bins, dtype=torch.int32)
        self._bin_masses = empty(shape.num_bins, dtype=torch.int64)
        self._state = empty(NUM_FIELDS.value, dtype=torch.int64)
        self._limits = empty(2)
        self._num_parts = triton.cdiv(vocab_size, shape.stream_tile)
        self._scores = empty(self._num_parts, dtype=torch.float64)
        self._score_tokens = empty(self._num_parts, dtype=torch.int32)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_rows(self) -> int:
        return self._max_rows

    def sample(
        self,
        logits: Tensor,
        params: RowParams,
        *,
        mask: Tensor | None = None,
        edits: LogitEdits | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Draw one token per row.

        Args:
            logits: [num_rows, vocab_size], float32, bfloat16 or float16, rows of any stride.
                With edits float32, rows apart; edited while the kernels run, the same afterwards.
            params: How each row is sampled.
            mask: Bitmaps of the tokens that may be drawn, [num_rows, cdiv(vocab_size, 32)], int32:
                bit i of word j is token 32 j + i. None allows all.
            edits: Logits to change first.
            out: [num_rows], int32; allocated if None.

        Returns:
            Token ids, `out`. -1 where nothing can be drawn: the largest allowed logit is -inf,
            inf or NaN.

        Raises:
            CapacityError: If there are more rows than `max_rows`.
        """
        num_rows = self._check_logits(logits)
        self._check_params(params, num_rows)
        num_words = triton.cdiv(self._vocab_size, 32)
        if mask is not None:
            self._check("mask", mask, (num_rows, num_words), torch.int32, contiguous_from=1)
        if edits is not None:
            self._check_edits(edits, logits)
        if out is None:
            out = torch.empty(num_rows, dtype=torch.int32, device=self._device)
        self._check("out", out, (num_rows,), torch.int32)
        if num_rows == 0:
            return out
        saved = None if edits is None else self._edit(logits, edits, None)
        self._launch(logits, params, mask, out)
        if edits is not None:
            self._edit(logits, edits, saved)
        return out

    def logprobs(self, logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
        """Return log-probabilities of one token per row and of the `num_top` most probable ones.

        Args:
            logits: As of `sample`.
            tokens: [num_rows], int32; -1 is no token.
            num_top: 0 to MAX_TOP_LOGPROBS.
        """
        num_rows = self._check_logits(logits)
        self._check("tokens", tokens, (num_rows,), torch.int32)
        check_int("num_top", num_top)
        if not 0 <= num_top <= MAX_TOP_LOGPROBS:
            raise ShapeError(f"num_top is {num_top}, must be 0 to {MAX_TOP_LOGPROBS}")
        if debug.is_on:
            check_values("tokens", tokens, self._vocab_size, ShapeError, or_negative="no token")
        result = Logprobs(
            chosen=logits.new_empty(num_rows, dtype=torch.float32),
            top=logits.new_empty((num_rows, num_top), dtype=torch.float32),
            top_tokens=logits.new_empty((num_rows, num_top), dtype=torch.int32),
        )
        if num_rows == 0:
            return result
        self._launch_group_max(logits, None, None)
        logprobs_kernel[(num_rows,)](
            result.chosen,
            result.top,
            result.top_tokens,
            tokens,
            self._group_max,
            self._tile_max,
            self._tile_sum,
            logits,
            logits.stride(0),
            self._vocab_size,
            self._num_groups,
            self._num_tiles,
            num_top,
            GROUP=self._shape.group,
            GROUPS_PADDED=triton.next_power_of_2(self._num_groups),
            TILES_PADDED=triton.next_power_of_2(self._num_tiles),
            num_warps=self._shape.num_warps,
        )
        return result

    def _launch(self, logits: Tensor, params: RowParams, mask: Tensor | None, out: Tensor) -> None:
        shape, num_rows = self._shape, logits.shape[0]
        has_mask, bits = mask is not None, logits if mask is None else mask
        strides = (logits.stride(0), bits.stride(0), self._vocab_size)
        rows = (num_rows,)
        programs = min(self._num_parts, triton.cdiv(BUSY_PROGRAMS, num_rows))
        self._launch_group_max(logits, params, mask)
        groups_padded = triton.next_power_of_2(self._num_groups)
        choose_kernel[rows](
            out,
            self._state,
            self._limits,
            self._bin_counts,
            self._bin_masses,
            self._group_list,
            self._candidates,
            self._candidate_tokens,
            self._group_max,
            self._tile_max,
            self._tile_sum,
            logits,
            bits,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.seeds,
            params.positions,
            *strides,
            self._num_groups,
            self._num_tiles,
            HAS_MASK=has_mask,
            GROUP=shape.group,
            GROUPS_PADDED=groups_padded,
            TILES_PADDED=triton.next_power_of_2(self._num_tiles),
            GATHER=shape.tile // shape.group,
            CAPACITY=shape.capacity,
            MAX_GATHERED=shape.max_gathered,
            NUM_BINS=shape.num_bins,
            num_warps=shape.num_warps * (2 if groups_padded > 4096 else 1),
            **chained(logits),
        )
        count_bins_kernel[(programs, num_rows)](
            self._state,
            self._limits,
            self._bin_counts,
            self._bin_masses,
            logits,
            bits,
            params.temperature,
            params.top_k,
            params.top_p,
            *strides,
            HAS_MASK=has_mask,
            TILE=shape.stream_tile,
            NUM_BINS=shape.num_bins,
            num_warps=shape.num_warps,
            **chained(logits),
        )
        choose_window_kernel[rows](
            self._state,
            self._bin_counts,
            self._bin_masses,
            params.top_k,
            params.top_p,
            NUM_BINS=shape.num_bins,
            num_warps=shape.num_warps,
            **chained(logits),
        )
        draw_kernel[(programs, num_rows)](
            self._scores,
            self._score_tokens,
            self._state,
            self._limits,
            self._candidates,
            self._candidate_tokens,
            logits,
            bits,
            params.temperature,
            params.min_p,
            params.seeds,
            params.positions,
            *strides,
            HAS_MASK=has_mask,
            TILE=shape.stream_tile,
            CAPACITY=shape.capacity,
            NUM_BINS=shape.num_bins,
            num_warps=shape.num_warps,
            **chained(logits),
        )
        finish_kernel[rows](
            out,
            self._scores,
            self._score_tokens,
            self._state,
            self._limits,
            self._candidates,
            self._candidate_tokens,
            logits,
            bits,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.seeds,
            params.positions,
            *strides,
            programs,
            HAS_MASK=has_mask,
            SCORES_PADDED=triton.next_power_of_2(self._num_parts),
            TILE=shape.stream_tile,
            CAPACITY=shape.capacity,
            NUM_BINS=shape.num_bins,
            num_warps=shape.num_warps,
            **chained(logits),
        )

    def _launch_group_max(
        self, logits: Tensor, params: RowParams | None, mask: Tensor | None
    ) -> None:
        bits = logits if mask is None else mask
        group_max_kernel[(self._num_tiles, logits.shape[0])](
            self._group_max,
            self._tile_max,
            self._tile_sum,
            logits,
            bits,
            params.temperature if params else self._scores,
            params.top_k if params else self._state,
            params.top_p if params else self._scores,
            logits.stride(0),
            bits.stride(0),
            self._vocab_size,
            self._num_tiles,
            HAS_MASK=mask is not None,
            IS_PLAIN=params is None,
            TILE=self._shape.tile,
            GROUP=self._shape.group,
            num_warps=4,
            **chained(logits),
        )

    def _edit(self, logits: Tensor, edits: LogitEdits, saved: Tensor | None) -> Tensor:
        """Apply edits and return what stood there; or, given that, put it back."""
        num_entries = edits.rows.shape[0]
        values = torch.empty_like(edits.subtract) if saved is None else saved
        if num_entries:
            edit_logits_kernel[(triton.cdiv(num_entries, EDIT_BLOCK),)](
                logits,
                values,
                edits.rows,
                edits.tokens,
                edits.repetition,
                edits.subtract,
                logits.stride(0),
                num_entries,
                RESTORE=saved is not None,
                BLOCK=EDIT_BLOCK,
                num_warps=4,
                # A fused product and difference would round once where torch rounds twice.
                enable_fp_fusion=False,
            )
        return values

    def _check(
        self,
        name: str,
        tensor: Tensor,
        shape: tuple[int | None, ...],
        dtype: torch.dtype | tuple[torch.dtype, ...],
        contiguous_from: int = 0,
    ) -> None:
        check_tensor(
            name,
            tensor,
            shape=shape,
            dtype=dtype,
            device=self._group_max.device,
            contiguous_from=contiguous_from,
        )

    def _check_logits(self, logits: Tensor) -> int:
        self._check("logits", logits, (None, self._vocab_size), LOGIT_DTYPES, contiguous_from=1)
        check_launchable("logits", logits)
        num_rows = logits.shape[0]
        if num_rows > self._max_rows:
            raise CapacityError(f"logits have {num_rows} rows, the sampler has {self._max_rows}")
        return num_rows

    def _check_params(self, params: RowParams, num_rows: int) -> None:
        if not isinstance(params, RowParams):
            raise DtypeError(f"params is {params!r}, must be RowParams")
        for name in ("temperature", "top_p", "min_p"):
            self._check(name, getattr(params, name), (num_rows,), torch.float64)
        for name in ("top_k", "seeds", "positions"):
            self._check(name, getattr(params, name), (num_rows,), torch.int64)

    def _check_edits(self, edits: LogitEdits, logits: Tensor) -> None:
        if not isinstance(edits, LogitEdits):
            raise DtypeError(f"edits is {edits!r}, must be LogitEdits or None")
        if logits.dtype != torch.float32:
            raise DtypeError(f"logits are {logits.dtype}, must be torch.float32 to be edited")
        if logits.shape[0] > 1 and logits.stride(0) < self._vocab_size:
            raise StrideError(
                f"logits has stride {logits.stride(0)} from row to row, must be at least "
                f"{self._vocab_size} to be edited"
            )
        self._check("edits.rows", edits.rows, (None,), torch.int32)
        num_entries = edits.rows.shape[0]
        self._check("edits.tokens", edits.tokens, (num_entries,), torch.int32)
        self._check("edits.repetition", edits.repetition, (num_entries,), torch.float32)
        self._check("edits.subtract", edits.subtract, (num_entries,), torch.float32)
        if debug.is_on:
            check_edits(edits.rows, edits.tokens, logits)
