"""Computes how many pages fit beside the weights; raises if none does. Pure."""

from dataclasses import dataclass

from llm_engine.errors import NotEnoughMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The memory budget of a worker's page pool without a fixed number of pages."""

    # Of the CUDA memory that is free after the weights are loaded. The rest is for the allocator's
    # rounding, for NCCL and for staging.
    cuda_free_fraction: float = 0.85
    # Of that, kept back for what an engine allocates beside its pages: activations, logits,
    # recordings, and the buffers of attention, seats and draws.
    activation_reserve_bytes: int = 3 << 30
    # Workers that share a GPU; each may use an equal part of its memory.
    workers_per_gpu: int = 1
    # On a CPU, in total: free memory says little about what other processes will need.
    cpu_pool_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if not 0 < self.cuda_free_fraction <= 1:
            raise ValueError(f"cuda_free_fraction is {self.cuda_free_fraction}, must be in (0, 1]")
        if self.workers_per_gpu < 1:
            raise ValueError(f"workers_per_gpu is {self.workers_per_gpu}, must be at least 1")
        for name in ("activation_reserve_bytes", "cpu_pool_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must not be negative")

    def num_pages_on_cuda(self, *, free_bytes: int, page_bytes: int) -> int:
        """Return how many pages fit into the memory that is free after the weights.

        Raises:
            NotEnoughMemory: If not even one fits.
        """
        budget = int(free_bytes * self.cuda_free_fraction) - self.activation_reserve_bytes
        if budget < page_bytes:
            raise NotEnoughMemory(
                f"{free_bytes / 1e9:.1f} GB are free after the weights; {self.cuda_free_fraction} "
                f"of it less {self.activation_reserve_bytes / 1e9:.1f} GB for activations does "
                f"not hold one page of {page_bytes / 1e6:.1f} MB"
            )
        return budget // page_bytes

    def num_pages_on_cpu(self, *, page_bytes: int) -> int:
        """Return how many pages fit into the budget.

        Raises:
            NotEnoughMemory: If not even one fits.
        """
        if self.cpu_pool_bytes < page_bytes:
            raise NotEnoughMemory(
                f"cpu_pool_bytes is {self.cpu_pool_bytes}, must hold a page of {page_bytes} bytes"
            )
        return self.cpu_pool_bytes // page_bytes
