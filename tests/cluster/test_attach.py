"""Questions to a cluster that may still start; Ray is a fake with a clock."""

import signal
from types import SimpleNamespace

import pytest
import ray
from ray._private import utils as ray_utils

from cluster import attach
from cluster.attach import START_TIMEOUT_S, ask, ask_starting, attach_ray, look, router_calls
from cluster.errors import StartError
from observability.last_line import last_line

WAITING = ["waiting for the cluster's controller, which Ray starts"]


class Clock:
    """Of a Ray that has an answer at some time."""

    def __init__(self, monkeypatch, answers_at):
        self.now = 100.0
        self.answers_at = 100.0 + answers_at
        monkeypatch.setattr(attach, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(ray, "wait", self._wait)
        monkeypatch.setattr(ray, "get", lambda call, timeout: call)

    def _wait(self, calls, timeout):
        self.now = max(self.now, min(self.now + timeout, self.answers_at))
        return (calls, []) if self.now >= self.answers_at else ([], calls)


def blocked_signals():
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_ray_learns_no_command_line_and_leaves_sigterm_alone(monkeypatch):
    told = []

    def init(**_):
        told.append(ray_utils.get_entrypoint_name())
        told.append(signal.SIGTERM in blocked_signals())
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    monkeypatch.setattr(attach, "check_ray_answers", lambda address: None)
    monkeypatch.setattr(ray, "init", init)
    before = signal.getsignal(signal.SIGTERM), blocked_signals(), ray_utils.get_entrypoint_name()

    attach_ray("127.0.0.1:6379", shows_worker_logs=False)

    assert told == ["pagewire", True]
    after = signal.getsignal(signal.SIGTERM), blocked_signals(), ray_utils.get_entrypoint_name()
    assert after == before
    assert "python" in after[-1], "a command line, which Ray would show"


@pytest.mark.parametrize(("answers_at", "said"), [(0.5, []), (8.0, []), (90.0, WAITING)])
def test_a_controller_that_still_starts_is_waited_for(monkeypatch, answers_at, said):
    Clock(monkeypatch, answers_at)
    lines = []

    assert ask_starting("answer", lines.append, lambda: None) == "answer"
    assert lines == said


def test_the_wait_for_a_controller_ends_and_says_for_what_it_was(monkeypatch):
    clock = Clock(monkeypatch, 1000.0)
    lines = []

    with pytest.raises(StartError, match=r"controller has not answered within 120 s; .*try again"):
        ask_starting("answer", lines.append, lambda: None)
    assert clock.now == 100.0 + START_TIMEOUT_S
    assert lines == WAITING


def test_a_controller_that_answers_too_late_may_have_done_what_it_was_asked_for(monkeypatch):
    def get(call, timeout):
        raise ray.exceptions.GetTimeoutError("some object(s) not ready")

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(
        StartError, match=r"not answer within 7 s; what .* may have begun: look with"
    ):
        ask(None, timeout_s=7.0)


def test_looks_share_one_limit_and_say_why_there_is_no_answer(monkeypatch):
    limits = []

    def get(call, timeout):
        limits.append(timeout)
        if isinstance(call, Exception):
            raise call
        return call

    Clock(monkeypatch, 0.0)
    monkeypatch.setattr(ray, "get", get)
    late = ray.exceptions.GetTimeoutError("not ready")
    dead = ray.exceptions.ActorDiedError()

    assert look("answer", 98.0, 5.0) == ("answer", "")
    assert look(late, 90.0, 5.0) == (None, "no answer within 5 s")
    assert look(dead, 98.0, 5.0) == (None, last_line(dead))
    assert limits == [3.0, 0.0, 3.0]


def test_a_router_is_asked_for_what_its_code_can_tell(monkeypatch):
    def method(answer):
        return SimpleNamespace(remote=lambda: answer)

    older = SimpleNamespace(wait_ready=method("h:1"), cluster_token=method("t"))
    monkeypatch.setattr(ray, "get_actor", lambda name: older)
    assert router_calls() == {"wait_ready": "h:1", "cluster_token": "t"}

    def no_actor(name):
        raise ValueError(name)

    monkeypatch.setattr(ray, "get_actor", no_actor)
    assert router_calls() == {}


def test_whoever_waits_for_a_controller_may_give_up(monkeypatch):
    clock = Clock(monkeypatch, 1000.0)

    def check():
        if clock.now >= 110.0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask_starting("answer", lambda line: None, check)
    assert clock.now == 110.0
