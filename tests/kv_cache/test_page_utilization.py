"""The classic comparison: memory reserved for the longest context against pages on demand."""

import random

from kv_cache.layout import num_pages_for
from kv_cache.prefix_cache import PrefixCache

NUM_REQUESTS = 100
PAGE_SIZE = 16


def context_lengths() -> list[tuple[int, int]]:
    """Return (prompt tokens, output tokens) per request: lognormal, seeded."""
    rng = random.Random(20)
    return [
        (max(1, int(rng.lognormvariate(5.6, 0.8))), max(1, int(rng.lognormvariate(5.0, 0.8))))
        for _ in range(NUM_REQUESTS)
    ]


def test_paging_uses_nearly_all_of_what_it_allocates() -> None:
    lengths = context_lengths()
    longest = max(prompt + output for prompt, output in lengths)
    num_slots = sum(num_pages_for(sum(each), PAGE_SIZE) for each in lengths) * PAGE_SIZE
    cache = PrefixCache(num_pages=num_slots // PAGE_SIZE, page_size=PAGE_SIZE, fingerprint="m")
    used, allocated, reserved = 0, 0, 0  # slots, summed over steps

    sequences = []
    for request, (prompt, _) in enumerate(lengths):
        tokens = [request] * prompt  # nothing is shared: that would only help
        sequences.append(cache.reserve(tokens, incoming=False))
        cache.commit(sequences[-1], len(sequences[-1].page_ids))
    num_steps = max(output for _, output in lengths)
    for step in range(num_steps + 1):
        now = [prompt + min(step, output) for prompt, output in lengths]
        for seq, num_tokens in zip(sequences, now, strict=True):
            cache.extend(seq, num_tokens)
        used += sum(now)
        allocated += cache.pool.counts().live * PAGE_SIZE
        reserved += NUM_REQUESTS * longest

    paged_share, static_share = used / allocated, used / reserved
    assert 0.95 <= paged_share < 1.0
    assert static_share < 0.30
    assert cache.pool.counts().free == 0
