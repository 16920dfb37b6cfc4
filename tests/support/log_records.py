"""Log records of code other than gRPC's own, and their fields."""

import logging
from collections.abc import Mapping

import pytest

from observability.logs import ATTRIBUTE


def records_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the records, without one that gRPC makes asyncio write on a busy host.

    Two threads then see the same event, and the one that reads second logs that nothing is left.
    """
    return [each for each in caplog.records if "PollerCompletionQueue" not in str(each.msg)]


def logged(event: str, caplog: pytest.LogCaptureFixture) -> list[Mapping[str, object]]:
    """Return the fields of all records of an event, in order."""
    return [getattr(each, ATTRIBUTE) for each in caplog.records if each.msg == event]
