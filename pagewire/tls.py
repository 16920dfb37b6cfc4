"""How a client connects to routers: its TLS files, and why a connection failed."""

import asyncio
import os
import re
import ssl
from contextlib import suppress
from dataclasses import dataclass

from pagewire.arguments import check_text, refused
from pagewire.errors import FieldViolation, InvalidRequestError, TlsError
from pagewire.protos.pem import (
    HOSTNAME_MISMATCH,
    IP_MISMATCH,
    LivePem,
    Pem,
    PemError,
    PemFile,
    PemFiles,
    client_context,
)
from pagewire.shown import shown, shown_with_type

PROBE_S = 1.0  # for a router to greet
PROBE_AGAIN_S = 0.3  # a router that ends is gone by then

_NAME = re.compile(r"[\w-]+(?:\.[\w-]+)*|[\da-fA-F:.]+", re.ASCII)

# What is told of a router, and the client's argument that may mend it.
_Fault = tuple[str, str]

_IN_CLEAR = "takes connections over TLS only, and this one is in clear; use tls=Tls()", "tls"
_NO_TLS = "does not speak TLS, but this client does; connect without TLS", ""
_NO_CERTIFICATE = (
    "requires from each client a certificate of an authority that it trusts; see "
    "tls.certificate_file",
    "tls.certificate_file",
)
_AUTHORITY = "; see tls.authority_file for the authority to trust", "tls.authority_file"
_SERVER_NAME = (
    "; connect by a name that it is for, or see tls.server_name for the one to expect",
    "tls.server_name",
)
# By OpenSSL's codes, X509_V_ERR_*: self-signed, itself or its authority; no issuer; another name or
# address.
_REMEDIES = {
    **dict.fromkeys((18, 19, 20, 21), _AUTHORITY),
    **dict.fromkeys((HOSTNAME_MISMATCH, IP_MISMATCH), _SERVER_NAME),
}


# Without slots, so that pickles hold the fields by name: newer code may read the arguments of a
# gateway's actor.
@dataclass(frozen=True, kw_only=True)
class Tls:
    """Connect over TLS. Files are in PEM, and read again when they change.

    Without files, routers need a certificate of a public authority, and the client shows none.
    """

    # Authority whose certificates are trusted; empty: gRPC's own list of public authorities, or the
    # file that the environment variable GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names.
    authority_file: str | os.PathLike[str] = ""
    certificate_file: str | os.PathLike[str] = ""  # that the client shows; requires key_file
    key_file: str | os.PathLike[str] = ""  # without a passphrase
    server_name: str = ""  # name in a router's certificate; empty: the address's host

    def load(self) -> LivePem:
        """Read the files.

        Raises:
            InvalidRequestError: A file cannot be used; names it.
        """
        files = {
            name: PemFile(option=f"tls.{name}", path=_path(f"tls.{name}", path))
            for name in ("authority_file", "certificate_file", "key_file")
            if (path := getattr(self, name))
        }
        if self.server_name:
            name = check_text("tls.server_name", self.server_name)
            if not _NAME.fullmatch(name):
                raise refused("tls.server_name", shown(name), "a name of a host, or an address")
        for name, other in (("certificate_file", "key_file"), ("key_file", "certificate_file")):
            if other in files and name not in files:
                # Without the name of the other option, which commands spell differently.
                given = other.removesuffix("_file")
                raise refused(f"tls.{name}", "none", f"a file, as a {given} is given")
        pem = PemFiles(
            certificate=files.get("certificate_file"),
            key=files.get("key_file"),
            authorities=tuple(files[each] for each in files if each == "authority_file"),
        )
        try:
            return LivePem(pem)
        except PemError as error:
            violation = FieldViolation(field=error.option, description=error.told)
            raise InvalidRequestError(
                str(error), code="INVALID_ARGUMENT", violations=(violation,)
            ) from error


def _path(field: str, value: object) -> str:
    if isinstance(value, str | os.PathLike) and isinstance(path := os.fspath(value), str):
        return path
    raise refused(field, shown_with_type(value), "a path, str or os.PathLike")


def check_tls(value: object) -> "Tls | None":
    """Return a client's TLS argument."""
    if value is None or isinstance(value, Tls):
        return value
    raise refused("tls", shown(value), "pagewire.Tls(...), or None for a connection in clear")


async def why_no_connection(address: str, pem: Pem | None, server_name: str) -> TlsError | None:
    """Return why a router cannot be reached, if TLS is the reason.

    gRPC reports only a closed socket, so this connects again to find the reason. A router that ends
    closes sockets, too, so a reason counts if it is found twice.

    Args:
        address: The router's address.
        pem: The files of the channel; None: it is in clear.
        server_name: The server name of the channel; empty: the host of the address.
    """
    if await _probe(address, pem, server_name) is None:
        return None
    await asyncio.sleep(PROBE_AGAIN_S)
    return await _probe(address, pem, server_name)


async def _probe(address: str, pem: Pem | None, server_name: str) -> TlsError | None:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    context = client_context(pem) if pem else _credulous()
    context.set_alpn_protocols(["h2"])
    writer = None
    try:
        async with asyncio.timeout(PROBE_S):
            reader, writer = await asyncio.open_connection(
                host, int(port), ssl=context, server_hostname=server_name or host
            )
            if pem is None:
                return _error(address, _IN_CLEAR)
            with suppress(ConnectionError):
                # A router speaks first. Without a certificate gRPC closes silently.
                if await reader.read(1):
                    return None
            return _error(address, _NO_CERTIFICATE)
    except ssl.SSLError as error:
        return _told(address, error, is_plain=pem is None)
    except (OSError, TimeoutError, ValueError):
        return None  # nothing listens there, or it does not speak TLS
    finally:
        if writer:
            writer.transport.abort()


def _credulous() -> ssl.SSLContext:
    """Return a context that only finds out whether a server speaks TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _told(address: str, error: ssl.SSLError, *, is_plain: bool) -> TlsError | None:
    reason = error.reason or ""
    if is_plain:
        return _error(address, _IN_CLEAR) if "ALERT" in reason else None
    if isinstance(error, ssl.SSLCertVerificationError):
        told = f"shows a certificate that is not trusted: {error.verify_message.rstrip('.')}"
        remedy, field = _REMEDIES.get(error.verify_code, ("", ""))
        return _error(address, (told + remedy, field))
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return _error(address, _NO_CERTIFICATE)
    if "WRONG_VERSION" in reason or "RECORD_LAYER" in reason:
        return _error(address, _NO_TLS)
    told = f"cannot be reached over TLS: {reason.replace('_', ' ').lower() or error}"
    return _error(address, (told, ""))


def _error(address: str, fault: _Fault) -> TlsError:
    told, field = fault
    return TlsError(f"the router at {address} {told}", code="UNAVAILABLE", field=field)
