import os
import re
import sys

import pytest

from cli.reference import ENVIRONMENT
from cluster.environment import forwarded_environment, own_variables, prepare_ray
from cluster.errors import ConfigError
from tests.support.distributions import SOURCES


@pytest.mark.parametrize(("given", "found"), [(None, "ERROR"), ("DEBUG", "DEBUG")])
def test_grpc_logs_only_errors_unless_a_user_wants_more(monkeypatch, given, found):
    monkeypatch.setattr(os, "environ", {} if given is None else {"GRPC_VERBOSITY": given})

    prepare_ray(is_local=True)

    assert os.environ["GRPC_VERBOSITY"] == found


def test_every_variable_that_is_read_is_documented():
    reads = re.compile(r"""(?:environ(?:\.get\(|\[)|getenv\()"(\w+)\"""")
    read = {name for path in SOURCES for name in reads.findall(path.read_text(encoding="utf-8"))}

    assert read - {"PYTHONPATH"} == set(ENVIRONMENT)  # that one is Python's


def test_a_clients_token_is_not_among_what_ray_starts_actors_with(monkeypatch):
    given = {"PAGEWIRE_TOKEN": "secret", "PAGEWIRE_OTHER": "1", "HOME": "/"}
    monkeypatch.setattr(os, "environ", given)

    assert forwarded_environment() == {"PAGEWIRE_OTHER": "1"}


@pytest.mark.parametrize("given", [{}, {"RAY_AUTH_MODE": "disabled"}], ids=["unset", "disabled"])
def test_a_ray_that_is_started_here_takes_nobody_without_its_token(monkeypatch, given):
    monkeypatch.setattr(os, "environ", dict(given))

    prepare_ray(is_local=True)

    assert os.environ["RAY_AUTH_MODE"] == "token"


@pytest.mark.parametrize("given", [{}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token"}])
def test_how_to_authenticate_at_a_ray_that_runs_already_is_left_to_its_owner(monkeypatch, given):
    monkeypatch.setattr(os, "environ", dict(given))

    prepare_ray(is_local=False)

    assert os.environ.get("RAY_AUTH_MODE") == given.get("RAY_AUTH_MODE")
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ


def test_an_interpreter_that_ray_could_not_start_is_refused(monkeypatch):
    variables = {"NCCL_DEBUG": "INFO"}
    for path in ("/opt/venv-3.11/bin/python", "/home/jürgen/bin/python3"):
        monkeypatch.setattr(sys, "executable", path)
        assert own_variables(variables) == {"runtime_env": {"env_vars": variables}}

    monkeypatch.setattr(sys, "executable", "/home/a b/.venv/bin/python")
    assert own_variables({}) == {}, "what its Ray inherited, Ray starts without a shell"
    with pytest.raises(
        ConfigError, match=r"found '/home/a b/\.venv/bin/python'; allowed: one with"
    ):
        own_variables(variables)
