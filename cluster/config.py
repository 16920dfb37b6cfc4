"""Configuration of a whole cluster, with its defaults.

The sections `router`, `prefill_worker`, `decode_worker` and `transfer` are the configuration
classes of those packages themselves, so that an option exists once.
"""

import ipaddress
import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from decode_worker.config import DecodeConfig
from kv_transfer.deadlines import TransferDeadlines
from prefill_worker.config import PrefillConfig
from router.config import RouterConfig


class ClusterConfig(BaseModel):
    """All options. Times are seconds; a description says what a value means."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: Path | None = Field(
        None, description="Checkpoint folder: config.json, safetensors, tokenizer.json."
    )
    served_model_name: str = Field("", description="Name of the model; default: the folder's.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the workers compute; auto: CUDA if there is a GPU."
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto",
        description="Of weights and pages; auto: the checkpoint's on CUDA, float32 on CPU.",
    )
    deterministic: bool = Field(
        True, description="Same bits in any batch on GPUs; false: cuBLAS, which may be faster."
    )
    prefill: int = Field(1, ge=1, le=1024, description="Number of prefill workers.")
    decode: int = Field(1, ge=1, le=1024, description="Number of decode workers.")
    workers_per_gpu: int = Field(
        1, ge=1, le=16, description="Most workers of a pool that share a GPU of this host."
    )

    host: str = Field("127.0.0.1", description="Address the router listens on.")
    port: int = Field(50051, ge=0, le=65535, description="Port of the router; 0: a free one.")

    page_size: Literal[16, 32, 64, 128] = Field(64, description="Token slots in a page.")
    num_pages: int = Field(
        0, ge=0, description="Pages of each worker; 0: as many as its memory allows."
    )
    gpu_memory_fraction: float = Field(
        0.85,
        gt=0,
        le=1,
        description="Share for pages of the GPU memory that is free after the weights.",
    )
    cpu_pages_mib: int = Field(
        256, ge=1, description="Memory for pages of each worker without a GPU, MiB."
    )
    cpu_threads: int = Field(1, ge=1, description="Threads of each worker without a GPU.")

    ray_address: str = Field(
        "", description="Ray cluster to attach to, host:port or auto; empty: start a local one."
    )
    start_timeout_s: float = Field(
        600.0, gt=0, description="Longest time until all workers are ready, weights included."
    )
    stop_grace_s: float = Field(
        10.0, ge=0, description="Time that running requests get when the cluster stops."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe log lines to write."
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        description="Log lines for people (key=value) or for machines (JSON). In the output of "
        "pagewire serve Ray puts the process before each line of another one; the files in its "
        "session folder have the lines alone.",
    )

    router: RouterConfig = Field(default_factory=RouterConfig)
    prefill_worker: PrefillConfig = Field(default_factory=PrefillConfig)
    decode_worker: DecodeConfig = Field(default_factory=DecodeConfig)
    transfer: TransferDeadlines = Field(default_factory=TransferDeadlines)

    @field_validator("model", mode="before")
    @classmethod
    def _check_model(cls, model: object) -> object:
        if not isinstance(model, str | Path) or model == "":  # empty is the current folder
            raise ValueError("must be the path of a checkpoint folder")
        return model

    @field_validator("host", mode="before")
    @classmethod
    def _check_host(cls, host: Any) -> Any:
        is_one_word = isinstance(host, str) and re.fullmatch(r"[^\s/]+", host)
        if not is_one_word or (":" in host and not _is_ipv6(host)):
            raise ValueError("must be a host name or an address, without a port; see port")
        return host

    @field_validator("ray_address", mode="before")
    @classmethod
    def _check_ray_address(cls, address: Any) -> Any:
        found = re.fullmatch(r"[^\s:/]+:(\d+)|\[[0-9a-fA-F:]+\]:(\d+)", str(address))
        if address in ("", "auto") or (found and 0 < int(found[1] or found[2]) <= 65535):
            return address
        raise ValueError("must be host:port of a Ray cluster, as in 10.0.0.1:6379, or auto")

    @model_validator(mode="after")
    def _check_workers_per_gpu(self) -> Self:
        if self.ray_address and self.workers_per_gpu > 1:
            raise ValueError(
                f"workers_per_gpu is {self.workers_per_gpu}; it must be 1 with ray_address, where "
                "Ray gives each worker a GPU of its own"
            )
        return self

    @model_validator(mode="after")
    def _check_heartbeats(self) -> Self:
        dead_after_s = self.router.dead_after_s
        for name in ("prefill_worker", "decode_worker"):
            heartbeat_s = getattr(self, name).heartbeat_s
            if dead_after_s < 2 * heartbeat_s:
                raise ValueError(
                    f"router.dead_after_s is {dead_after_s}; it must be at least twice "
                    f"{name}.heartbeat_s, which is {heartbeat_s}"
                )
        return self


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
