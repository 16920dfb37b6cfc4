"""Streams over HTTP beside streams over gRPC: each gets its own tokens, none lost.

`python -m benchmarks.gateway --ways both` does the same with a thousand of each.
"""

import pytest

from tests.http_gateway.parrot import MARKS, write_folder
from tests.http_gateway.serving import gateway
from tests.http_gateway.whole_cluster import GrpcCanary, HttpCanary, whole_cluster

EACH = 40  # together several times as many as the pages of the decode worker hold


def test_many_streams_of_both_front_ends_lose_repeat_and_change_no_token(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = write_folder(tmp_path_factory.mktemp("model"), MARKS["plain"])
    with gateway(lambda: whole_cluster(folder)) as served:
        singers = [
            kind(served, f"{kind.__name__} {number}")
            for kind in (GrpcCanary, HttpCanary)
            for number in range(EACH)
        ]
        for each in singers:
            each.is_over.set()  # one song each

        for each in singers:
            each.start()
        for each in singers:
            each.join(100)

        assert not any(each.failure for each in singers), [each.failure for each in singers]
        assert [each.num_songs for each in singers] == [1] * (2 * EACH)
        assert served.backend.router.admission.num_active == 0
