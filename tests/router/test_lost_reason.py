import grpc
import pytest

from router.lost_reason import MAX_CHARS, lost_reason


def refusal(details):
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details
    )


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (refusal("ping timeout"), "UNAVAILABLE: ping timeout"),
        (refusal("\x1b]0;mine\x07 two\n lines"), "UNAVAILABLE: \ufffd]0;mine\ufffd two lines"),
        (OSError("no route"), "no route"),
        (ConnectionResetError(), "ConnectionResetError"),  # not empty, as if nothing were lost
    ],
)
def test_a_reason_is_one_printable_line_whatever_the_peer_tells(error, told):
    assert lost_reason(error) == told


def test_a_long_reason_is_cut():
    told = lost_reason(refusal("x" * 8000))

    assert len(told) == MAX_CHARS
    assert told.endswith("x…")
