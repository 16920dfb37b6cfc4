"""Cases of sampling for benchmarks.kernels: what is launched, by name.

Logits are float32, vocabulary 128,256, from a normal distribution of standard deviation 3; of
"flat" cases 0.001, where nearly all tokens lie close to a threshold.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attn_kernels.sampling.launch import TokenSampler
from attn_kernels.sampling.rows import RowParams

VOCAB_SIZE = 128_256
BATCHES = (1, 32, 128, 256)

# name -> temperature, top-k, top-p, min-p
FILTERS = {
    "topk_topp": (1.0, 50, 0.9, 0.0),
    "minp": (1.0, 0, 1.0, 0.1),
    "topp": (1.0, 0, 0.9, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "greedy": (0.0, 0, 1.0, 0.0),
}
FLAT = ("topk_topp", "topp", "minp")


def sampling_cases(device: torch.device) -> Iterator[tuple[str, int, Callable[[], Tensor]]]:
    """Yield cases, the bytes of their logits, and what draws one token per row."""
    generator = torch.Generator(device).manual_seed(0)
    sampler = TokenSampler(vocab_size=VOCAB_SIZE, max_rows=max(BATCHES), device=device)
    shape = (max(BATCHES), VOCAB_SIZE)
    normal = 3 * torch.randn(shape, generator=generator, device=device)
    flat = 1e-3 * torch.randn(shape, generator=generator, device=device)
    for name, filters in FILTERS.items():
        for batch in BATCHES:
            logits = normal[:batch]
            yield f"sampling/{name}/{batch}", logits.nbytes, _case(sampler, logits, *filters)
    for name in FLAT:
        for batch in (1, 32):
            logits = flat[:batch]
            case = _case(sampler, logits, *FILTERS[name])
            yield f"sampling/{name}_flat/{batch}", logits.nbytes, case


def _case(
    sampler: TokenSampler,
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> Callable[[], Tensor]:
    num_rows, device = logits.shape[0], logits.device

    def filled(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    params = RowParams(
        temperature=filled(temperature, torch.float64),
        top_k=filled(top_k, torch.int64),
        top_p=filled(top_p, torch.float64),
        min_p=filled(min_p, torch.float64),
        seeds=torch.arange(num_rows, device=device),
        positions=filled(1000, torch.int64),
    )
    out = torch.empty(num_rows, dtype=torch.int32, device=device)
    return lambda: sampler.sample(logits, params, out=out)
