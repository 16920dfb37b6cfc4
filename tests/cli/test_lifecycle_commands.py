"""What the commands for a running cluster say; Ray and the cluster are fakes."""

import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from cli import bring_up, lifecycle_commands
from cluster import attach, launch, scale_out
from tests.support.command_line import run_main


@pytest.fixture
def host(monkeypatch):
    """A host with a cluster: `ends` is called where it is ended, `ends_head` where its Ray is."""
    host = SimpleNamespace(ends=lambda grace_s, begun: begun(), ends_head=lambda: None)
    facts = SimpleNamespace(config=SimpleNamespace(stop_grace_s=7.0))

    @contextmanager
    def attached(address):
        yield SimpleNamespace(facts=SimpleNamespace(remote=lambda: facts))

    monkeypatch.setattr(lifecycle_commands, "prepare_ray", lambda *, is_local: None)
    monkeypatch.setattr(lifecycle_commands, "configure_logging", lambda *_: None)
    monkeypatch.setattr(attach, "attached", attached)
    monkeypatch.setattr(attach, "ask", lambda call: call)
    monkeypatch.setattr(launch, "end_cluster", lambda *arguments: host.ends(*arguments))
    monkeypatch.setattr(bring_up, "end_head", lambda: host.ends_head())
    return host


def end_interrupted(grace_s, begun):
    begun()
    raise KeyboardInterrupt


def end_head_interrupted():
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", [{"ends": end_interrupted}, {"ends_head": end_head_interrupted}])
def test_an_interrupted_down_says_that_it_is_to_be_run_again(host, step):
    vars(host).update(step)

    result = run_main("down")

    again = "the cluster is being stopped; run `pagewire down` again"
    assert result.stderr == f"stopped by SIGINT before it was done; {again}\n"
    assert result.returncode == 130
    assert result.stdout == "stopping; running requests have 7 s\n"


FULL = "warning: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("is_full", [False, True], ids=["reader gone", "disk full"])
@pytest.mark.parametrize("command", [("scale", "--decode", "3"), ("down",)], ids=" ".join)
def test_output_that_nobody_takes_does_not_undo_the_work(host, monkeypatch, command, is_full):
    done = []

    def work(*arguments):
        begun = arguments[-1]
        begun("starting decode-2") if command[0] == "scale" else begun()
        done.append("work")

    host.ends = work
    host.ends_head = lambda: done.append("head")
    monkeypatch.setattr(scale_out, "scale_cluster", work)
    read_end, write_end = os.pipe()
    os.close(read_end)

    with os.fdopen(write_end, "w") as pipe, open("/dev/full", "w") as full:
        result = run_main(*command, stdout=full if is_full else pipe)

    assert done == (["work"] if command[0] == "scale" else ["work", "head"])
    assert (result.returncode, result.stderr) == (0, FULL if is_full else "")


@pytest.mark.parametrize(
    ("given", "ends"),
    [((), "`pagewire down`"), (("--ray-address", "h:1"), "`pagewire down --ray-address h:1`")],
)
def test_up_says_which_command_ends_the_cluster(host, monkeypatch, given, ends):
    started = SimpleNamespace(device="cpu", context_tokens=1)
    monkeypatch.setattr(bring_up, "bring_up", lambda *_: started)
    monkeypatch.setattr(lifecycle_commands, "context_note", lambda *_: "")
    monkeypatch.setattr(lifecycle_commands, "serving_where", lambda *_: "pagewire serves")

    result = run_main("up", "--model", "/m", *given)

    assert result.stdout + result.stderr == f"ready: pagewire serves; {ends} ends it\n"


HALF_PAIR = "front_tls: {key_file: /etc/pagewire/front.key}"
INCOMPLETE = (
    "front_tls.certificate_file: found none; allowed: a file, as front_tls.key_file is given"
)


def test_a_command_for_a_running_cluster_uses_nothing_of_the_file_but_where_it_is(host, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(f"{HALF_PAIR}\npage_size: 17\npools: {{small: {{role: cook}}}}\n")

    ended = run_main("down", "--config", str(file))

    assert (ended.returncode, ended.stderr) == (0, "")
    file.write_text("ray_address: nowhere\nray_adress: 10.0.0.1:6379\n")
    refused = run_main("down", "--config", str(file))
    assert refused.returncode == 2
    assert [line.partition(": found ")[0] for line in refused.stderr.splitlines()] == [
        f"error: {file}, line 1: ray_address",
        f"error: {file}, line 2: ray_adress",
    ]


@pytest.mark.parametrize("command", ["up", "serve", "router", "gateway"])
def test_a_server_refuses_a_key_without_its_certificate(command, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(HALF_PAIR)
    needed = ("--controller", "h:1", "--keys", "k") if command == "router" else ()

    refused = run_main(command, *needed, "--config", str(file))

    assert refused.returncode == 2
    assert refused.stderr == f"error: {file}, line 1: {INCOMPLETE}\n"
