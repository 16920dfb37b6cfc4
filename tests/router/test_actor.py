from pagewire import async_client
from router.actor import server_options
from router.config import RouterConfig


def test_a_client_that_waits_long_does_not_ping_more_often_than_a_router_allows():
    allowed = dict(server_options(RouterConfig()))["grpc.http2.min_ping_interval_without_data_ms"]
    sent = dict(async_client.CHANNEL_OPTIONS)["grpc.keepalive_time_ms"]

    assert 2 * allowed <= sent
