import socket
from concurrent import futures
from dataclasses import replace

import grpc
import pytest
import torch

from cluster.config_file import load_config
from cluster.demo_model import INSTALL_TRAINED, trained_model, write_demo_model
from cluster.doctor import examine
from cluster.host_facts import collect_facts
from cluster.host_memory import HostMemory, read_host_memory
from cluster.pool_config import PoolConfig
from cluster.ray_listeners import RayListener
from tests.cluster.fact_samples import CPU_HOST, GPU_HOST
from tests.http_gateway.serving import gateway, scripted
from tests.pagewire.scripted_service import serving_in_thread
from tests.support.interfaces import have_interfaces
from tests.support.ipv6 import needs_ipv6

OPEN_RAY = RayListener(process="gcs_server (pid 17)", address="[::]:6379", auth_mode="disabled")


def findings(facts, pools=None, **options):
    config = load_config(None, {"port": 0, "http_port": 0} | options)
    config = replace(config, pools=pools or config.pools)
    return {each.check: each for each in examine(facts, config)}


def with_versions(facts, **changes):
    versions = dict(facts.versions)
    for name, version in changes.items():
        name = name.replace("_", "-")
        if version is None:
            versions.pop(name, None)
        else:
            versions[name] = version
    return replace(facts, versions=versions)


@pytest.mark.parametrize(
    "facts",
    [GPU_HOST, CPU_HOST, replace(CPU_HOST, compiler=None)],
    ids=["gpu", "cpu", "image-cpu"],
)
def test_a_healthy_host_is_healthy(facts):
    assert {each.level for each in findings(facts).values()} == {"ok"}


@pytest.mark.parametrize(
    ("facts", "check", "level", "words"),
    [
        (replace(GPU_HOST, python=(3, 10, 1)), "python", "fail", "3.11"),
        (replace(GPU_HOST, system="Darwin"), "python", "warn", "Linux"),
        (replace(CPU_HOST, torch_error="no module"), "torch", "fail", "no module"),
        (replace(CPU_HOST, driver_gpus=2), "torch", "warn", "torch is a CPU build"),
        (replace(GPU_HOST, torch_gpus=0), "torch", "warn", "torch cannot use them"),
        (
            with_versions(GPU_HOST, nvidia_nccl_cu12="2.27.5"),
            "nccl",
            "fail",
            "pip uninstall nvidia-nccl-cu12 nvidia-nccl-cu13",
        ),
        (
            with_versions(GPU_HOST, nvidia_nccl_cu13=None, nvidia_nccl_cu12="2.27.5"),
            "nccl",
            "fail",
            "torch is built for CUDA 13.0",
        ),
        (with_versions(GPU_HOST, nvidia_nccl_cu13=None), "nccl", "warn", "no NCCL wheel"),
        (with_versions(GPU_HOST, nccl4py=None), "nccl", "fail", "nccl4py"),
        (with_versions(GPU_HOST, triton=None), "triton", "fail", "triton"),
        (replace(GPU_HOST, compiler=None), "triton", "fail", "C compiler"),
        (with_versions(GPU_HOST, ray=None), "ray", "fail", "ray"),
        (replace(GPU_HOST, ray_auth_mode="disabled"), "ray access", "warn", "unset RAY_AUTH_MODE"),
        (
            replace(GPU_HOST, ray_listeners=(OPEN_RAY,)),
            "ray access",
            "fail",
            "can run code on it: gcs_server (pid 17) on [::]:6379 asks for no token ray stop",
        ),
        (with_versions(GPU_HOST, protobuf="6.33.0"), "generated code", "fail", "protobuf>=7.35.1"),
        (with_versions(GPU_HOST, grpcio="1.85.0"), "generated code", "fail", "grpcio>=1.85.1"),
        (replace(GPU_HOST, shm_free_bytes=2**20), "/dev/shm", "warn", "1 MiB free"),
        (replace(GPU_HOST, shm_free_bytes=None), "/dev/shm", "warn", "is not there"),
    ],
)
def test_a_planted_fault_is_found_with_its_remedy(facts, check, level, words):
    found = findings(facts)

    assert found[check].level == level
    assert words in f"{found[check].found} {found[check].remedy}"
    assert found[check].remedy
    assert {name for name, each in found.items() if each.level != "ok"} == {check}


def test_a_ray_that_other_hosts_reach_with_its_token_is_fine():
    closed = replace(OPEN_RAY, auth_mode="token")

    finding = findings(replace(GPU_HOST, ray_listeners=(closed,)))["ray access"]

    assert finding.level == "ok"
    assert "only with a token: gcs_server (pid 17) on [::]:6379" in finding.found


@pytest.mark.parametrize(("mode", "level"), [("", "warn"), ("disabled", "warn"), ("token", "ok")])
def test_a_ray_to_attach_to_wants_the_token_mode(mode, level):
    facts = replace(CPU_HOST, ray_auth_mode=mode)

    finding = findings(facts, ray_address="10.0.0.10:6379")["ray access"]

    assert finding.level == level
    assert level == "ok" or "export RAY_AUTH_MODE=token" in finding.remedy


def test_a_port_in_use_is_found():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        finding = findings(CPU_HOST, port=port)["port"]

    assert finding.level == "fail"
    assert f"port {port} on 127.0.0.1 is in use" in finding.found
    assert "--port 0" in finding.remedy


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_a_running_router_has_is_fine(host):
    async def never(request, context):
        yield

    with serving_in_thread(never) as (address, service):
        finding = findings(CPU_HOST, host=host, port=int(address.rpartition(":")[2]))["port"]

    assert (finding.level, finding.remedy) == ("ok", "")
    assert "running Pagewire router" in finding.found
    assert service.num_statuses == 1


def test_the_gateways_port_is_looked_at_unless_there_is_none():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        finding = findings(CPU_HOST, http_port=port)["http port"]

    assert finding.level == "fail"
    assert "--http-port 0" in finding.remedy
    assert findings(CPU_HOST, http_port=port)["http port"].found == f"127.0.0.1:{port} is free"
    assert findings(CPU_HOST, http_port=0)["http port"].level == "ok"


@needs_ipv6
def test_the_ports_of_an_address_of_ipv6_have_it_in_brackets():
    options = {"family": socket.AF_INET6}
    with (
        socket.create_server(("::1", 0), **options) as first,
        socket.create_server(("::1", 0), **options) as second,
    ):
        port, http_port = first.getsockname()[1], second.getsockname()[1]

    found = findings(CPU_HOST, host="::1", port=port, http_port=http_port)

    assert found["port"].found == f"[::1]:{port} is free"
    assert found["http port"].found == f"[::1]:{http_port} is free"


def test_a_port_that_a_running_gateway_has_is_fine():
    async def never(request, context):
        yield

    with gateway(lambda: scripted(never)) as served:
        _, port = served.host_and_port
        finding = findings(CPU_HOST, http_port=port)["http port"]

    assert (finding.level, finding.remedy) == ("ok", "")
    assert "a running gateway" in finding.found


def test_a_port_that_another_grpc_server_has_is_not_fine():
    with futures.ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()

        finding = findings(CPU_HOST, port=port)["port"]
        server.stop(None).wait(5)

    assert finding.level == "fail"
    assert f"port {port} on 127.0.0.1 is in use" in finding.found


def test_interfaces_that_were_chosen_are_looked_at(monkeypatch):
    have_interfaces(monkeypatch, {"lo": ["127.0.0.1"], "eth0": ["fd00::2"]})
    chosen = {"network_interface": "lo", "nccl_interface": "eth0"}

    found = findings(CPU_HOST, **chosen)
    missing = findings(CPU_HOST, **{**chosen, "network_interface": "eth7"})

    assert (found["network"].level, found["network"].found) == ("ok", "lo and eth0 can be used")
    assert found["port"].found == "any free one, on 127.0.0.1"
    assert missing["network"].level == "fail"
    assert missing["network"].found.startswith(
        "network_interface: found 'eth7', which does not exist"
    )
    assert missing["network"].remedy
    assert "port" not in missing, "nobody knows on which address it would be"
    assert "network" not in findings(CPU_HOST)


@pytest.mark.parametrize(
    ("options", "level", "told"),
    [
        ({}, "ok", "wide enough: 20000-20004"),
        (
            {"worker_metrics_ports": "9401-9401"},
            "fail",
            "worker_metrics_ports: found '9401-9401', ",
        ),
        ({"decode": 2}, "fail", "allowed: 7 or more"),
        ({"decode": 2, "ray_address": "auto"}, "warn", "allowed: 7 or more"),
    ],
)
def test_a_range_of_ports_is_compared_with_the_servers(options, level, told):
    found = findings(CPU_HOST, port_range="20000-20004", **options)

    assert (found["port range"].level, told in found["port range"].found) == (level, True)
    assert found["port"].found == "a free one of 20000-20004, on 127.0.0.1"
    assert "port range" not in findings(CPU_HOST)


def test_a_host_that_is_not_this_one_is_found():
    finding = findings(CPU_HOST, host="203.0.113.7")["port"]

    assert (finding.level, finding.remedy) == ("fail", "pagewire serve --host 127.0.0.1")
    assert "host: found '203.0.113.7'" in finding.found


def test_a_folder_that_cannot_be_served_is_found(tmp_path):
    finding = findings(CPU_HOST, model=tmp_path)["model"]

    assert finding.level == "fail"
    assert "config.json" in finding.found


def test_nothing_is_told_of_a_torch_that_cannot_be_imported():
    found = findings(replace(CPU_HOST, torch_error="no module"))

    assert found["nccl"].found == "not needed: torch cannot be imported"


def test_a_download_is_advised_where_it_helps(tmp_path):
    (tmp_path / "two").mkdir()
    for name in ("two/a.gguf", "two/b.gguf", "cut.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")

    remedies = {
        name: findings(CPU_HOST, model=tmp_path / name)["model"].remedy
        for name in ("two", "cut.gguf", "not there")
    }

    download = f"hf download ORGANISATION/MODEL --local-dir '{tmp_path}/not there'"
    assert remedies == {"two": "", "cut.gguf": "", "not there": download}


def test_a_gguf_file_is_examined_as_any_model():
    path = trained_model()
    assert path, f"run `{INSTALL_TRAINED}`, as `make test` does"

    found = findings(CPU_HOST, model=path)

    assert (found["model"].level, found["memory"].level) == ("ok", "ok")
    # 135 million weights in float32, and pages of 64 tokens for 30 layers
    assert "context is 8192" in found["context"].found
    assert "pagewire serve --cpu-pages-mib 360" in found["context"].remedy


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_demo_model(folder)  # 8192 tokens of context; a page of 64 tokens takes 256 KiB in float32
    return folder


@pytest.mark.parametrize(
    ("facts", "options", "level", "words"),
    [
        (CPU_HOST, {"cpu_pages_mib": 32}, "ok", "hold 8192 tokens; the model's context is 8192"),
        (CPU_HOST, {"cpu_pages_mib": 31}, "warn", "serve --cpu-pages-mib 32"),
        (CPU_HOST, {"page_size": 16, "cpu_pages_mib": 1}, "warn", "hold 256 tokens"),
        (CPU_HOST, {"num_pages": 100}, "warn", "serve --num-pages 128"),
        (CPU_HOST, {"page_size": 128, "num_pages": 64}, "ok", "hold 8192"),
        (
            CPU_HOST,
            {"cpu_pages_mib": 32, "pools": {"prefill": PoolConfig(cpu_pages_mib=16)}},
            "warn",
            "a worker of pool 'prefill' hold 4096 tokens; the model's context is 8192; longer is "
            "refused more memory for pages in pools.prefill; the context takes 32.0 MiB",
        ),
        (
            CPU_HOST,
            {
                "cpu_pages_mib": 16,
                "pools": dict.fromkeys(("prefill", "decode"), PoolConfig(num_pages=128)),
            },
            "ok",
            "hold 8192 tokens",
        ),
        (GPU_HOST, {}, "ok", "hold"),
        (replace(GPU_HOST, gpu_free_bytes=(80 * 2**30, 2**31)), {}, "fail", "hold 0 tokens"),
    ],
)
def test_a_pool_smaller_than_the_context_is_found(model_dir, facts, options, level, words):
    finding = findings(facts, model=model_dir, **options)["context"]

    assert finding.level == level
    assert words in f"{finding.found} {finding.remedy}"


def test_workers_that_do_not_fit_into_memory_are_found(model_dir):
    memory = HostMemory(total_bytes=16 * 2**30, free_bytes=3 * 2**30)
    small = replace(CPU_HOST, memory=memory)

    assert findings(small, model=model_dir, prefill=1, decode=1)["memory"].level == "ok"
    one = findings(small, model=model_dir, prefill=0, decode=1)["memory"]
    assert one.found.startswith("1 worker needs about")
    many = findings(small, model=model_dir, prefill=4, decode=4)["memory"]
    assert many.level == "warn"
    assert "8 workers need about" in many.found
    assert "3.0 GiB of 16.0 GiB are free" in many.found
    assert "--prefill 1 --decode 1" in many.remedy
    assert "--num-pages" not in many.remedy
    fixed = findings(small, model=model_dir, prefill=4, decode=4, num_pages=100)["memory"]
    assert "as num_pages is 100" in fixed.found
    assert "--num-pages 0 --cpu-pages-mib 64" in fixed.remedy
    assert "memory" not in findings(GPU_HOST, model=model_dir)
    assert findings(small, model=model_dir, prefill=40, decode=40)["memory"].level == "fail"


def test_a_containers_limit_counts(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       8388608 kB\nMemFree: 1 kB\nMemAvailable:   6291456 kB\n")
    host = HostMemory(total_bytes=8 * 2**30, free_bytes=6 * 2**30)
    assert read_host_memory(tmp_path, meminfo) == host

    (tmp_path / "memory.max").write_text("max\n")
    assert read_host_memory(tmp_path, meminfo) == host

    (tmp_path / "memory.max").write_text(f"{4 * 2**30}\n")
    (tmp_path / "memory.current").write_text(f"{3 * 2**30}\n")
    # Weights that were read are in memory, but leave when processes need room.
    (tmp_path / "memory.stat").write_text(f"anon {2**30}\ninactive_file {2**31}\nactive_file 0\n")
    assert read_host_memory(tmp_path, meminfo) == HostMemory(
        total_bytes=4 * 2**30, free_bytes=3 * 2**30
    )


def test_facts_of_this_host_can_be_collected():
    facts = collect_facts()

    assert facts.versions["grpcio"]
    assert facts.memory.total_bytes > facts.memory.free_bytes > 2**20
    assert facts.protobuf_gencode.count(".") == 2
    assert facts.grpc_gencode.count(".") == 2


def test_a_gpu_that_another_process_has_to_itself_is_none_that_torch_can_use(monkeypatch):
    def ask(gpu: int) -> tuple[int, int]:
        if gpu == 0:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")
        return 2**30, 2**31

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", ask)
    facts = collect_facts()

    assert (facts.torch_gpus, facts.gpu_free_bytes, facts.torch_error) == (1, (2**30,), "")
