"""`pagewire top`: its lines as values, and the command on a terminal of its own."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from pagewire import ClusterStatus
from pagewire.cli.rates import Answer, look_twice, rates_between
from pagewire.cli.screen import ENTER, LEAVE
from pagewire.cli.top import top_lines
from tests.cli.client_commands import PAGEWIRE
from tests.cli.shown_workers import BUSY, status, worker
from tests.pagewire.scripted_service import answer, serving_in_thread
from tests.support.command_line import run_main

WAIT_S = 30

CLUSTER = (BUSY, worker(worker_id="decode-0"), worker(worker_id="decode-1", state="dead"))
HEADERS = ["worker", "state", "run+wait", "pages", "gen/s", "comp/s", "hits", "moved/s", "read"]


def grown(cluster: ClusterStatus):
    """The rates of a cluster that was empty a second ago."""
    sums = ("generated_tokens", "computed_tokens", "cached_tokens", "looked_up_tokens")
    sums = (*sums, "bytes_moved", "attention_needed_bytes", "attention_read_bytes")
    zero = dict.fromkeys(sums, 0)
    empty = replace(
        cluster,
        workers=tuple(replace(each, **zero) for each in cluster.workers),
        finished_requests=0,
    )
    return rates_between(Answer(0.0, empty), Answer(1.0, cluster))


def test_top_shows_the_cluster_and_a_line_for_each_worker():
    cluster = status(*CLUSTER)

    requests, tokens, prefixes, empty, header, *rows, silence = top_lines(
        cluster, grown(cluster), columns=80
    )

    assert requests == "requests: 9.0/s finished, 2 active, 1 resumed"
    assert tokens == "tokens:   99M/s generated, 123M/s of prompts computed"
    assert prefixes == "prefixes: 89% of prompts found, 1.0 GiB/s moved, KV reads 25% of unshared"
    assert empty == ""
    assert header.split() == HEADERS
    assert silence == "decode-1 does not answer: no reason is known"
    assert [row.split() for row in rows] == [
        ["decode-0", "ready", "0+0", "50%", "0", "0", "-", "0", "B", "-"],
        ["decode-1", "dead", *"-------"],
        ["prefill-10", "draining", "256+1.0k", "23%", "99M", "123M", "89%", "1.0", "GiB", "25%"],
    ]


def test_rates_are_unknown_before_the_second_answer():
    lines = top_lines(status(*CLUSTER), None, columns=80)

    assert lines[0].startswith("requests: -/s finished")
    assert lines[-2].split()[4:] == list("-----")


@pytest.mark.parametrize(
    ("columns", "num_shown"),
    [(7, 1), (12, 1), (20, 2), (34, 3), (60, 7), (70, 8), (79, 9), (200, 9)],
)
def test_a_narrow_terminal_loses_the_last_columns_and_no_line_is_too_long(columns, num_shown):
    cluster = status(*CLUSTER)
    lines = top_lines(cluster, grown(cluster), columns=columns)

    *_, header, first, _, last, silence = lines
    assert max(map(len, lines)) <= columns
    assert header.split() == HEADERS[:num_shown]
    assert first.startswith("decode-0"[:columns])
    assert last.startswith("prefill-10"[:columns])
    assert silence.startswith("decode-1 does not answer"[:columns].rstrip())


def test_what_the_window_cannot_hold_is_counted():
    cluster = status(*(worker(worker_id=f"decode-{i:02}") for i in range(30)))

    lines = top_lines(cluster, None, columns=80, lines=12)

    assert len(lines) == 12
    assert lines[-2].startswith("decode-05")
    assert lines[-1] == "and 24 more workers"
    assert len(top_lines(cluster, None, columns=80)) == 35


def test_a_full_window_shows_what_does_not_answer():
    silent = worker(worker_id="decode-29", state="dead")
    cluster = status(*(worker(worker_id=f"decode-{i:02}") for i in range(29)), silent)
    cluster = replace(cluster, controller_silence="UNAVAILABLE")
    dead = replace(cluster, workers=tuple(replace(w, state="dead") for w in cluster.workers))

    assert top_lines(cluster, None, columns=80, lines=12)[-4:] == [
        "decode-03  ready       0+0    50%      -       -     -        -     -",
        "and 26 more workers",
        "the controller does not answer: UNAVAILABLE",
        "decode-29 does not answer: no reason is known",
    ]
    *_, first, second, workers, controller, one, another, more = top_lines(
        dead, None, columns=80, lines=12
    )
    assert (first[:9], second[:9]) == ("decode-00", "decode-01")
    assert workers == "and 28 more workers"
    assert controller.startswith("the controller does")
    assert (one[:9], another[:9]) == ("decode-00", "decode-01")
    assert more == "and 28 more that get no requests or do not answer"
    for lines in range(70):
        assert len(top_lines(dead, None, columns=80, lines=lines)) == min(lines, 4 + 31 + 31)


def test_a_tenant_that_is_no_operator_sees_its_own() -> None:
    cluster = replace(status(), is_partial=True)

    assert top_lines(cluster, None, columns=80) == [
        "requests: 2 active",
        "the rest is for operators",
    ]


def test_once_prints_rates_for_scripts():
    with serving_in_thread(answer) as (address, service):
        result = run_main("top", "--once", "--interval", "0.1", "--address", address)
        asked = service.num_statuses

    assert (result.returncode, result.stderr, asked) == (0, "", 2)
    assert "\x1b" not in result.stdout
    assert "decode-0" in result.stdout
    assert result.stdout.startswith("requests: 0/s finished")


def test_who_sees_no_rates_waits_for_none_and_asks_once():
    class Router:
        num_statuses = 0

        def status(self):
            self.num_statuses += 1
            return replace(status(), is_partial=True)

    router = Router()

    assert look_twice(router, 3600.0) == (router.status(), None)
    assert router.num_statuses == 2, "one is of this test"


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "3601"])
def test_an_interval_that_cannot_be_is_refused(interval):
    result = run_main("top", "--interval", interval, "--address", "127.0.0.1:1")

    assert result.returncode == 2
    assert result.stderr == (f"error: --interval: found {interval}; allowed: 0.1 to 3600 seconds\n")


class Terminal:
    """A terminal of 60 columns, and the command that has it."""

    def __init__(self, address):
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 60, 0, 0))
        self.modes = termios.tcgetattr(self._slave)
        self.modes[3] &= ~termios.ISIG  # it controls no process, so it makes no signals of keys
        termios.tcsetattr(self._slave, termios.TCSANOW, self.modes)
        self.shown = ""
        self.process = subprocess.Popen(
            [*PAGEWIRE, "top", "--interval", "0.1", "--address", address],
            stdin=self._slave,
            stdout=self._slave,
            stderr=subprocess.PIPE,
            text=True,
            env={k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")},
        )

    def until(self, pattern, remind=lambda: None):
        deadline = time.monotonic() + WAIT_S
        while not re.search(pattern, self.shown, re.DOTALL):
            assert time.monotonic() < deadline, self.shown
            remind()
            if select.select([self._master], [], [], 0.1)[0]:
                self.shown += os.read(self._master, 10_000).decode()

    def press(self, keys):
        os.write(self._master, keys)

    def assert_ended_well(self):
        assert self.process.wait(WAIT_S) == 0
        self.until(re.escape(LEAVE) + "$")
        assert self.shown.count(ENTER) == self.shown.count(LEAVE)
        assert termios.tcgetattr(self._slave) == self.modes
        assert self.process.stderr.read() == ""

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()
        os.close(self._master)
        os.close(self._slave)


@contextmanager
def top_on_terminal(address):
    terminal = Terminal(address)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.mark.parametrize(
    "end",
    [
        lambda terminal: terminal.press(b"q"),
        lambda terminal: terminal.press(b"\x03"),
        lambda terminal: terminal.process.send_signal(signal.SIGINT),
        lambda terminal: terminal.process.send_signal(signal.SIGTERM),
    ],
    ids=["q", "ctrl-c", "SIGINT", "SIGTERM"],
)
def test_top_refreshes_until_it_is_ended_and_gives_the_terminal_back(end):
    with serving_in_thread(answer) as (address, service), top_on_terminal(address) as terminal:
        terminal.until(f"{re.escape(ENTER)}.*q ends.*requests: -/s.*requests: 0/s.*decode-0")
        assert service.num_statuses > 1
        end(terminal)
        terminal.assert_ended_well()


def test_top_outlasts_a_router_that_is_away_and_gives_the_terminal_back_while_suspended():
    with serving_in_thread(answer) as (address, service), top_on_terminal(address) as terminal:
        terminal.until("decode-0")
        service.is_away = True
        terminal.until("has not answered for")
        service.is_away = False
        terminal.process.send_signal(signal.SIGTSTP)
        terminal.until(re.escape(LEAVE))
        # Without a shell that could continue it, the system may not let it stop.
        again = f"{re.escape(LEAVE)}.*{re.escape(ENTER)}.*q ends.*decode-0"
        terminal.until(again, lambda: terminal.process.send_signal(signal.SIGCONT))
        terminal.press(b"xyzq")
        terminal.assert_ended_well()
