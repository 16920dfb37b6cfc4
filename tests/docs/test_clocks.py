"""That the wall clock decides only what docs/protocol.md#clocks names."""

import re

from tests.support.distributions import serving_modules_with

WALL_CLOCK = re.compile(r"\b(time\.time\b|time_ns\(|datetime\.(now|utcnow|today)\b)")
ALLOWED = {
    "resume tokens": {"router/router.py"},
    "certificates": {"pagewire/protos/pem.py"},
    "chat templates": {"router/chat_template.py"},
    "times that are only shown": {
        "cluster/doctor.py",  # days until a certificate expires
        "pagewire/cli/status.py",
        "http_gateway/chat.py",
        "http_gateway/cluster_view.py",
        "http_gateway/completions.py",
        "http_gateway/models.py",
        "http_gateway/response_events.py",
        "http_gateway/responses.py",
    },
}


def test_the_wall_clock_is_read_nowhere_else():
    assert serving_modules_with(WALL_CLOCK) == set().union(*ALLOWED.values())
