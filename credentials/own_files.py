"""Checks the files of TLS on the host of this process, before processes start that need them."""

from credentials.config import TlsConfig, TlsSettings
from pagewire.protos.pem import PemError, check_trusted, read_pem


def wrong_files(config: TlsConfig, host: str, authority: bytes) -> str:
    """Say why processes of this host could not connect to the others; empty: they could.

    Args:
        config: The TLS options; nothing is checked if TLS is off.
        host: This host in words.
        authority: The cluster's authority as the router's host has it, in PEM; empty: not compared.
    """
    if not config.is_on:
        return ""
    try:
        pem = read_pem(config.files)
        if authority:
            check_trusted(config.files, pem, authority, "the authority of the router's host")
    except PemError as error:
        return _told(error, host)
    return ""


def wrong_front_files(settings: TlsSettings, host: str) -> str:
    """Say why no server for clients could start on this host; empty: one could.

    Args:
        settings: The TLS options; nothing is checked if TLS for clients is off.
        host: This host in words.
    """
    if not settings.front.is_on:
        return ""
    try:
        read_pem(settings.front.files(settings.inside))
    except PemError as error:
        return _told(error, host)
    return ""


def _told(error: PemError, host: str) -> str:
    return f"{error.option}: on {host}, {error.told}"
