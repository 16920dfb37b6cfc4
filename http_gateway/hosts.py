"""Refuses calls of web pages to a gateway that only its own host can reach."""

from collections.abc import Collection

from http_gateway.errors import HttpError
from observability.local_names import is_local_name
from pagewire.shown import shown


def check_host(value: str, names: Collection[str]) -> None:
    """Check a Host header; see is_local_name.

    Raises:
        HttpError: The name is another one.
    """
    if is_local_name(value, names):
        return
    allowed = "an address, localhost, or a name of http_gateway.allow_hosts"
    message = f"host: found {shown(value)}; allowed: {allowed}"
    raise HttpError(403, message, param="host", code="unknown_host")
