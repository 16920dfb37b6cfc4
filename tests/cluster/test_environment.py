import os

import pytest

from cluster.environment import prepare_local_ray


@pytest.mark.parametrize(("given", "found"), [(None, "ERROR"), ("DEBUG", "DEBUG")])
def test_grpc_logs_only_errors_unless_a_user_wants_more(monkeypatch, given, found):
    monkeypatch.setattr(os, "environ", {} if given is None else {"GRPC_VERBOSITY": given})

    prepare_local_ray()

    assert os.environ["GRPC_VERBOSITY"] == found
