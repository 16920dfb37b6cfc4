"""Draws tokens: brings the parameters of draws to the device, and the drawn tokens to the host.

What is drawn is defined by attn_kernels/sampling/reference.py, which computes on any device. The
kernels beside it draw the same without sorting. Their arithmetic is the same, except that
logarithms and exponentials may differ in the last bit of a float64: the drawn tokens differ only if
two scores, or a mass and its limit, agree in about 12 digits. Logprobs are float32 and may differ
in the last bits.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from attn_kernels.sampling import reference
from attn_kernels.sampling.rows import LogitEdits, Logprobs, RowParams
from attn_kernels.tiles import to_device
from llm_engine.logit_edits import allowed_rows, logit_entries
from llm_engine.sampling import Draw, SampledToken

if TYPE_CHECKING:  # it imports Triton
    from attn_kernels.sampling import launch

MIN_ROWS = 64  # of the buffers of the kernels, about 64 KB each

# Does not wait: call it once all has run that was on the stream when it was made.
ReadTokens = Callable[[], list[SampledToken | None]]
TokenSampler: TypeAlias = "reference.TokenSampler | launch.TokenSampler"


class Sampler:
    """Owns what draws, for one stream.

    Args:
        kind: TokenSampler of attn_kernels.sampling: the reference, or that of launch.py.
    """

    def __init__(self, kind: Callable[..., TokenSampler] = reference.TokenSampler) -> None:
        self._kind = kind
        self._sampler: TokenSampler | None = None

    def launch(self, logits_RV: Tensor, draws: Sequence[Draw]) -> ReadTokens:
        """Draw one token per row.

        Args:
            logits_RV: Any float dtype; not modified.
            draws: One per row.

        Returns:
            A function that returns the tokens, to be called once everything now on the stream has
            run: None for a row whose largest logit is NaN, inf, or -inf.
        """
        device = logits_RV.device
        sampler = self._sampler_for(logits_RV)
        edits = upload_edits(draws, device)
        logits = logits_RV if edits is None else logits_RV.float()
        words_R = allowed_rows([draw.allowed for draw in draws])
        mask = None if words_R is None else to_device(words_R, device)
        params = _upload_params(draws, device)
        tokens_R = sampler.sample(logits, params, mask=mask, edits=edits)
        wanted = logprobs_wanted(draws)
        logprobs = None
        if wanted:
            rows = np.array(list(wanted), dtype=np.int64)
            index = to_device(rows, device)
            num_top = max(wanted.values())
            logprobs = sampler.logprobs(logits_RV[index], tokens_R[index], num_top)
        return read_later(tokens_R, logprobs, wanted, has_all_logprobs=False)

    def _sampler_for(self, logits_RV: Tensor) -> TokenSampler:
        num_rows, vocab_size = logits_RV.shape
        sampler = self._sampler
        if sampler is None or sampler.vocab_size != vocab_size or sampler.max_rows < num_rows:
            sampler = self._sampler = self._kind(
                vocab_size=vocab_size,
                max_rows=max(MIN_ROWS, 1 << (num_rows - 1).bit_length()),
                device=logits_RV.device,
            )
        return sampler


def logprobs_wanted(draws: Sequence[Draw]) -> dict[int, int]:
    """Return the rows that want logprobs: row |-> number of most probable tokens."""
    return {
        row: draw.params.logprobs
        for row, draw in enumerate(draws)
        if draw.params.logprobs is not None
    }


def read_later(
    tokens_R: Tensor,
    logprobs: Logprobs | None,
    wanted: dict[int, int],
    *,
    has_all_logprobs: bool,
) -> ReadTokens:
    """Begin to copy tokens to the host; return a function that returns them once they are there.

    Args:
        tokens_R: [num_rows], int32; -1 where no token could be drawn.
        logprobs: The log probabilities of the rows that want them, or of all rows.
        wanted: Rows that want log probabilities |-> how many of the most probable tokens.
        has_all_logprobs: Whether `logprobs` cover all rows.
    """
    tokens = _to_host(tokens_R)
    if not wanted:
        return lambda: [
            SampledToken(token_id=token_id) if token_id >= 0 else None
            for token_id in tokens.tolist()
        ]
    assert logprobs is not None, "rows want log probabilities that were not computed"
    chosen, top, top_tokens = map(_to_host, (logprobs.chosen, logprobs.top, logprobs.top_tokens))

    def read() -> list[SampledToken | None]:
        rows = [*zip(chosen.tolist(), top.tolist(), top_tokens.tolist(), strict=True)]
        if has_all_logprobs:
            of_row = {row: rows[row] for row in wanted}
        else:
            of_row = dict(zip(wanted, rows, strict=True))
        return [
            _sampled(token_id, of_row.get(row), wanted.get(row, 0)) if token_id >= 0 else None
            for row, token_id in enumerate(tokens.tolist())
        ]

    return read


def _sampled(
    token_id: int, found: tuple[float, list[float], list[int]] | None, num_top: int
) -> SampledToken:
    if found is None:
        return SampledToken(token_id=token_id)
    logprob, top, top_tokens = found
    pairs = zip(top_tokens[:num_top], top[:num_top], strict=True)
    return SampledToken(
        token_id=token_id, logprob=logprob, top_logprobs=tuple(p for p in pairs if p[0] >= 0)
    )


def _to_host(tensor: Tensor) -> Tensor:
    """Begin to copy a tensor to new memory on the host."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    copy.copy_(tensor, non_blocking=True)
    return copy


def _upload_params(draws: Sequence[Draw], device: torch.device) -> RowParams:
    params = [draw.params for draw in draws]
    floats = np.array(
        [
            [each.temperature for each in params],
            [each.top_p for each in params],
            [each.min_p for each in params],
        ]
    )
    seeds = np.array([draw.seed for draw in draws], dtype=np.uint64).view(np.int64)
    integers = np.array(
        [[each.top_k for each in params], seeds, [draw.position for draw in draws]], dtype=np.int64
    )
    packed = np.concatenate((floats.view(np.int64), integers))  # one copy for all
    temperature, top_p, min_p, top_k, seed, position = to_device(packed, device)
    return RowParams(
        temperature=temperature.view(torch.float64),
        top_p=top_p.view(torch.float64),
        min_p=min_p.view(torch.float64),
        top_k=top_k,
        seeds=seed,
        positions=position,
    )


def upload_edits(draws: Sequence[Draw], device: torch.device) -> LogitEdits | None:
    """Return the penalties and bans of all rows, None if there are none."""
    entries = logit_entries(draws)
    if entries is None:
        return None
    return LogitEdits(
        rows=to_device(entries.rows_E, device),
        tokens=to_device(entries.tokens_E, device),
        repetition=to_device(entries.repetition_E, device),
        subtract=to_device(entries.subtract_E, device),
    )
