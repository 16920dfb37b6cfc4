"""Tells a refused caller when to try again, in a status that programs can read."""

import math
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2


def retry_info(delay_s: float) -> Any:
    """Return the detail of a status that asks its reader to wait, not for less than it says."""
    delay = Duration()
    delay.FromMilliseconds(math.ceil(1000 * delay_s))
    return error_details_pb2.RetryInfo(retry_delay=delay)
