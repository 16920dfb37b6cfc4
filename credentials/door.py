"""Opens ports for servers: over TLS, or in clear if no other host can connect.

Every listening socket of a router, worker, controller or HTTP gateway is opened here.
"""

import logging
import socket
import ssl
import time
from dataclasses import dataclass

import grpc

from credentials.config import TlsSettings
from credentials.errors import OpenInClear
from observability.logs import fields
from pagewire.protos.grpc_options import WORKER_CHANNEL_OPTIONS
from pagewire.protos.pem import LivePem, Pem, PemError, PemFiles, client_context, server_context
from pagewire.protos.tls_channel import TlsChannel
from protos.addresses import is_loopback, join_address

log = logging.getLogger(__name__)

SETTLE_S = 0.05  # far more than it should take gRPC to make a handshaker


@dataclass(frozen=True, kw_only=True, slots=True)
class Encryption:
    """How one kind of connection is protected."""

    is_on: bool
    expires_at: float = 0.0  # when the certificate expires, Unix time; 0: there is none


IN_CLEAR = Encryption(is_on=False)


class Door:
    """Listens for one kind of connection of a process.

    Args:
        option: The option that names the certificate, for errors.
        pem: The server's files; None: it listens in clear.
        is_insecure: Whether it may do so for other hosts.
    """

    def __init__(self, option: str, pem: LivePem | None, *, is_insecure: bool) -> None:
        self._option = option
        self._pem = pem
        self._is_insecure = is_insecure

    def add_port(self, server: grpc.aio.Server, host: str, port: int) -> int:
        """Add a port to a gRPC server; return the port.

        Raises:
            OpenInClear: Other hosts could connect, and nothing would be encrypted.
            RuntimeError: The port is taken.
        """
        self.check(host)
        address = join_address(host, port)
        if self._pem is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, _server_credentials(self._pem)))

    def ssl_context(self, host: str) -> ssl.SSLContext | None:
        """Return an HTTP server's context, which picks up renewed files; None: it is in clear.

        Raises:
            OpenInClear: As add_port does.
        """
        self.check(host)
        if self._pem is None:
            return None
        live, pem = self._pem, self._pem.current()
        context = latest = server_context(pem)

        def renew(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            nonlocal pem, latest
            if live.current() is not pem:
                pem = live.current()
                latest = server_context(pem)
            connection.context = latest

        context.sni_callback = renew  # called without a name, too
        return context

    def check(self, host: str) -> None:
        """Refuse to listen in clear where other hosts can connect.

        Raises:
            OpenInClear: It would.
        """
        if self._pem is None and not self._is_insecure and not is_loopback_host(host):
            raise OpenInClear(self._option, host)

    def encryption(self) -> Encryption:
        """Return how incoming connections are protected now."""
        if self._pem is None:
            return IN_CLEAR
        return Encryption(is_on=True, expires_at=self._pem.current().expires_at)


class PageEncryption:
    """TLS for connections that carry pages: version 1.3, with a certificate on both sides."""

    def __init__(self, pem: LivePem, server_name: str) -> None:
        self._pem = pem
        self._server_name = server_name

    def server(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        """Return the side that listens, with the current files."""
        context = server_context(self._pem.current())
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context.wrap_bio(incoming, outgoing, server_side=True)

    def client(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        """Return the side that connects, with the current files."""
        context = client_context(self._pem.current())
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context.wrap_bio(incoming, outgoing, server_hostname=self._server_name)


class ClusterLinks:
    """Listening and connecting sides of a process within the cluster.

    Args:
        settings: Files to read.

    Raises:
        PemError: A file cannot be used.
    """

    def __init__(self, settings: TlsSettings) -> None:
        config = settings.inside
        self._pem = live_pem(config.files) if config.is_on else None
        self._server_name = config.server_name
        self.door = Door("tls.certificate_file", self._pem, is_insecure=settings.insecure)

    def connect(self, address: str) -> grpc.aio.Channel:
        """Open a channel to another process of the cluster."""
        if self._pem is None:
            return grpc.aio.insecure_channel(address, options=WORKER_CHANNEL_OPTIONS)
        return TlsChannel(address, self._pem, self._server_name, WORKER_CHANNEL_OPTIONS)

    @property
    def page_tls(self) -> PageEncryption | None:
        """The TLS of connections that carry pages; None: they are in clear."""
        if self._pem is None:
            return None
        return PageEncryption(self._pem, self._server_name)


def front_door(settings: TlsSettings) -> Door:
    """Return the door for clients; raises PemError if a file cannot be used."""
    config = settings.front
    pem = live_pem(config.files(settings.inside)) if config.is_on else None
    return Door("front_tls.certificate_file", pem, is_insecure=settings.insecure)


def live_pem(files: PemFiles) -> LivePem:
    """Return files whose renewal is noticed and logged."""
    return LivePem(files, _log_refused)


def is_loopback_host(host: str) -> bool:
    """Return whether only this host can reach a server at a name or address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False  # listening there will fail
    return all(is_loopback(str(address[0])) for *_, address in found)


def _log_refused(error: PemError) -> None:
    log.warning("renewal_refused", extra=fields(option=error.option, reason=error.told))


def _server_credentials(live: LivePem) -> grpc.ServerCredentials:
    """Return credentials that gRPC asks for at each connection."""
    given = live.current()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Return the files if they are others than before; None: they are the same.

        gRPC 1.85 calls this before each handshake. If each call replaces the configuration, many
        connections at a time end the process: presumably a handshaker refers to what another thread
        has freed. So nothing replaces what has not changed. What has changed is replaced after a
        time in which the threads that asked before should be done.
        """
        nonlocal given
        if (pem := live.current()) is given:
            return None
        given = pem
        time.sleep(SETTLE_S)
        return _configuration(pem)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(given),
        renewed,
        require_client_authentication=bool(given.authority),
    )


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(pem.key, pem.certificate)], root_certificates=pem.authority or None
    )
