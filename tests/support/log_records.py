"""Log records of code other than gRPC's own."""

import logging

import pytest


def records_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the records, without one that gRPC makes asyncio write on a busy host.

    Two threads then see the same event, and the one that reads second logs that nothing is left.
    """
    return [each for each in caplog.records if "PollerCompletionQueue" not in str(each.msg)]
