"""Checks the files of TLS within the cluster on the host of this process."""

from credentials.config import TlsConfig
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
        return f"{error.option}: on {host}, {error.told}"
    return ""
