"""Pools of one role as processes: started, scaled, moved between and ended, on the CPU."""

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagewire import Client
from tests.cluster.test_lifecycle import OPTIONS, Host
from tests.support.processes import kill_session

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("ray"),
]

SPARE = {"role": "decode", "workers": 1, "num_pages": 512}


@pytest.fixture(scope="module")
def host():
    with tempfile.TemporaryDirectory(prefix="pw", dir="/tmp") as folder:  # sockets: short paths
        host = Host(Path(folder))
        options = OPTIONS | {"model": str(host.folder / "model"), "pools": {"spare": SPARE}}
        host.config.write_text(json.dumps(options))
        code, output, errors = host.run("up", "--config", str(host.config))
        assert code == 0, errors
        head = host.head()
        try:
            assert "starting 1 prefill and 2 decode workers on cpu" in output
            host.address = output.splitlines()[-1].partition(" on ")[2].partition(" ")[0]
            yield host
            assert host.run("down", "--grace-s", "0")[0] == 0
        finally:
            kill_session(head["pid"])


def done(host, *arguments):
    code, output, errors = host.run(*arguments)
    assert code == 0, errors
    return output.splitlines()[-1]


def refused(host, *arguments):
    code, output, errors = host.run(*arguments)
    assert (code, output) == (2, "")
    return errors.removeprefix("error: ").rstrip()


def workers(host):
    """Return the pages of all workers that are ready, by name."""
    with Client(host.address) as client:
        status = client.status()
    return {each.worker_id: each.pages.total for each in status.workers if each.state == "ready"}


def test_a_pool_has_its_own_options_and_number(host):
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
    assert set(workers(host)) == {"prefill-0", "prefill-1", "decode-0"}
    assert (
        "already running: prefill-0, prefill-1, decode-0 on cpu"
        in host.run("up", "--config", str(host.config))[1]
    )


# One of each check; test_scaling has the rest.
REFUSED = (
    ("scale --pool spar=2", "--pool: found 'spar'; allowed: prefill, decode, spare"),
    ("scale --pool spare=two", "--pool: found 'spare=two'; allowed: a pool and the num"),
    ("move decode-0 --to spar", "--to: found 'spar'; allowed: prefill, decode"),
    ("move decode-0 --to prefill", "decode-0 cannot be moved: the last decode wor"),
)


def test_what_cannot_be_is_refused_and_disturbs_nothing(host):
    """After the test before: one decode worker is left."""
    before = workers(host)

    with ThreadPoolExecutor(2) as threads:
        told = list(threads.map(lambda case: refused(host, *case[0].split()), REFUSED))

    for found, (command, wanted) in zip(told, REFUSED, strict=True):
        assert found.startswith(wanted), command
    assert workers(host) == before
