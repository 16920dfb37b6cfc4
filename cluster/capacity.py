"""The memory that a model needs and the pages that workers hold, before anything is started."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.host_memory import HostMemory
from cluster.pool_config import SECTION
from kv_cache.layout import DTYPE_BYTES, KVLayout, num_pages_for
from llm_engine.errors import NotEnoughMemory
from llm_engine.memory_plan import MemoryPlan
from llm_engine.model_files import open_model
from pagewire.cli.units import format_bytes

LITTLE_MIB = 64  # for pages of a worker, where memory is short
PROCESS_BYTES = 400 * 2**20  # of a worker beside weights and pages: Python, torch, activations
CLUSTER_BYTES = 800 * 2**20  # Ray, controller and router
HIGH_GPU_FRACTION = 0.95  # leaves room for activations


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryShortage:
    """Workers that need more memory than a host without GPUs has for them."""

    found: str
    is_hopeless: bool  # more than the host has in total, not only more than is free now


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelNeeds:
    """Sizes of one model on one kind of device."""

    weights_bytes: int
    page_bytes: int
    page_size: int  # token slots
    context_tokens: int  # that the model could serve

    @property
    def context_pages(self) -> int:
        """Pages that one request with the whole context takes."""
        return num_pages_for(self.context_tokens, self.page_size)


def read_model_needs(model_path: Path, config: ClusterConfig, device: str) -> ModelNeeds:
    """Read the sizes from a checkpoint that can be served (see check_model_folder)."""
    files = open_model(model_path)
    model = files.config
    on_device = model.dtype if device == "cuda" else "float32"
    dtype = on_device if config.dtype == "auto" else config.dtype
    layout = KVLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        page_size=config.page_size,
        head_dim=model.head_dim,
        dtype=dtype,
        model_fingerprint="",
    )
    return ModelNeeds(
        weights_bytes=sum(prod(each.shape) for each in files.tensors.values()) * DTYPE_BYTES[dtype],
        page_bytes=layout.page_bytes,
        page_size=config.page_size,
        context_tokens=model.max_context_tokens,
    )


def pages_of_worker(needs: ModelNeeds, config: ClusterConfig, gpu_free_bytes: int | None) -> int:
    """Return how many pages a worker gets; 0: not one fits.

    Args:
        needs: The needs of the model.
        config: Limits the memory of pages.
        gpu_free_bytes: Free memory before the weights are loaded; None: on a CPU.
    """
    if config.num_pages:
        return config.num_pages
    plan = MemoryPlan(
        cuda_free_fraction=config.gpu_memory_fraction,
        workers_per_gpu=config.workers_per_gpu,
        cpu_pool_bytes=config.cpu_pages_mib * 2**20,
    )
    try:
        if gpu_free_bytes is None:
            return plan.num_pages_on_cpu(page_bytes=needs.page_bytes)
        free_bytes = gpu_free_bytes // config.workers_per_gpu - needs.weights_bytes
        return plan.num_pages_on_cuda(free_bytes=free_bytes, page_bytes=needs.page_bytes)
    except NotEnoughMemory:
        return 0


def context_remedy(needs: ModelNeeds, config: ClusterConfig, device: str, command: str) -> str:
    """Say how to let a worker's pages hold the longest request that the model could serve.

    Args:
        needs, config, device: Needs of the model; configuration and device of the cluster.
        command: The command that starts it: "serve" or "up".
    """
    needed_mib = -(-needs.context_pages * needs.page_bytes // 2**20)
    if config.num_pages:
        return f"pagewire {command} --num-pages {needs.context_pages}"
    if device == "cpu":
        return f"pagewire {command} --cpu-pages-mib {needed_mib}"
    if config.gpu_memory_fraction < HIGH_GPU_FRACTION:
        fraction = f"pagewire {command} --gpu-memory-fraction {HIGH_GPU_FRACTION}"
        return f"{fraction}; the context takes {needed_mib} MiB"
    return f"GPUs that have {needed_mib} MiB for pages beside the weights"


def pool_remedy(needs: ModelNeeds, config: ClusterConfig, key: str) -> str:
    """Say what `context_remedy` says, for a pool with its own options for pages."""
    context = format_bytes(needs.context_pages * needs.page_bytes)
    return f"more memory for pages in {config.pool_section(key)}; the context takes {context}"


def host_bytes(needs: ModelNeeds, config: ClusterConfig, workers: Mapping[str, int]) -> int:
    """Return the memory that a cluster's processes take on a host without GPUs.

    Args:
        needs, config: The model's needs, and the options of its workers.
        workers: Numbers of workers by the key of their pool.
    """
    beside = PROCESS_BYTES + needs.weights_bytes
    pages = _pages_bytes(needs, config, workers).items()
    return CLUSTER_BYTES + sum(workers[key] * (beside + own) for key, own in pages)


def memory_shortage(
    needs: ModelNeeds, config: ClusterConfig, workers: Mapping[str, int], memory: HostMemory
) -> MemoryShortage | None:
    """Judge a host without GPUs; None: all workers fit into what is free. See host_bytes."""
    needed = host_bytes(needs, config, workers)
    if needed <= memory.free_bytes:
        return None
    return MemoryShortage(
        found=memory_account(needs, config, workers, memory),
        is_hopeless=needed > memory.total_bytes,
    )


def memory_remedy(config: ClusterConfig) -> str:
    """Return the options of a cluster that takes little of a host without GPUs.

    Those of its pools are options of the file alone, and flags do not override them.
    """
    by_memory = "--num-pages 0 " if config.num_pages else ""
    flags = f"--prefill 1 --decode 1 --dtype bfloat16 {by_memory}--cpu-pages-mib {LITTLE_MIB}"
    in_file = [
        f"{SECTION}.{name}.{option}: {little}"
        for name, pool in config.pools.items()
        for option, little in (("workers", 1), ("num_pages", 0), ("cpu_pages_mib", LITTLE_MIB))
        if (getattr(pool, option) or 0) > little
    ]
    return f"{flags}, and in the file {', '.join(in_file)}" if in_file else flags


def memory_account(
    needs: ModelNeeds, config: ClusterConfig, workers: Mapping[str, int], memory: HostMemory
) -> str:
    """Say how much memory the workers need, by which option, and how much there is."""
    option = "num_pages" if config.num_pages else "cpu_pages_mib"
    pages = _pages_bytes(needs, config, workers).values()
    if config.pools:
        each = f"{format_bytes(min(pages))} to {format_bytes(max(pages))} for pages each, by pool"
    else:
        each = (
            f"{format_bytes(max(pages))} for pages each, as {option} is {getattr(config, option)}"
        )
    num_workers = sum(workers.values())
    need = "1 worker needs" if num_workers == 1 else f"{num_workers} workers need"
    return (
        f"{need} about "
        f"{format_bytes(host_bytes(needs, config, workers))}, with {each}; "
        f"{format_bytes(memory.free_bytes)} of {format_bytes(memory.total_bytes)} are free"
    )


def _pages_bytes(
    needs: ModelNeeds, config: ClusterConfig, workers: Mapping[str, int]
) -> dict[str, int]:
    """Return the bytes for pages of each worker on a host without GPUs, by pool."""
    return {
        key: pages_of_worker(needs, config.in_pool(key), None) * needs.page_bytes
        for key, number in workers.items()
        if number
    }
