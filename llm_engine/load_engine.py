"""From a checkpoint to a ready engine: check, load weights, plan memory, compile, warm up."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from attn_kernels.compile_ahead import compiling_ahead, hash_compiler, marker_of
from attn_kernels.tiles import to_device
from kv_cache.layout import DTYPE_BYTES, KVLayout
from kv_cache.torch_storage import CopyKernel, DigestKernel, TorchPageStorage
from llm_engine.attention import AttentionBackend
from llm_engine.attention_torch import TorchAttention
from llm_engine.checkpoint import fingerprint
from llm_engine.engine import Engine, Runner
from llm_engine.errors import NotEnoughMemory
from llm_engine.host_runner import HostRunner
from llm_engine.kernel_shapes import check_kernel_shapes
from llm_engine.limits import MAX_RECORDED_TOKENS, MAX_SEATS
from llm_engine.load_progress import LoadProgress, ReportLoaded
from llm_engine.memory_plan import MemoryPlan
from llm_engine.model_config import DTYPES, ModelConfig
from llm_engine.model_files import open_model
from llm_engine.operations import Operations, TorchOperations
from llm_engine.rotary import rotary_table
from llm_engine.transformer import Decoder
from llm_engine.weights import DecoderWeights, load_weights
from observability.logs import fields

logger = logging.getLogger(__name__)

AttentionName = Literal["auto", "torch", "triton"]
# The functions at the end of this file need these, which import Triton.
TRITON_MODULES = (
    "llm_engine.attention_triton",
    "llm_engine.operations_triton",
    "llm_engine.device_runner",
    "attn_kernels.pages.launch_digest",
)
AttentionFactory = Callable[..., AttentionBackend]


def load_engine(
    model: Path,
    *,
    page_size: int,
    num_pages: int | Literal["auto"],
    device: torch.device | str,
    dtype: str = "auto",
    attention: AttentionName = "auto",
    num_seats: int = 256,
    max_step_tokens: int = MAX_RECORDED_TOKENS,
    memory: MemoryPlan | None = None,
    report_loaded: ReportLoaded = lambda done_bytes, total_bytes: None,
) -> Engine:
    """Load a checkpoint; blocks on the disk.

    Args:
        model: Folder with config.json and safetensors files, GGUF file, or folder with one.
        page_size: Token slots in a page.
        num_pages: Pages in the pool; "auto": as many as `memory` allows.
        device: "cpu", "cuda" or "cuda:1".
        dtype: Of weights, arithmetic and pages. "auto" is the checkpoint's on CUDA and float32 on
            a CPU, where half precision is slow.
        attention: "auto" is Triton on CUDA and torch elsewhere. Triton computes the rest of a
            layer, too, and gives a token the same bits in any batch.
        num_seats: Most sequences that decode at once, 0 to MAX_SEATS; with 0 the engine computes
            only slices.
        max_step_tokens: Most tokens of a step; for more, no pass of prompt tokens is recorded.
        memory: Budget of "auto"; default: that of MemoryPlan.
        report_loaded: Called now and then with the progress of the weights, unless they load at
            once.

    Raises:
        CheckpointError: If the model is incomplete, damaged or contradicts itself.
        UnsupportedModel: If it requires something that is not implemented, or no Triton kernel
            supports its heads or vocabulary.
        CacheUnusable: If a GGUF file's metadata cannot be written to the user's cache.
        NotEnoughMemory: If weights and pages do not fit on the device.
        InvalidLogits: If the model's logits are NaN or infinite.
        ValueError: If an argument is out of range.
    """
    device = _check_device(device)
    uses_triton = _uses_triton(attention, device)
    if not 0 <= num_seats <= MAX_SEATS:
        raise ValueError(f"num_seats is {num_seats}, must be 0 to {MAX_SEATS}")
    if num_pages != "auto" and num_pages < 1:
        raise ValueError(f"num_pages is {num_pages}, must be at least 1, or 'auto'")
    files = open_model(model)
    config, tensors = files.config, files.tensors
    if uses_triton:
        check_kernel_shapes(files.source, config)
    dtype_name = _dtype_name(dtype, config, device)
    layout = KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        page_size=page_size,
        head_dim=config.head_dim,
        dtype=dtype_name,
        model_fingerprint=fingerprint(config, tensors),
    )
    num_parameters = sum(prod(entry.shape) for entry in tensors.values())
    _check_memory("the weights", num_parameters * DTYPE_BYTES[dtype_name], device)
    num_bytes = sum(entry.end - entry.begin for entry in tensors.values())
    began_at = time.monotonic()
    with ThreadPoolExecutor(1, "import-kernels") as importing:
        if uses_triton:  # beside the weights; an error comes again where they are used
            importing.submit(import_kernels)
        weights = load_weights(
            config,
            tensors,
            device=device,
            dtype=getattr(torch, dtype_name),
            on_loaded=LoadProgress(num_bytes, report_loaded).advance,
        )
    loaded_at = time.monotonic()
    num_pages = _plan_num_pages(num_pages, memory or MemoryPlan(), layout, device)
    storage = TorchPageStorage(
        layout,
        num_pages,
        device,
        digest_kernel=_digest_kernel() if uses_triton else None,
        copy_kernel=_copy_kernel() if uses_triton else None,
    )
    backend = _make_attention(config, storage, uses_triton=uses_triton)
    operations = _triton_operations() if uses_triton else TorchOperations()
    decoder = Decoder(config, weights, backend, operations)
    launches_kernels = uses_triton and device.type == "cuda"
    runner: Runner
    if launches_kernels:
        runner = _device_runner(config, storage, decoder, backend, num_seats, max_step_tokens)
    else:
        runner = HostRunner(storage, decoder)
    engine = Engine(config, storage, decoder, runner)
    if launches_kernels:
        load_kernels = partial(_load_kernels, backend, weights, device)
        with torch.cuda.device(device):
            marker = marker_of(
                *(config, dtype_name, page_size, num_seats, max_step_tokens),
                num_pages % 16,  # Triton compiles separately for multiples of 16
            )
        _compile_and_load(engine, load_kernels, marker)
    else:
        engine.warm_up()
    logger.info(
        "engine_ready",
        extra=fields(
            weights_mib=num_bytes >> 20,
            weights_s=round(loaded_at - began_at, 2),
            warm_up_s=round(time.monotonic() - loaded_at, 2),
        ),
    )
    return engine


def _compile_and_load(engine: Engine, load_kernels: Callable[[], None], marker: Path) -> None:
    """Load all kernels; compile them in parallel before, unless a marker says that they are."""
    if not marker.exists():
        _compile_ahead(engine.launch_kernels, load_kernels)
    load_kernels()
    engine.warm_up()
    try:
        marker.touch()
    except OSError as error:  # the next start looks for something to compile again
        logger.warning("not_marked_as_compiled", extra=fields(error=repr(error)))


def _compile_ahead(*launches: Callable[[], object]) -> None:
    """Compile in parallel what these launch, the longest compilations first.

    A failure only costs time: whatever is wrong shows again when the kernels are launched to run.
    """
    try:
        with compiling_ahead():
            for launch in launches:
                launch()
    except Exception as error:
        logger.warning("not_compiled_ahead", extra=fields(error=repr(error)))


def _check_device(name: torch.device | str) -> torch.device:
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device.type!r}, must be 'cpu' or 'cuda'")
    num_devices = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= num_devices:
        raise ValueError(f"device is '{device}', but torch sees {num_devices} CUDA devices")
    if device.type == "cuda" and device.index is None:
        # Threads that start later select the GPU by its number.
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _dtype_name(dtype: str, config: ModelConfig, device: torch.device) -> str:
    if dtype == "auto":
        return config.dtype if device.type == "cuda" else "float32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, must be 'auto' or one of {', '.join(DTYPES)}")
    return dtype


def _plan_num_pages(
    num_pages: int | Literal["auto"], memory: MemoryPlan, layout: KVLayout, device: torch.device
) -> int:
    if num_pages == "auto":
        if device.type != "cuda":
            return memory.num_pages_on_cpu(page_bytes=layout.page_bytes)
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        # Other workers may not have taken theirs yet.
        share = total_bytes // memory.workers_per_gpu - torch.cuda.memory_reserved(device)
        free_bytes = min(free_bytes, share)
        return memory.num_pages_on_cuda(free_bytes=free_bytes, page_bytes=layout.page_bytes)
    _check_memory(f"{num_pages} pages", num_pages * layout.page_bytes, device)
    return num_pages


def _check_memory(what: str, num_bytes: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if num_bytes > free_bytes:
        raise NotEnoughMemory(
            f"{what} need {num_bytes / 1e9:.1f} GB, "
            f"{free_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB are free on {device}"
        )


def _uses_triton(attention: str, device: torch.device) -> bool:
    if attention not in ("auto", "torch", "triton"):
        raise ValueError(f"attention is {attention!r}, must be 'auto', 'torch' or 'triton'")
    return attention == "triton" or (attention == "auto" and device.type == "cuda")


def _make_attention(
    config: ModelConfig, storage: TorchPageStorage, *, uses_triton: bool
) -> AttentionBackend:
    num_slots = storage.num_pages * storage.layout.page_size
    cos, sin = rotary_table(
        config.rope,
        head_dim=config.head_dim,
        num_positions=min(config.max_context_tokens, num_slots),
        device=storage.device,
    )
    make: AttentionFactory = _triton_attention if uses_triton else TorchAttention
    return make(
        storage.pages,
        cos,
        sin,
        num_qo_heads=config.num_qo_heads,
        scale=config.attention_scale,
        sliding_window=config.sliding_window,
    )


# Triton is absent on some hosts, and slow to import on others: imported only where it is used.


def import_kernels() -> None:
    """Import what computes with Triton, and begin to hash that; ImportError: there is none."""
    for name in TRITON_MODULES:
        import_module(name)
    threading.Thread(target=hash_compiler, name="hash-compiler", daemon=True).start()


def _triton_attention(pages: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> AttentionBackend:
    from llm_engine.attention_triton import TritonAttention

    return TritonAttention(pages, cos, sin, **options)


def _triton_operations() -> Operations:
    from llm_engine.operations_triton import TritonOperations

    return TritonOperations()


def _load_kernels(
    attention: AttentionBackend, weights: DecoderWeights, device: torch.device
) -> None:
    """Launch kernels that no warm-up pass reaches."""
    from llm_engine.attention_triton import TritonAttention
    from llm_engine.operations_triton import load_linear_kernels

    assert isinstance(attention, TritonAttention)
    with torch.cuda.device(device):
        attention.load_kernels()
        load_linear_kernels(weights)


def _device_runner(
    config: ModelConfig,
    storage: TorchPageStorage,
    decoder: Decoder,
    attention: AttentionBackend,
    num_seats: int,
    max_step_tokens: int,
) -> Runner:
    from llm_engine.device_runner import make_device_runner

    with torch.cuda.device(storage.device):
        return make_device_runner(
            config,
            storage,
            decoder,
            attention,
            num_seats=num_seats,
            max_step_tokens=max_step_tokens,
        )


def _digest_kernel() -> DigestKernel:
    from attn_kernels.pages.launch_digest import digest_pages

    return digest_pages


def _copy_kernel() -> CopyKernel:
    from attn_kernels.pages.launch import copy_pages

    def copy(words: Tensor, copies: Sequence[tuple[int, int]]) -> None:
        ids = np.ascontiguousarray(np.array(copies, dtype=np.int64).T)
        sources, targets = to_device(ids, words.device)
        copy_pages(words, sources, targets)

    return copy
