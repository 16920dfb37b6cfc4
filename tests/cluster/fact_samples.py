"""What a host with GPUs and one without them have."""

from dataclasses import replace

from cluster.host_facts import HostFacts
from cluster.host_memory import HostMemory

GPU_VERSIONS = {
    "torch": "2.11.0",
    "triton": "3.6.0",
    "ray": "2.60.0",
    "grpcio": "1.85.1",
    "protobuf": "7.36.2",
    "nvidia-nccl-cu13": "2.28.9",
    "nccl4py": "0.6.0",
}
GPU_HOST = HostFacts(
    python=(3, 12, 3),
    system="Linux",
    versions=GPU_VERSIONS,
    torch_cuda="13.0",
    torch_error="",
    driver_gpus=2,
    torch_gpus=2,
    compiler="/usr/bin/cc",
    shm_free_bytes=2**30,
    memory=HostMemory(total_bytes=64 * 2**30, free_bytes=60 * 2**30),
    gpu_free_bytes=(80 * 2**30,) * 2,
    ray_auth_mode="",
    ray_listeners=(),
    protobuf_gencode="7.35.1",
    grpc_gencode="1.85.1",
)
CPU_HOST = replace(
    GPU_HOST,
    torch_cuda=None,
    driver_gpus=0,
    torch_gpus=0,
    gpu_free_bytes=(),
    versions={
        name: version
        for name, version in GPU_VERSIONS.items()
        if name not in ("nvidia-nccl-cu13", "nccl4py")
    },
)
