import io
import json
import time
from dataclasses import replace

import pytest
from rich.console import Console

from pagewire import Encryption, TenantStatus, WorkerStatus
from pagewire.cli.client_commands import WIDE_COLUMNS
from pagewire.cli.status import silences, status_json, status_table
from pagewire.protos.pem import utc
from tests.cli.shown_workers import BUSY, status, worker


def rows(*workers, columns, is_wide=False):
    console = Console(width=columns, color_system=None, file=io.StringIO())
    console.print(status_table(status(*workers), is_wide=is_wide))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    return lines


def connections(front, cluster):
    """The line that tells how connections are protected, with its styles."""
    told = replace(status(worker()), front_tls=front, cluster_tls=cluster)
    *_, line = status_table(told).renderables
    return line.plain, {str(each.style) for each in line.spans}


def test_it_tells_what_is_encrypted_and_until_when():
    in_a_month = int(time.time()) + 30 * 86_400
    fine = Encryption(encrypted=True, expires_at_s=in_a_month)
    in_clear = Encryption(encrypted=False, expires_at_s=None)

    line, styles = connections(fine, in_clear)

    assert (
        line == f"clients: TLS, certificate until {utc(in_a_month)} · within the cluster: in clear"
    )
    assert styles <= {""}


@pytest.mark.parametrize(
    ("days", "word", "style"), [(3, "until", "yellow"), (-1, "expired", "red")]
)
def test_a_certificate_that_nothing_renews_is_seen(days, word, style):
    late = Encryption(encrypted=True, expires_at_s=int(time.time()) + days * 86_400)

    line, styles = connections(late, late)

    assert line.count(f"certificate {word} 20") == 2
    assert style in styles


def test_a_router_that_does_not_tell_how_it_is_connected_has_no_such_line():
    assert "TLS" not in "".join(rows(worker(), columns=120))


@pytest.mark.parametrize("columns", [80, 120])
def test_table_fits_the_terminal_with_one_line_a_worker(columns):
    lines = rows(BUSY, worker(state="connecting"), worker(worker_id="decode-1"), columns=columns)

    *header, rule, unknown, idle, busy, summary, silence = lines
    assert "─" in rule
    assert len(header) == 2
    assert unknown.split() == ["decode-0", "connecting", *"------"]
    assert idle.split() == ["decode-1", "ready", "0+0", "6/10", "0%", "0", "0", "0", "B"]
    for cell in ("prefill-10", "draining", "256+1.0k", "130k/131k", "89%", "123M", "99M"):
        assert cell in busy.split()
    assert busy.endswith("1.0 GiB")
    assert summary == ("requests: 2 active, 9 finished, 1 resumed · pages in the index: 77")
    assert silence == "decode-0 does not answer: its first heartbeat is awaited"


def test_wide_table_shows_everything_in_full():
    *_, row, _ = rows(BUSY, columns=WIDE_COLUMNS, is_wide=True)

    for cell in (
        *("prefill-10", "draining", "10.120.130.140:50051", "ffffffffffffffff", "256", "1024"),
        *("130072/131072", "100000", "12345", "89%", "123456789", "98765432", "1234567"),
    ):
        assert cell in row.split()


@pytest.mark.parametrize("state", ["dead", "connecting"])
def test_numbers_of_a_worker_that_does_not_live_are_unknown(state):
    gone = worker(state=state, running=5, steps=7, cached_tokens=3, heartbeat_age_ms=4000)
    gone = replace(gone, misfit="another model")

    *_, row, _, misfit = rows(gone, columns=WIDE_COLUMNS, is_wide=True)
    assert misfit == "decode-0 gets no requests: another model"
    [values] = json.loads(status_json(status(gone)))["workers"]

    assert row.split() == ["decode-0", state, "h:1", "00000000000000ff", *"-----------"]
    assert values.keys() == {*WorkerStatus.__dataclass_fields__, "hit_rate"}
    assert {name: value for name, value in values.items() if value is not None} == {
        "worker_id": "decode-0",
        "incarnation": "00000000000000ff",
        "address": "h:1",
        "pool": "decode",
        "state": state,
        "misfit": "another model",
        "silence": "",
        "heartbeat_age_ms": 4000,
    }


def test_what_does_not_answer_is_told_with_the_reason():
    def told(*workers, **changes):
        return silences(replace(status(*workers), **changes))

    dead = worker(state="dead", silence="UNAVAILABLE: ping timeout", incarnation=9)
    earlier = replace(dead, incarnation=8, silence="a session with it broke")

    assert told(worker()) == []
    assert told(worker(), earlier) == [], "its next start answers"
    assert told(dead, earlier) == ["decode-0 does not answer: UNAVAILABLE: ping timeout"]
    assert told(worker(state="connecting")) == [
        "decode-0 does not answer: its first heartbeat is awaited"
    ]
    assert told(worker(state="dead")) == ["decode-0 does not answer: no reason is known"]
    assert told(worker(silence="no heartbeat for 3.2 s"), controller_silence="silent for 6 s") == [
        "the controller does not answer: silent for 6 s",
        "decode-0 does not answer: no heartbeat for 3.2 s",
    ]


def test_wide_table_in_a_narrow_terminal_loses_no_character():
    text = "".join(rows(BUSY, columns=80, is_wide=True))

    assert "…" not in text
    assert sum(each == "f" for each in text) >= 16


def test_json_carries_everything_and_the_hit_rate():
    content = json.loads(status_json(status(worker(cached_tokens=3, looked_up_tokens=4))))

    assert content["workers"][0]["hit_rate"] == 0.75
    assert content["workers"][0]["incarnation"] == "00000000000000ff"
    assert content["workers"][0]["pages"]["incoming"] == 1
    assert content["finished_requests"] == 9


def test_a_cluster_that_is_being_stopped_is_told_as_such():
    console = Console(width=80, color_system=None, file=io.StringIO())
    stopping = replace(status(worker()), is_stopping=True)
    console.print(status_table(stopping))

    last = "the cluster is being stopped; run `pagewire down` again"
    assert console.file.getvalue().splitlines()[-1].strip() == last
    assert json.loads(status_json(stopping))["is_stopping"]
    assert not json.loads(status_json(status(worker())))["is_stopping"]


def test_tenants_have_a_table_and_whoever_is_no_operator_sees_it_alone():
    acme = TenantStatus(
        name="acme",
        active_requests=3,
        requests=1200,
        refused_requests=4,
        prompt_tokens=56_000_000,
        generated_tokens=7,
    )
    told = replace(status(BUSY), tenants=(acme,))

    def lines(told):
        console = Console(width=80, color_system=None, file=io.StringIO())
        console.print(status_table(told))
        return console.file.getvalue().splitlines()

    row = ["acme", "3", "1.2k", "4", "56M", "7"]
    assert lines(told)[-1].split() == row
    assert "prefill-10" in "".join(lines(told))
    own = lines(replace(told, workers=(), is_partial=True))
    assert own[-1].split() == row
    assert "requests:" not in "".join(own)
    assert json.loads(status_json(told))["tenants"][0]["refused_requests"] == 4
