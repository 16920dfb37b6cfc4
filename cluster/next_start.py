"""What a host's next processes would start with: its present code, and its files of TLS.

A controller has each host run this before a restart. It refers to the function by name, and the
host runs its present code, so both outlive an upgrade.
"""

import socket
from dataclasses import dataclass

from credentials.config import TlsSettings
from credentials.own_files import wrong_files, wrong_front_files
from options.kept_by_name import kept_by_name
from protos.contract import own_contract


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class NextStart:
    """What a host has for the next processes on it."""

    contract_version: int  # of its code; see protos.contract
    wrong_files: str = ""  # why its files within the cluster cannot be used; empty: they can
    wrong_front_files: str = ""  # the same of those for clients, on the home host alone


def next_start(
    settings: TlsSettings, address: str, authority: bytes, *, is_home: bool
) -> NextStart:
    """Look at the host of this process.

    Args:
        settings: The TLS options of the cluster.
        address: The host's address in Ray.
        authority: The authority that must cover this host's certificate, in PEM; empty: any.
        is_home: Whether the router and the HTTP gateway are on this host.
    """
    host = f"{socket.gethostname()} ({address})"
    return NextStart(
        contract_version=own_contract(),
        wrong_files=wrong_files(settings.inside, host, authority),
        wrong_front_files=wrong_front_files(settings, host) if is_home else "",
    )
