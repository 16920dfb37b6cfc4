"""A bench that computes each case once and times nothing."""

from collections.abc import Callable

import torch

from benchmarks.bench import Bench, Timing

POOL_BYTES = 4 << 20


class Rehearsal(Bench):
    """Runs each launch once, in the interpreter, and times nothing."""

    def __init__(self, pool_bytes: int = POOL_BYTES) -> None:
        super().__init__(pool_bytes=pool_bytes, repetitions=1, device="cpu")
        self.outs: list[torch.Tensor] = []

    def time(
        self, case: str, launch: Callable[[], object], *, also_with_clean_l2: bool = False
    ) -> Timing:
        result = launch()
        assert isinstance(result, torch.Tensor)
        self.outs.append(result.clone())
        return Timing(case=case, us=2.0, max_us=3.0, clean_us=1.0 if also_with_clean_l2 else None)

    def host_us(self, call: Callable[[], object]) -> float:
        call()
        return 1.0

    def rest(self, seconds: float) -> None:
        pass
