"""A cluster that outlives its launcher, as processes on the CPU: up, scale, move, drain and down.

All tests have one cluster, each after those above it: a start takes as long as some of them.
"""

import asyncio
import json
import os
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pagewire import AsyncClient, Client, TransportError
from pagewire.cli.status import silences
from tests.cluster.lasting_cluster import OPTIONS, Host
from tests.support.processes import kill_session, processes_of_session

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("ray"),
]

SPARE = {"role": "decode", "workers": 1, "num_pages": 512}


@pytest.fixture(scope="module")
def host():
    """A host where `up` was killed in the middle, and asked again; `down` leaves nothing there."""
    with tempfile.TemporaryDirectory(prefix="pw", dir="/tmp") as folder:  # sockets: short paths
        host = Host(Path(folder))
        options = OPTIONS | {"model": str(host.folder / "model"), "pools": {"spare": SPARE}}
        host.config.write_text(json.dumps(options))
        launcher = host.start("up", "--config", str(host.config))
        for line in launcher.stdout:
            if line.startswith("Ray runs"):
                launcher.kill()
        launcher.communicate(timeout=30)
        head = host.head()
        try:
            code, output, errors = host.run("up", "--config", str(host.config))
            assert code == 0, errors
            *_, ready = output.splitlines()
            assert ready.startswith("ready: pagewire serves"), output
            assert "already running: prefill-0, decode-0, decode-spare-0 on cpu" in output
            host.address = ready.partition(" on ")[2].partition(" ")[0]
            yield host
            code, output, errors = host.run("down", "--grace-s", "0")
            assert (code, output.splitlines()[-1]) == (0, "stopped"), errors
            assert processes_of_session(head["pid"]) == {}
            left = {path.name for path in host.private.iterdir()}
            assert left == {"head.log", "ray"}, "no token and no address, only logs"
        finally:
            kill_session(head["pid"])


def test_the_head_is_kept_from_others_by_a_token_that_only_its_user_reads(host):
    token = Path(host.head()["token_path"])

    assert token.stat().st_mode & 0o777 == 0o600
    assert (host.private / "head").stat().st_mode & 0o777 == 0o600
    assert token.parent.stat().st_mode & 0o777 == 0o700


def test_another_configuration_is_refused_by_name(host):
    code, _, errors = host.run("up", "--config", str(host.config), "--page-size", "32")

    assert (code, errors.splitlines()) == (
        2,
        [
            "error: page_size: running 16; wanted 32",
            "error: a running cluster keeps these options; `pagewire down` ends it",
        ],
    )


def done(host, *arguments):
    code, output, errors = host.run(*arguments)
    assert code == 0, errors
    return output.splitlines()[-1]


def refusal(host, *arguments):
    code, output, errors = host.run(*arguments)
    assert (code, output) == (2, "")
    return errors.removeprefix("error: ").rstrip()


def workers(host):
    """Return the pages of all workers that are ready, by name."""
    with Client(host.address) as client:
        status = client.status()
    return {each.worker_id: each.pages.total for each in status.workers if each.state == "ready"}


def test_pools_grow_shrink_and_change_hands_under_load_without_a_lost_token(host):
    def change():
        assert workers(host) == {"prefill-0": 2048, "decode-0": 2048, "decode-spare-0": 512}

        told = done(host, "scale", "--pool", "spare=2")
        assert told == "the cluster has 1 prefill and 3 decode workers"
        assert workers(host)["decode-spare-1"] == 512

        told = done(host, "move", "decode-spare-1", "--to", "prefill")
        assert told == "the cluster has 2 prefill and 2 decode workers"
        assert workers(host) == {
            "prefill-0": 2048,
            "prefill-1": 2048,
            "decode-0": 2048,
            "decode-spare-0": 512,
        }

        assert done(host, "drain", "decode-spare-0") == "decode-spare-0 has left"

    async def main():
        async with AsyncClient(host.address, default_timeout_s=120) as client:
            before = await client.status()
            loads = [asyncio.create_task(keep_asking(client, index)) for index in range(2)]
            await asyncio.to_thread(change)
            for each in loads:
                each.cancel()
            return before, [await each for each in loads], await client.status()

    before, answers, after = asyncio.run(main())

    for each in answers:
        assert each, "some requests of each load ended"
        assert len({completion.token_ids for completion in each}) == 1, "greedy, one prompt"
        for completion in each:
            assert completion.usage.decode_computed_tokens == 0
    assert sum(completion.usage.pages_moved for each in answers for completion in each) > 0
    served_by = {name for each in answers for one in each for name in one.usage.decode_workers}
    assert served_by >= {"decode-0", "decode-spare-0"}
    states = {each.worker_id: each.state for each in after.workers}
    names = ("prefill-0", "prefill-1", "decode-0")
    assert states == dict.fromkeys(names, "ready"), "who has left is not dead"
    kept = [{each.worker_id: each.incarnation for each in one.workers} for one in (before, after)]
    assert all(kept[0][name] == kept[1][name] for name in ("prefill-0", "decode-0"))
    assert (
        "already running: prefill-0, prefill-1, decode-0 on cpu"
        in host.run("up", "--config", str(host.config))[1]
    )


# One of each check; test_scaling has the rest.
REFUSED = (
    ("scale --pool spar=2", "--pool: found 'spar'; allowed: prefill, decode, spare"),
    ("scale --pool spare=two", "--pool: found 'spare=two'; allowed: a pool and the num"),
    ("move decode-0 --to spar", "--to: found 'spar'; allowed: prefill, decode"),
    ("move decode-0 --to prefill", "WORKER: found 'decode-0'; allowed: what lea"),
)


def test_what_cannot_be_is_refused_and_disturbs_nothing(host):
    """One decode worker is left."""
    before = workers(host)

    with ThreadPoolExecutor(2) as threads:
        told = list(threads.map(lambda case: refusal(host, *case[0].split()), REFUSED))

    for found, (command, wanted) in zip(told, REFUSED, strict=True):
        assert found.startswith(wanted), command
    assert workers(host) == before


def test_a_killed_worker_is_started_again_though_no_launcher_lives(host):
    async def main():
        async with AsyncClient(host.address, default_timeout_s=60) as client:
            before = await until(client, has_both_pools)
            old = {each.incarnation for each in before.workers}
            victim = next(p for p in host_processes(host) if p.name() == "ray::PrefillActor")
            os.kill(victim.pid, signal.SIGKILL)
            await until(
                client,
                lambda status: (
                    has_both_pools(status) and {each.incarnation for each in ready(status)} - old
                ),
            )
            return await ask(client, 99)

    completion = asyncio.run(main())

    assert completion.usage.pages_moved > 0
    assert completion.usage.decode_computed_tokens == 0


@pytest.mark.thorough  # tests/cli/test_find_router.py shows it without processes that hang
def test_status_shows_what_it_has_while_a_process_hangs(host):
    for actor, part in (("RouterActor", "router"), ("ControllerActor", "controller")):
        process = next(p for p in host_processes(host) if p.name() == f"ray::{actor}")
        process.suspend()
        try:
            code, output, errors = host.run("status", "--once")
        finally:
            process.resume()

        assert (code, errors) == (3, ""), output
        assert f"the {part} does not answer: " in output
        assert "prefill-0" in output

    async def main():
        async with AsyncClient(host.address) as client:
            await until(client, lambda status: silences(status) == [])

    asyncio.run(main())


def test_generate_finds_the_cluster_and_an_interrupted_down_is_told_by_all_commands(host):
    """The last test of this cluster; what it leaves, the fixture's `down` ends."""
    code, output, errors = host.run("generate", "x", "--max-tokens", "1", "--ignore-eos")
    assert (code, bool(output)) == (0, True), errors

    down = host.start("down")
    assert down.stdout.readline().startswith("stopping")
    down.send_signal(signal.SIGINT)
    _, errors = down.communicate(timeout=60)
    again = "the cluster is being stopped; run `pagewire down` again"
    assert (down.returncode, again in errors) == (130, True), errors

    code, _, errors = host.run("up", "--config", str(host.config))
    assert (code, errors) == (1, f"error: {again}\n")
    _, output, errors = host.run("status", "--once")
    assert (output + errors).rstrip().endswith(again), "also if no router answers any more"


def host_processes(host):
    return [psutil.Process(pid) for pid in processes_of_session(host.head()["pid"])]


async def ask(client, index):
    prompt = [0, *(4 + (index * 31 + position * 7) % 500 for position in range(40))]
    return await client.generate(prompt, temperature=0.0, max_tokens=30, ignore_eos=True)


async def keep_asking(client, index):
    """Ask the same again and again until it is cancelled; what was answered is the result."""
    completions = []
    with suppress(asyncio.CancelledError):
        while True:
            completions.append(await ask(client, index))
            await asyncio.sleep(0.2)  # a core that is never idle would only slow what is waited for
    return completions


def ready(status):
    return [each for each in status.workers if each.state == "ready"]


def has_both_pools(status):
    return {each.pool for each in ready(status)} == {"prefill", "decode"}


async def until(client, is_true, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(TransportError):
            status = await client.status()
            if is_true(status):
                return status
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.02)
