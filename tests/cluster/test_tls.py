"""Clusters with TLS on everywhere: pages move, and the decode side computes no prompt token."""

import asyncio
import http.client
import json
import random
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest

from cluster.demo_model import demo_model_dir
from credentials.config import TlsSettings
from pagewire import Client, Completion, Tls, TlsError
from tests.cluster.in_process import generate_all, in_process_cluster
from tests.support.certificates import Authority
from tests.support.checkpoints import reference_greedy, write_checkpoint
from tests.support.free_ports import free_port, free_range
from tests.support.scrapes import samples, scrape
from tests.support.waiting import wait_until


def test_pages_move_between_workers_that_know_each_other_by_certificates(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "llama", seed=7)
    authority = Authority(tmp_path)
    source = random.Random(1)
    prompts = [[source.randrange(3, 211) for _ in range(length)] for length in (9, 40, 100)]

    async def scenario() -> list[Completion]:
        tls = TlsSettings(inside=authority.inside())
        async with in_process_cluster(
            tmp_path / "model", num_prefill=1, num_decode=1, tls=tls
        ) as client:
            return list(await generate_all(client, prompts, max_tokens=16))

    for prompt, completion in zip(prompts, asyncio.run(scenario()), strict=True):
        assert list(completion.token_ids) == reference_greedy(model, prompt, 16)
        assert completion.usage
        assert completion.usage.bytes_moved > 0
        assert completion.usage.decode_computed_tokens == 0


def tls_flags(settings: TlsSettings) -> list[str]:
    found = []
    for section, config in (("tls", settings.inside), ("front-tls", settings.front)):
        for each in fields(config):
            if each.name.endswith("_file"):
                flag = f"--{section}-{each.name.replace('_', '-')}"
                found += [flag, getattr(config, each.name)]
    return found


@contextmanager
def running(*arguments: str) -> Iterator[str]:
    """Run a command until it is ready; yields the line that says so."""
    command = [sys.executable, "-m", "cli", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout
    try:
        line = ""
        while not line.startswith("ready"):
            line = process.stdout.readline()
            assert line, process.communicate(timeout=30)[1]
        yield line
    finally:
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output.splitlines()[-1]) == (0, "stopped"), errors
    assert "PRIVATE KEY" not in errors


@pytest.mark.cluster
@pytest.mark.timeout(240)
def test_a_cluster_with_tls_everywhere_serves_clients_routers_and_http(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    settings = authority.settings(asks_clients=True)
    keys, secret = tmp_path / "router.keys", tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    model = ("--model", str(demo_model_dir()))
    controller = free_port()
    metrics, metrics_ports = free_range(2)
    mine = authority.pair("somebody")
    tls = Tls(authority_file=authority.file, **mine._asdict())
    wrote = subprocess.run(
        [sys.executable, "-m", "cli", "router-keys", keys, "--secret-file", secret], timeout=60
    )
    assert wrote.returncode == 0
    serve = (
        *("serve", *model, "--port", "0", "--device", "cpu", "--http-port", str(free_port())),
        *("--controller-port", str(controller), "--secret-file", str(secret)),
        *("--worker-metrics-ports", metrics_ports),
        *("--decode-worker-local-prefill-max-tokens", "0", "--cpu-pages-mib", "8"),
        *tls_flags(settings),
    )
    router = (
        *("router", *model, "--controller", f"127.0.0.1:{controller}", "--keys", str(keys)),
        *("--port", "0", "--decode-worker-local-prefill-max-tokens", "0", *tls_flags(settings)),
    )
    with running(*serve) as ready:
        address = _found(r" on (127\.0\.0\.1:\d+)", ready)
        with Client(address, default_timeout_s=60, tls=tls) as client:
            first = client.generate([5] * 300, max_tokens=4, ignore_eos=True)
            status = client.status()
        with (
            Client(address, tls=Tls(authority_file=authority.file)) as nameless,
            pytest.raises(TlsError),
        ):
            nameless.status()
        reader = ssl.create_default_context(cafile=authority.file)
        reader.check_hostname = False
        for each in range(2):
            with pytest.raises((OSError, http.client.HTTPException)):
                scrape(f"127.0.0.1:{metrics + each}", reader)
        reader.load_cert_chain(*mine)
        told = [samples(scrape(f"127.0.0.1:{metrics + each}", reader)) for each in range(2)]
        with running(*router) as other_ready:
            other = _found(r" on (127\.0\.0\.1:\d+) for", other_ready)
            with Client(other, default_timeout_s=60, tls=tls) as client:
                # Until then the decode worker prefills by itself, as it should.
                wait_until(
                    lambda: [each.state for each in client.status().workers] == ["ready"] * 2
                )
                second = client.generate([6] * 300, max_tokens=4, ignore_eos=True)
        host, port = _found(r"HTTP on https://([\d.:]+)/v1", ready).split(":")
        context = ssl.create_default_context(cafile=authority.file)
        context.load_cert_chain(*mine)
        http_client = http.client.HTTPSConnection(host, int(port), timeout=30, context=context)
        http_client.request("GET", "/v1/models")
        models = json.load(http_client.getresponse())

    for completion in (first, second):
        assert completion.usage
        assert completion.usage.pages_moved > 0
        assert completion.usage.decode_computed_tokens == 0
    workers = {key[1:] for each in told for key, is_so in each.items() if is_state(key) and is_so}
    assert workers == {("decode", "decode-0", "ready"), ("prefill", "prefill-0", "ready")}
    for each in (status.front_tls, status.cluster_tls):
        assert each
        assert each.encrypted
        assert each.expires_at_s
    assert len(models["data"]) == 1


def is_state(key: tuple[str, ...]) -> bool:
    return key[0] == "pagewire_worker_state"


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found, text
    return found[1]
