"""What serve and demo refuse before anything is started, and before anything slow is imported."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from itertools import chain

import pytest

from cli import serving_commands
from cluster import preflight
from cluster.capacity import read_model_needs
from cluster.config_file import load_config
from cluster.demo_model import demo_model_dir
from cluster.errors import ConfigError, PlacementError
from cluster.host_memory import HostMemory
from cluster.own_address import check_interfaces
from cluster.pool_config import PoolConfig
from cluster.port_need import check_port_ranges
from cluster.preflight import check_growth, check_start
from router.tenants.file import new_token, token_hash
from tests.support.certificates import Authority
from tests.support.interfaces import have_interfaces
from tests.support.rarely import rarely

GIB = 2**30
# What takes long to import, and no refusal needs.
SLOW_MODULES = {"ray", "torch", "numpy", "rich", "tokenizers", "transformers", "triton"}


def check_on_a_host_with(monkeypatch, memory, **options):
    monkeypatch.setattr(preflight, "read_host_memory", lambda: memory)
    said = []
    options = {"model": str(demo_model_dir()), "device": "cpu", "port": 0, "http_port": 0} | options
    return check_start(load_config(None, options), said.append), said


def test_workers_that_the_host_can_never_hold_are_refused(monkeypatch):
    memory = HostMemory(total_bytes=8 * GIB, free_bytes=7 * GIB)

    with pytest.raises(PlacementError, match=r"80 workers need about .* of 8.0 GiB are free; try"):
        check_on_a_host_with(monkeypatch, memory, prefill=40, decode=40)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cpu_pages_mib": 2**20}, "with 1.0 TiB for pages each, as cpu_pages_mib is 1048576"),
        ({"num_pages": 2**22}, "with 1.0 TiB for pages each, as num_pages is 4194304"),
    ],
)
def test_pages_that_the_host_can_never_hold_are_refused_by_their_option(
    monkeypatch, options, words
):
    memory = HostMemory(total_bytes=8 * GIB, free_bytes=7 * GIB)

    with pytest.raises(PlacementError, match=rf"{words}; 7.0 GiB of 8.0 GiB are free; try"):
        check_on_a_host_with(monkeypatch, memory, **options)


@pytest.mark.parametrize("pool", ["", "decode", "small"])
def test_memory_for_less_than_a_page_is_refused(monkeypatch, tmp_path, pool):
    config = {"model": str(demo_model_dir()), "device": "cpu", "port": 0, "http_port": 0}
    small = {"cpu_pages_mib": 1}
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps(config | {"page_size": 128, "dtype": "float32"}))
    loaded = load_config(path, {} if pool else small)
    if pool:
        role = "decode" if pool == "small" else ""
        loaded = replace(loaded, pools={pool: PoolConfig(**small, role=role)})
    monkeypatch.setattr(
        preflight, "read_model_needs", lambda *_: replace(read_model_needs(*_), page_bytes=3 << 20)
    )
    name = f"pools.{pool}.cpu_pages_mib" if pool else "cpu_pages_mib"

    with pytest.raises(ConfigError) as refused:
        check_start(loaded, print)

    assert str(refused.value) == (
        f"{name}: found 1; allowed: at least 3, which holds a page of 128 tokens of this model"
    )


def test_the_memory_of_each_pool_counts(monkeypatch, tmp_path):
    memory = HostMemory(total_bytes=8 * GIB, free_bytes=7 * GIB)
    monkeypatch.setattr(preflight, "read_host_memory", lambda: memory)
    options = {"model": str(demo_model_dir()), "device": "cpu", "port": 0, "http_port": 0}

    def check(pools):
        file = tmp_path / "cluster.yaml"
        file.write_text(json.dumps({"pools": pools}))
        said = []
        check_start(load_config(file, options), said.append)
        return said

    words = "3 workers need about .*, with 256 MiB to 1.0 TiB for pages each, by pool; 7.0 GiB of"
    with pytest.raises(PlacementError, match=words) as refused:
        check({"large": {"role": "decode", "workers": 1, "cpu_pages_mib": 2**20}})
    # No flag changes what a pool has of its own.
    remedy = "--cpu-pages-mib 64, and in the file pools.large.cpu_pages_mib: 64"
    assert str(refused.value).endswith(remedy)
    options["cpu_pages_mib"] = 2**20
    small = {"cpu_pages_mib": 64}
    assert check({"prefill": small, "decode": small}) == []


def test_more_workers_than_the_only_host_can_ever_hold_are_refused(monkeypatch, tmp_path):
    memory = HostMemory(total_bytes=8 * GIB, free_bytes=GIB)  # the running ones have the rest
    monkeypatch.setattr(preflight, "read_host_memory", lambda: memory)
    options = {"model": str(demo_model_dir()), "pools.small.role": "decode"}
    config = load_config(None, options)
    many = {"prefill": 2, "decode": 3, "decode-small": 35}

    with pytest.raises(PlacementError) as refused:
        check_growth(config, "cpu", many)

    assert re.fullmatch(
        r"40 workers need about [\d.]+ GiB, with 256 MiB to 256 MiB for pages each, by pool; 1.0 "
        r"GiB of 8.0 GiB are free; ask for fewer; nothing has changed",
        str(refused.value),
    )
    check_growth(config, "cpu", many | {"decode-small": 1})
    check_growth(config, "cuda", many)
    check_growth(replace(config, ray_address="auto"), "cpu", many)  # of any number of hosts
    with pytest.raises(ConfigError, match="allowed: an existing folder"):
        check_growth(replace(config, model=tmp_path / "none"), "cpu", many)


def test_workers_that_may_not_fit_now_are_warned_of(monkeypatch):
    tight = HostMemory(total_bytes=64 * GIB, free_bytes=GIB)
    ample = HostMemory(total_bytes=64 * GIB, free_bytes=60 * GIB)

    device, [warning] = check_on_a_host_with(monkeypatch, tight, prefill=2, decode=2)

    assert device == "cpu"
    assert "warning: 4 workers need about" in warning
    assert check_on_a_host_with(monkeypatch, ample, prefill=2, decode=2) == ("cpu", [])


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_workers_than_gpus_are_refused_without_a_look_at_torch(monkeypatch, device):
    monkeypatch.setattr(preflight, "most_gpus", lambda: 2)
    monkeypatch.setattr(preflight, "count_gpus", lambda: pytest.fail("it imports torch"))
    ample = HostMemory(total_bytes=64 * GIB, free_bytes=60 * GIB)

    with pytest.raises(PlacementError, match=r"found 2 and 1 workers which need 3 GPUs.* are 2"):
        check_on_a_host_with(monkeypatch, ample, device=device, prefill=2, decode=1)


def test_a_wrong_folder_is_refused_before_torch_counts_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(preflight, "most_gpus", lambda: 2)
    monkeypatch.setattr(preflight, "count_gpus", lambda: pytest.fail("it imports torch"))
    ample = HostMemory(total_bytes=64 * GIB, free_bytes=60 * GIB)

    with pytest.raises(ConfigError, match="allowed: an existing folder"):
        check_on_a_host_with(monkeypatch, ample, device="auto", model=str(tmp_path / "none"))


def test_the_demo_refuses_a_wrong_folder_before_torch_counts_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(serving_commands, "most_gpus", lambda: 2)
    monkeypatch.setattr(serving_commands, "count_gpus", lambda: pytest.fail("it imports torch"))

    with pytest.raises(ConfigError, match="allowed: an existing folder"):
        serving_commands.demo_defaults({"model": str(tmp_path / "none")})


def without_folder(folder):
    shutil.rmtree(folder)


def without_weights(folder):
    (folder / "model.safetensors").unlink()


def without_shard(folder):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (folder / "model.safetensors").rename(folder / names[0])
    shard_of = {"model.embed_tokens.weight": names[0], "lm_head.weight": names[1]}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shard_of}), encoding="utf-8")


def with_broken_gguf(folder):
    (folder / "model.safetensors").unlink()
    (folder / "broken.gguf").write_bytes(b"GGUF")


def with_config(**changes):
    def change(folder):
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(config | changes), encoding="utf-8")

    return change


def refused(command, folder, *options):
    """Run a command that must end before it starts anything; return what it says and imports."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "cli", command, "--model", folder, *options],
        capture_output=True,
        text=True,
        timeout=30,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},  # on any host
    )
    lines = result.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time")}
    assert "cluster.config" in imported
    assert result.returncode in (1, 2)
    return [line for line in lines if not line.startswith("import time")], imported & SLOW_MODULES


@pytest.mark.parametrize(
    ("command", "damage", "words"),
    [
        ("demo", without_folder, "model: found '/.*/model'; allowed: an existing folder"),
        ("serve", without_shard, "model-00002-of-00002.*: no such file; .* lists 2 shards"),
        *rarely(
            ("demo", with_broken_gguf, "broken.gguf: cut off: the version takes 4 bytes"),
            ("serve", without_weights, "needs model.safetensors or model.*.json .*; found"),
            (
                "serve",
                with_config(architectures=["OddModel"]),
                r"architectures is \['OddModel'\], mu",
            ),
            (
                "serve",
                with_config(torch_dtype="int8"),
                "dtype is 'int8', must be one of float32, fl",
            ),
        ),
    ],
    ids=["no-folder", "no-shard", "broken-gguf", "no-weights", "architecture", "dtype"],
)
def test_a_wrong_model_folder_is_refused_without_slow_imports(tmp_path, command, damage, words):
    folder = shutil.copytree(demo_model_dir(), tmp_path / "model")
    damage(folder)

    [line], slow = refused(command, folder, "--port", "0", "--http-port", "0")

    assert re.match(f"error: .*{words}", line)
    assert slow == set()


@pytest.mark.parametrize(("command", "num_prefill"), [("demo", "1"), *rarely(("serve", "100"))])
def test_a_lack_of_gpus_is_refused_without_slow_imports(command, num_prefill):
    options = ["--device", "cuda", "--prefill", num_prefill, "--decode", "1"]
    options += ["--port", "0", "--http-port", "0"]

    [line], slow = refused(command, demo_model_dir(), *options)

    assert line == "error: device: found 'cuda'; allowed: 'cpu', because there are no GPUs"
    assert slow == set()


@pytest.mark.parametrize(
    ("command", "flag"), [("serve", "--http-port"), *rarely(("demo", "--port"))]
)
def test_a_port_in_use_is_refused_without_slow_imports(command, flag):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = {"--port": "0", "--http-port": "0", flag: str(port)}

        [line], slow = refused(command, demo_model_dir(), *chain(*options.items()))

    assert line.startswith(f"error: port {port} on 127.0.0.1 is in use by process {os.getpid()} (")
    assert f"; choose another with {flag}, or let {flag} 0 " in line
    assert slow == set()


@pytest.mark.parametrize("model", ["", "/none"])
def test_all_that_a_start_lacks_is_told_at_once(monkeypatch, model):
    memory = HostMemory(total_bytes=64 * GIB, free_bytes=60 * GIB)
    monkeypatch.setattr(preflight, "most_gpus", lambda: 0)
    others = {"device": "cuda", **({"model": model} if model else {})}
    options = ("port", "http_port", "router.metrics_port", "controller_port")
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in options]
        ports = [each.getsockname()[1] for each in taken]
        given = dict(zip(options, ports, strict=True))
        with pytest.raises(ConfigError if model else PlacementError) as refused:
            check_on_a_host_with(monkeypatch, memory, **given, **others)

    *lines, gpus = str(refused.value).splitlines()
    assert "device: found 'cuda'; allowed: 'cpu', because there are no GPUs" in gpus
    if model:
        assert lines.pop().startswith("model: found '/none'; allowed: an existing folder")
    flags = ("--port", "--http-port", "--router-metrics-port", "--controller-port")
    for line, port, flag in zip(lines, ports, flags, strict=True):
        assert line.startswith(f"port {port} on 127.0.0.1 is in use by process {os.getpid()} (")
        assert f"; choose another with {flag}, or" in line


@pytest.mark.parametrize("option", ["network_interface", "nccl_interface"])
def test_an_interface_that_this_host_lacks_is_refused(monkeypatch, option):
    memory = HostMemory(total_bytes=64 * GIB, free_bytes=60 * GIB)
    have_interfaces(monkeypatch, {"lo": ["127.0.0.1"], "eth0": ["10.0.0.2"]})
    told = (
        rf"^{option}: found 'eth7', which does not exist on gpu-a; allowed: lo \(127.0.0.1\), eth0"
    )

    with pytest.raises(ConfigError, match=told):
        check_on_a_host_with(monkeypatch, memory, **{"device": "auto", option: "eth7"})


def test_the_router_may_not_listen_in_clear_on_an_interface_either(monkeypatch):
    memory = HostMemory(total_bytes=64 * GIB, free_bytes=60 * GIB)
    have_interfaces(monkeypatch, {"eth0": ["10.0.0.2"], "lo": ["127.0.0.1"]})
    monkeypatch.setattr(preflight, "check_port_free", lambda *_, **__: None)  # it has no eth0

    with pytest.raises(ConfigError, match=r"^front_tls.certificate_file: .* to 10.0.0.2;"):
        check_on_a_host_with(monkeypatch, memory, network_interface="eth0")
    assert check_on_a_host_with(monkeypatch, memory, network_interface="lo") == ("cpu", [])


def test_a_router_that_anyone_may_use_is_refused_where_other_hosts_can_connect(
    monkeypatch, tmp_path
):
    memory = HostMemory(total_bytes=64 * GIB, free_bytes=60 * GIB)
    file = tmp_path / "tenants.yaml"
    file.write_text(f"acme: {{token_hashes: [{token_hash(new_token())}]}}")

    def check(*, asks_clients=False, host="0.0.0.0", **options):
        settings = Authority(tmp_path).settings(asks_clients=asks_clients)
        sections = {"tls": settings.inside, "front_tls": settings.front}
        tls = {f"{s}.{name}": v for s in sections for name, v in asdict(sections[s]).items()}
        return check_on_a_host_with(monkeypatch, memory, host=host, **tls, **options)

    with pytest.raises(ConfigError, match=r"^router.tenants_file: found none; .*host is 0.0.0.0\)"):
        check()
    for allowed in (
        {"asks_clients": True},
        {"router.tenants_file": str(file)},
        {"insecure": True},
        {"host": "127.0.0.1"},
    ):
        assert check(**allowed) == ("cpu", [])


@pytest.mark.parametrize(
    ("variable", "is_refused"),
    [("eth0", False), ("=eth0", False), ("eth1", True), ("eth0,eth1", True), ("", False)],
)
def test_an_interface_for_nccl_is_named_in_one_place(monkeypatch, variable, is_refused):
    have_interfaces(monkeypatch, {"eth0": ["10.0.0.2"]})
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", variable)
    config = load_config(None, {"nccl_interface": "eth0"})

    if is_refused:
        with pytest.raises(
            ConfigError, match=rf"found 'eth0', and NCCL_SOCKET_IFNAME is '{variable}'"
        ):
            check_interfaces(config)
    else:
        check_interfaces(config)
    check_interfaces(load_config(None, {"network_interface": "eth0"}))  # gives way


def test_a_tenants_file_that_cannot_be_used_is_refused_before_anything_is_started(
    monkeypatch, tmp_path
):
    memory = HostMemory(total_bytes=64 * GIB, free_bytes=60 * GIB)
    file = tmp_path / "tenants.yaml"
    file.write_text("acme: {token_hashes: [x]}")
    for path, told in (
        (
            file,
            r"tenants.yaml, line 1: acme.token_hashes\[0\]: found a text of length 1; allowed: sha",
        ),
        (tmp_path / "none", r"^router.tenants_file: found '.*none', .* read: No such file"),
    ):
        with pytest.raises(ConfigError, match=told):
            check_on_a_host_with(monkeypatch, memory, **{"router.tenants_file": str(path)})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {},
            "which has 4 ports; allowed: 7 or more, because 2 prefill and 2 decode workers with "
            "controller need",
        ),
        ({"controller_port": 1}, "allowed: 6 or more, because 2 prefill and 2 decode workers need"),
        ({"port": 0}, "allowed: 8 or more, .* workers with controller and router need 8 on 1 host"),
        (
            {"port": 20001, "http_port": 20002, "router.metrics_port": 20003},
            "which has 4 ports, 3 of them for servers with a port of their own; allowed: 10 or mo",
        ),
        ({"prefill": 0, "decode": 4}, "allowed: 5 or more"),
        ({"prefill": 0, "decode": 3}, ""),
        ({"prefill": 1, "decode": 1}, ""),
        (
            {"prefill": 1, "decode": 1, "worker_metrics_ports": "20000-20001"},
            "which has 4 ports, 2 of them for servers with a port of their own; allowed: 6 or more",
        ),
    ],
)
def test_a_range_of_fewer_ports_than_the_processes_need_is_refused(monkeypatch, options, words):
    monkeypatch.setattr(preflight, "check_port_free", lambda *_, **__: None)
    memory = HostMemory(total_bytes=64 * GIB, free_bytes=60 * GIB)
    options = {"port_range": "20000-20003", "port": 9, "prefill": 2, "decode": 2} | options
    with raises_or_not(words and f"port_range: found '20000-20003'.*{words}"):
        check_on_a_host_with(monkeypatch, memory, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {},
            "which has 3 ports; allowed: 4 or more, because 2 prefill and 2 decode workers need 4",
        ),
        ({"decode": 1}, ""),
        ({"decode": 1, "port": 9401}, "which has 3 ports, 1 of them for servers with a port of th"),
    ],
)
def test_each_worker_needs_a_port_for_its_metrics(monkeypatch, options, words):
    monkeypatch.setattr(preflight, "check_port_free", lambda *_, **__: None)
    memory = HostMemory(total_bytes=64 * GIB, free_bytes=60 * GIB)
    options = {"worker_metrics_ports": "9401-9403", "prefill": 2, "decode": 2} | options
    with raises_or_not(words and f"worker_metrics_ports: found '9401-9403', {words}"):
        check_on_a_host_with(monkeypatch, memory, **options)


def test_on_several_hosts_only_what_fits_on_no_choice_of_them_is_refused():
    config = load_config(None, {"port_range": "20000-20001", "ray_address": "auto"})

    check_port_ranges(config, "cpu", 1, 2, num_hosts=3)
    with pytest.raises(ConfigError, match=r"allowed: 3 or more, .* need 7 on 3 hosts"):
        check_port_ranges(config, "cpu", 2, 2, num_hosts=3)
    check_port_ranges(replace(config, page_transport="nccl"), "cuda", 2, 2, num_hosts=3)


def raises_or_not(words):
    return pytest.raises(ConfigError, match=words) if words else nullcontext()


def test_the_tenants_file_is_found_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = load_config(None, {"router.tenants_file": "tenants.yaml"})

    assert config.router.tenants_file == str(tmp_path / "tenants.yaml")
