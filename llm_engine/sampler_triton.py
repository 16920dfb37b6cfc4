"""Draws tokens on GPUs with kernels that do not sort; the same tokens as `llm_engine.sampler`.

The arithmetic is that of the torch sampler, except that logarithms and exponentials may differ in
the last bit of a float64: another token is drawn only where two scores, or a mass and its limit,
agree in some 12 digits. Logprobs are float32 and may differ in the last bits.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attn_kernels.sampling import MAX_TOP_LOGPROBS, LogitEdits, RowParams, TokenSampler
from llm_engine.logit_edits import logit_entries
from llm_engine.sampler import logprobs_of, logprobs_wanted, sampled_tokens
from llm_engine.sampling import Draw, SampledToken

MIN_ROWS = 64  # of the buffers, about 64 KB each


class TritonSampler:
    """Callable like `llm_engine.sampler.sample`; owns the kernels' buffers, for one stream."""

    def __init__(self) -> None:
        self._kernels: TokenSampler | None = None

    def __call__(self, logits_RV: Tensor, draws: Sequence[Draw]) -> list[SampledToken | None]:
        """Draw one token per row; blocks until the tokens are on the host.

        Args:
            logits_RV: Any float dtype; not modified.
            draws: What to draw from each row.

        Returns:
            None for a row whose largest logit is NaN, inf, or -inf.
        """
        device = logits_RV.device
        kernels = self._kernels_for(logits_RV)
        edits = _upload_edits(draws, device)
        logits = logits_RV if edits is None else logits_RV.float()
        tokens_R = kernels.sample(logits, _upload_params(draws, device), edits=edits)
        return sampled_tokens(tokens_R.tolist(), _logprobs(kernels, logits_RV, draws, tokens_R))

    def _kernels_for(self, logits_RV: Tensor) -> TokenSampler:
        num_rows, vocab_size = logits_RV.shape
        kernels = self._kernels
        if kernels is None or kernels.vocab_size != vocab_size or kernels.max_rows < num_rows:
            kernels = self._kernels = TokenSampler(
                vocab_size=vocab_size,
                max_rows=max(MIN_ROWS, 1 << (num_rows - 1).bit_length()),
                device=logits_RV.device,
            )
        return kernels


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
    temperature, top_p, min_p, top_k, seed, position = torch.from_numpy(packed).to(device)
    return RowParams(
        temperature=temperature.view(torch.float64),
        top_p=top_p.view(torch.float64),
        min_p=min_p.view(torch.float64),
        top_k=top_k,
        seeds=seed,
        positions=position,
    )


def _upload_edits(draws: Sequence[Draw], device: torch.device) -> LogitEdits | None:
    entries = logit_entries(draws)
    if entries is None:
        return None
    return LogitEdits(
        rows=torch.from_numpy(entries.rows_E).to(device),
        tokens=torch.from_numpy(entries.tokens_E).to(device),
        repetition=torch.from_numpy(entries.repetition_E).to(device),
        subtract=torch.from_numpy(entries.subtract_E).to(device),
    )


def _logprobs(
    kernels: TokenSampler, logits_RV: Tensor, draws: Sequence[Draw], tokens_R: Tensor
) -> dict[int, SampledToken]:
    """Return the complete results of the rows that want logprobs: row |-> token."""
    wanted = logprobs_wanted(draws)
    if not wanted:
        return {}
    if max(wanted.values()) > MAX_TOP_LOGPROBS:
        return logprobs_of(logits_RV.float(), draws, tokens_R.long())
    index = torch.tensor(list(wanted), device=logits_RV.device)
    found = kernels.logprobs(logits_RV[index], tokens_R[index], max(wanted.values()))
    rows = zip(
        wanted,
        tokens_R[index].tolist(),
        found.chosen.tolist(),
        found.top_tokens.tolist(),
        found.top.tolist(),
        strict=True,
    )
    return {
        row: SampledToken(
            token_id=token,
            logprob=logprob,
            top_logprobs=tuple(
                pair
                for pair in zip(top_tokens[: wanted[row]], top[: wanted[row]], strict=True)
                if pair[0] >= 0
            ),
        )
        for row, token, logprob, top_tokens, top in rows
    }
