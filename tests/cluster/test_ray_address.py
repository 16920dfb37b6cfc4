import socket
import time

import grpc
import pytest

from cluster.errors import StartError
from cluster.ray_address import check_ray_answers
from tests.support.wall_clock import assert_within


def test_a_port_that_nobody_listens_on_is_refused_at_once():
    started = time.monotonic()

    with pytest.raises(StartError, match=r"ray_address is 127\.0\.0\.1:1, .* refused; .ray start"):
        check_ray_answers("127.0.0.1:1")

    assert_within(time.monotonic() - started, 1)


@pytest.mark.parametrize("accepts", [True, False])
def test_a_listener_that_never_answers_is_refused_within_three_seconds(accepts):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1 if accepts else 0)
        started = time.monotonic()

        with pytest.raises(StartError, match="not the head of a Ray cluster"):
            check_ray_answers(f"127.0.0.1:{silent.getsockname()[1]}")

    assert_within(time.monotonic() - started, 3.5)


def test_an_unknown_host_is_refused():
    with pytest.raises(StartError, match="no Ray cluster answers there"):
        check_ray_answers("no-such-host.invalid:6379")


def test_a_grpc_server_passes_and_the_rest_is_left_to_ray():
    server = grpc.server(None)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        check_ray_answers(f"127.0.0.1:{port}")
    finally:
        server.stop(None)
    check_ray_answers("auto")
