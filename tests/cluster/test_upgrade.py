"""Upgrades of a running cluster, as processes: to newer settings, and through a second cluster.

The newer code is a copy of this one, which the test changes.
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pagewire import AsyncClient
from protos.contract import CONTRACT_VERSION
from tests.cluster.lasting_cluster import OPTIONS, Host
from tests.support.processes import kill_session

ROOT = Path(__file__).parents[2]
MAX_TOKENS = 128

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.thorough,
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("ray"),
]


class Upgraded(Host):
    """A host on which the code changes; its clusters share a secret with those of others."""

    def __init__(self, folder, code, secret):
        super().__init__(folder)
        self.environment |= {"PYTHONPATH": str(code)}
        self.code = code
        told = {"decode": 2, "secret_file": str(secret), "stop_grace_s": 0.0}
        with socket.create_server(("127.0.0.1", 0)) as free:  # a restarted router keeps it
            told["port"] = free.getsockname()[1]
        told["model"] = str(folder / "model")
        self.config.write_text(json.dumps(OPTIONS | told))

    def start(self, command, *arguments):
        return subprocess.Popen(
            [sys.executable, "-m", "cli", command, *arguments],
            cwd=self.code,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def up(self):
        """Start a cluster; return the address of its router."""
        code, output, errors = self.run("up", "--config", str(self.config))
        assert code == 0, errors
        return output.splitlines()[-1].partition(" on ")[2].partition(" ")[0]


@pytest.fixture
def hosts(tmp_path):
    """Two hosts with the same code and the same secret; what they started ends with the test."""
    tracked = subprocess.run(
        ["git", "ls-files", "*.py", "*.json"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for path in tracked:
        if not path.startswith(("tests/", "benchmarks/", "docs/")):
            (tmp_path / "code" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, tmp_path / "code" / path)
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    with (
        tempfile.TemporaryDirectory(prefix="pw", dir="/tmp") as old,
        tempfile.TemporaryDirectory(prefix="pw", dir="/tmp") as new,
    ):
        found = [Upgraded(Path(each), tmp_path / "code", secret) for each in (old, new)]
        try:
            yield found
        finally:
            for each in found:
                if (each.private / "head").exists():
                    kill_session(each.head()["pid"])


def change(code, path, old, new):
    text = (code / path).read_text(encoding="utf-8")
    assert old in text
    (code / path).write_text(text.replace(old, new, 1), encoding="utf-8")


def test_new_settings_come_by_a_restart_and_a_new_contract_by_a_second_cluster(hosts):
    old, new = hosts
    first = old.up()

    # New settings, between those that Ray has stored.
    change(
        old.code,
        "worker/settings.py",
        "    cpu_threads: int",
        "    odd: int = 7\n    cpu_threads: int",
    )
    change(
        old.code,
        "cluster/config.py",
        "    decode: int",
        '    odd: int = option(3, "")\n    decode: int',
    )
    code, output, errors = old.run("restart")
    assert (code, output.splitlines()[-1][:28]) == (0, "router-0 serves again after "), errors

    version, other = CONTRACT_VERSION, CONTRACT_VERSION + 1
    change(
        old.code,
        "protos/contract.py",
        f"CONTRACT_VERSION = {version}",
        f"CONTRACT_VERSION = {other}",
    )
    code, output, errors = old.run("restart")
    assert (code, output) == (1, "")
    assert f"127.0.0.1: contract version: found {other}; allowed: {version}\n" in errors
    assert "nothing has changed" in errors

    second = new.up()
    assert asyncio.run(answers_while(old, [first, second])) > 0
    code, _, errors = new.run("down")
    assert code == 0, errors


async def answers_while(ending, addresses):
    """Send requests until the first cluster has ended; return how many continued at the other."""
    async with AsyncClient(addresses) as client:

        async def answer(seed):
            stream = client.stream(
                [*range(3, 40), seed], max_tokens=MAX_TOKENS, temperature=1.0, seed=seed
            )
            async for _ in stream:
                pass
            return stream.completion.choices[0].token_ids, stream.completion.usage.resumptions

        calm = [(await answer(seed))[0] for seed in range(4)]
        down = asyncio.create_task(asyncio.to_thread(ending.run, "down"))
        resumed = 0
        while not down.done():
            found = await asyncio.gather(*map(answer, range(4)))
            assert [tokens for tokens, _ in found] == calm
            resumed += sum(times for _, times in found)
        assert down.result()[0] == 0, down.result()
        assert [tokens for tokens, _ in await asyncio.gather(*map(answer, range(4)))] == calm
        return resumed
