"""Settings of a worker process, apart from it: whoever places a worker imports no more."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from credentials.config import TlsSettings
from llm_engine.limits import MAX_RECORDED_TOKENS
from observability.tracing import TracingConfig
from options.kept_by_name import kept_by_name
from options.ports import ANY_PORT, FreePorts
from worker.own_host import HostOptions


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """Settings of a worker process; the cluster's configuration fills them."""

    worker_id: str  # "prefill-0"
    model_dir: Path  # or GGUF file; see load_engine and by_host
    served_model_name: str
    device: str  # "cpu" or "cuda"; a CUDA worker sees exactly one GPU
    dtype: str  # "auto", "float32", "float16" or "bfloat16"
    num_seats: int  # sequences that decode at once; 0 on prefill workers
    page_size: int  # token slots
    num_pages: int  # 0: as many as memory allows
    gpu_memory_fraction: float  # for pages, of the memory free after the weights
    workers_per_gpu: int  # how many share the GPU's memory
    cpu_pages_bytes: int  # for pages, without a GPU
    cpu_threads: int  # without a GPU
    host: str  # address that the worker binds and is reached at; empty: as by_host says
    log_level: str
    log_format: str  # "text" or "json"
    max_step_tokens: int = MAX_RECORDED_TOKENS  # see load_engine
    by_host: HostOptions = field(default_factory=HostOptions)  # counts where host is empty
    ports: FreePorts = ANY_PORT  # from which its servers take theirs
    metrics_ports: FreePorts | None = None  # for its metrics; None: nobody can read them here
    page_transport: Literal["auto", "nccl"] = "auto"  # see kv_transfer.transport.open_transports
    tls: TlsSettings = field(default_factory=TlsSettings)
    tracing: TracingConfig = field(default_factory=TracingConfig)
