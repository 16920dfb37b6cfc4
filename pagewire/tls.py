"""How a client is connected to routers: its files for TLS, and why no connection came about."""

import asyncio
import os
import re
import ssl
from contextlib import suppress
from dataclasses import dataclass

from pagewire.arguments import refused, shown
from pagewire.errors import FieldViolation, InvalidRequestError, TlsError
from pagewire.protos.pem import LivePem, Pem, PemError, PemFile, PemFiles, client_context

PROBE_S = 1.0  # for a router to greet

_NAME = re.compile(r"[\w-]+(?:\.[\w-]+)*|[\da-fA-F:.]+", re.ASCII)

_IN_CLEAR = "takes connections over TLS only, and this one is in clear; see tls, or --tls"
_NO_TLS = "does not speak TLS, and this client does; connect without"
_NO_CERTIFICATE = (
    "wants a certificate of an authority that it knows from each client; see "
    "tls.certificate_file, or --certificate-file"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """Connect over TLS. Files are in PEM, and read again when they change.

    Without any of them routers need a certificate of a public authority, and the client has none.
    """

    # Whose certificates are believed; empty: gRPC's own list of public authorities, or the file
    # that the environment variable GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names.
    authority_file: str | os.PathLike[str] = ""
    certificate_file: str | os.PathLike[str] = ""  # that the client shows; with it goes its key
    key_file: str | os.PathLike[str] = ""  # without a passphrase
    server_name: str = ""  # for which a router's certificate must be; empty: the address's host

    def load(self) -> LivePem:
        """Read the files.

        Raises:
            InvalidRequestError: One cannot be used; names it.
        """
        files = {
            name: PemFile(option=f"tls.{name}", path=os.fspath(path))
            for name in ("authority_file", "certificate_file", "key_file")
            if (path := getattr(self, name))
        }
        if self.server_name and not _NAME.fullmatch(self.server_name):
            raise refused(
                "tls.server_name", shown(self.server_name), "a name of a host, or an address"
            )
        for name, other in (("certificate_file", "key_file"), ("key_file", "certificate_file")):
            if other in files and name not in files:
                raise refused(f"tls.{name}", "none", f"a file, as tls.{other} is given")
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


def check_tls(value: object) -> "Tls | None":
    """Return what a client was given for TLS."""
    if value is None or isinstance(value, Tls):
        return value
    raise refused("tls", shown(value), "pagewire.Tls(...), or None for a connection in clear")


async def why_no_connection(address: str, pem: Pem | None, server_name: str) -> TlsError | None:
    """Return why nothing can be said to a router, if that is because of TLS.

    gRPC tells of a closed socket, and the reason stays where it was found; so this connects again.

    Args:
        address: Of the router.
        pem: As of the channel; None: it is in clear.
        server_name: Likewise; empty: the host of the address.
    """
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
                # A router speaks first. gRPC closes without a word where it misses a certificate.
                if await reader.read(1):
                    return None
            return _error(address, _NO_CERTIFICATE)
    except ssl.SSLError as error:
        return _told(address, error, is_plain=pem is None)
    except (OSError, TimeoutError, ValueError):
        return None  # nobody is there, or it speaks no TLS at all
    finally:
        if writer:
            writer.transport.abort()


def _credulous() -> ssl.SSLContext:
    """Return a context that finds out whether a server speaks TLS, and is used for nothing else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _told(address: str, error: ssl.SSLError, *, is_plain: bool) -> TlsError | None:
    reason = error.reason or ""
    if is_plain:
        return _error(address, _IN_CLEAR) if "ALERT" in reason else None
    if isinstance(error, ssl.SSLCertVerificationError):
        told = f"shows a certificate that is not believed: {error.verify_message}"
        return _error(address, told)
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return _error(address, _NO_CERTIFICATE)
    if "WRONG_VERSION" in reason or "RECORD_LAYER" in reason:
        return _error(address, _NO_TLS)
    told = f"cannot be connected to over TLS: {reason.replace('_', ' ').lower() or error}"
    return _error(address, told)


def _error(address: str, told: str) -> TlsError:
    return TlsError(f"the router at {address} {told}", code="UNAVAILABLE")
