"""Certificates, keys and authorities from PEM files, checked, and read again when they change.

Both ends of a connection share this module, so it needs only Python's own `ssl`: it checks a
certificate by a handshake in memory, which finds whatever a peer would find.
"""

import _ssl
import logging
import math
import os
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pagewire.protos.secret_files import warn_if_public

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
RETRY_S = 10.0  # a refused renewal may be right by then: readable, or valid
_NO_CHECK_TIME = 0x20_0000  # X509_V_FLAG_NO_CHECK_TIME, which `ssl` has no name for
HOSTNAME_MISMATCH = 62  # X509_V_ERR_HOSTNAME_MISMATCH
IP_MISMATCH = 64  # X509_V_ERR_IP_ADDRESS_MISMATCH
_ROUNDS = 4  # more than a handshake has, in any version

Side = Literal["server", "client"]


class PemError(Exception):
    """A file cannot be used for TLS.

    Args:
        option: The option that names the file.
        found: The file, and what is wrong with it; never key material.
        allowed: What would be right.
    """

    def __init__(self, option: str, found: str, allowed: str) -> None:
        self.option = option
        self.told = f"{found}; allowed: {allowed}"
        super().__init__(f"{option}: {self.told}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PemFile:
    """A file, and the option that names it."""

    option: str  # "tls.key_file"
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PemFiles:
    """The files of one side of a connection."""

    certificate: PemFile | None = None  # with its chain to the authority; requires the key
    key: PemFile | None = None
    authorities: tuple[PemFile, ...] = ()  # of the other side's certificate
    sides: tuple[Side, ...] = ("client",)  # on which the certificate is shown
    # Whether the other side has the same authorities, which must then cover this certificate, too.
    is_mutual: bool = False
    name: PemFile | None = None  # that the certificate must have; in `path`, with its option

    @property
    def all(self) -> tuple[PemFile, ...]:
        """All files that are set."""
        return tuple(each for each in (self.certificate, self.key, *self.authorities) if each)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pem:
    """The content of files that fit together."""

    certificate: bytes = b""
    key: bytes = field(default=b"", repr=False)
    authority: bytes = b""
    names: tuple[str, ...] = ()  # hosts in the certificate
    expires_at: float = 0.0  # Unix time; 0: there is no certificate
    other_name: str = ""  # of the other side's certificate; empty: it is not known


class LivePem:
    """Files that are read again after a renewal; an incomplete or wrong renewal changes nothing.

    It is tried again from time to time: a file may become readable, or a certificate valid.

    Any thread may use it.

    Args:
        files: To read.
        refused: Called once for each renewal that is not used.

    Raises:
        PemError: The files cannot be used.
    """

    def __init__(self, files: PemFiles, refused: Callable[[PemError], None] | None = None) -> None:
        self._files = files
        self._refused = refused or _warn
        self._lock = threading.Lock()
        self._stamp = _stamp(files)
        self._pem = read_pem(files)
        self._retry_at = math.inf  # when to try a refused renewal again, monotonic

    def current(self) -> Pem:
        """Return the current content: the same object until the files change."""
        with self._lock:
            # Before the files are read: the next call sees changes made meanwhile.
            stamp, now = _stamp(self._files), time.monotonic()
            is_new = stamp != self._stamp
            if is_new or now >= self._retry_at:
                self._stamp, self._retry_at = stamp, math.inf
                try:
                    self._pem = read_pem(self._files)
                except PemError as error:
                    self._retry_at = now + RETRY_S
                    if is_new:
                        self._refused(error)
            return self._pem


class LivePeer(LivePem):
    """The files of the other side, which is on this host, and those that this side shows to it.

    The other side's certificate is what this one trusts, under its names. That side keeps its
    former certificate where it cannot use a renewal, so what is trusted stays, too.

    Args:
        peer: The other side's.
        own: This side's, without authorities.

    Raises:
        PemError: The files of the other side cannot be used.
    """

    def __init__(self, peer: PemFiles, own: LivePem) -> None:
        super().__init__(peer)
        self._own = own
        self._made_of: tuple[Pem, Pem] | None = None
        self._both = Pem()

    def current(self) -> Pem:
        """Return what to show and to trust: the same object until either changes."""
        made_of = peer, own = super().current(), self._own.current()
        with self._lock:
            if made_of != self._made_of:
                self._made_of = made_of
                name = a_name(peer.names)
                self._both = replace(own, authority=peer.certificate, other_name=name)
            return self._both


def read_pem(files: PemFiles) -> Pem:
    """Read files and check everything that can be checked locally.

    Raises:
        PemError: A file cannot be read, is not PEM, or does not fit the others; or a certificate is
            not valid now, or is for another use or name.
    """
    certificate = _read(files.certificate) if files.certificate else b""
    key = _read(files.key, is_secret=True) if files.key else b""
    parts = []
    for each in files.authorities:
        parts.append(_read(each))
        _check_certificates(each, parts[-1])
    authority = b"\n".join(parts)
    if not files.certificate or not files.key:
        return Pem(authority=authority)
    _check_certificates(files.certificate, certificate)
    _check_pair(files.certificate, files.key, certificate, key)
    shown = _shown_alone(files, certificate, key)
    not_before, expires_at = (
        ssl.cert_time_to_seconds(shown[each]) for each in ("notBefore", "notAfter")
    )
    path, now = files.certificate.path, time.time()
    if not not_before <= now < expires_at:
        early = f"is not valid before {utc(not_before)}"
        told = early if now < not_before else f"has expired, on {utc(expires_at)}"
        raise PemError(
            files.certificate.option, f"{path} {told}", "a certificate that is valid now"
        )
    pem = Pem(
        certificate=certificate,
        key=key,
        authority=authority,
        names=_hosts(shown),
        expires_at=expires_at,
    )
    if files.is_mutual:
        paths = " or ".join(each.path for each in files.authorities)
        options = ", ".join(each.option for each in files.authorities)
        check_trusted(files, pem, pem.authority, f"{paths} ({options})")
    if files.name and not is_for(pem, files.name.path):
        names = ", ".join(pem.names) or "no name"
        raise PemError(
            files.certificate.option,
            f"{path} is for {names}, not for {files.name.path} ({files.name.option})",
            "a certificate with that name",
        )
    return pem


def read_names(file: PemFile) -> tuple[str, ...]:
    """Return the hosts that a certificate names; its key is not needed.

    Raises:
        PemError: The file cannot be read, or holds no certificate.
    """
    content = _read(file)
    _check_certificates(file, content)
    with _file_of(content) as path:
        # `ssl` has no public name for this: it shows certificates of peers alone.
        return _hosts(_ssl._test_decode_cert(path))  # type: ignore[attr-defined]


def a_name(names: tuple[str, ...]) -> str:
    """Return a host that a certificate with these names is for; empty: there is none."""
    return names[0].replace("*", "any") if names else ""


def check_trusted(files: PemFiles, pem: Pem, authority: bytes, told_authority: str) -> None:
    """Refuse a certificate that an authority does not cover.

    Args:
        files, pem: The certificate's files, and their content.
        authority: In PEM.
        told_authority: The authority in words.

    Raises:
        PemError: A peer that trusts this authority alone would not trust the certificate.
    """
    assert files.certificate
    for side in files.sides:
        try:
            _show(pem, side, trusted=authority)
        except ssl.SSLError as error:
            raise PemError(
                files.certificate.option,
                f"{files.certificate.path} is not from {told_authority}: {_reason(error)}",
                "a certificate of that authority, with its chain",
            ) from error


def is_for(pem: Pem, host: str) -> bool:
    """Return whether a certificate is for a host, by name or address."""
    try:
        _show(pem, "server", trusted=pem.certificate, is_timeless=True, host=host)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in (HOSTNAME_MISMATCH, IP_MISMATCH):
            return False
        raise
    except ValueError:  # not a possible host name
        return False
    return True


def server_context(pem: Pem) -> ssl.SSLContext:
    """Return a server's context; with an authority, clients must have a certificate of it."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, pem.certificate, pem.key)
    if pem.authority:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=_text(pem.authority))
        # A resumed session would be let in without a look at the client's certificate.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


def client_context(pem: Pem) -> ssl.SSLContext:
    """Return a client's context; without an authority it trusts the system's.

    Like gRPC, it trusts each certificate of the authority's file, not only those that sign
    themselves.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT, pem.certificate, pem.key)
    if pem.authority:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(cadata=_text(pem.authority))
    else:
        context.load_default_certs()
    return context


def utc(at: float) -> str:
    """Format a Unix time for people."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def _warn(error: PemError) -> None:
    log.warning("a renewed file is not used; the previous one stays in use: %s", error)


def _stamp(files: PemFiles) -> tuple[tuple[int, ...], ...]:
    """Return a value that differs after a file has changed."""
    return tuple(_file_stamp(each.path) for each in files.all)


def _file_stamp(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # ValueError: an impossible path
        return ()
    return found.st_mtime_ns, found.st_ino, found.st_size


def _read(file: PemFile, *, is_secret: bool = False) -> bytes:
    try:
        with Path(file.path).open("rb") as opened:
            if is_secret:
                warn_if_public(opened)
            content = opened.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: an impossible path
        reason = getattr(error, "strerror", None) or error
        raise PemError(
            file.option,
            f"{file.path} cannot be read: {reason}",
            "a PEM file that this user can read",
        ) from error
    if len(content) > MAX_FILE_BYTES:
        raise PemError(
            file.option,
            f"{file.path} has more than {MAX_FILE_BYTES} bytes",
            "a PEM file of at most that size",
        )
    return content


def _check_certificates(file: PemFile, content: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=_text(content))
    except (ValueError, ssl.SSLError) as error:  # ValueError: it is empty
        raise PemError(
            file.option,
            f"{file.path} holds no certificate in PEM",
            "a PEM file of whole certificates",
        ) from error


def _text(content: bytes) -> str:
    """Return a PEM file as text for `ssl`, which takes only ASCII, even in comments."""
    return content.decode("ascii", "backslashreplace")


def _check_pair(certificate: PemFile, key: PemFile, shown: bytes, secret: bytes) -> None:
    try:
        _context(ssl.PROTOCOL_TLS_SERVER, shown, secret)
    except _EncryptedKey:
        raise PemError(
            key.option, f"{key.path} is encrypted", "a key without a passphrase"
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            found = f"{key.path} is not the key of {certificate.path}"
            raise PemError(key.option, found, "that of its first certificate") from error
        if error.reason:  # usually too weak a signature
            found = f"{certificate.path} cannot be used: {_words(error.reason)}"
            raise PemError(
                certificate.option, found, "a certificate that this host's OpenSSL accepts"
            ) from error
        raise PemError(
            key.option,
            f"{key.path} holds no private key in PEM",
            "a PEM file with a whole private key",
        ) from error


def _shown_alone(files: PemFiles, certificate: bytes, key: bytes) -> dict[str, Any]:
    """Return a certificate's content as seen by a peer that trusts it."""
    assert files.certificate
    pem = Pem(certificate=certificate, key=key)
    shown: dict[str, Any] = {}
    for side in files.sides:
        try:
            shown = _show(pem, side, trusted=certificate, is_timeless=True)
        except ssl.SSLError as error:
            raise PemError(
                files.certificate.option,
                f"{files.certificate.path} is not for a {side}: {_reason(error)}",
                f"a certificate that is for a {side}, too",
            ) from error
    return shown


def _hosts(shown: Any) -> tuple[str, ...]:
    """Return the hosts among the names of a decoded certificate, without others such as URIs."""
    names = shown.get("subjectAltName", ())
    return tuple(name for kind, name in names if kind in ("DNS", "IP Address"))


def _show(
    pem: Pem, side: Side, *, trusted: bytes, is_timeless: bool = False, host: str = ""
) -> dict[str, Any]:
    """Show a certificate to a peer, and return the content that the peer reads.

    Args:
        pem: The files to show.
        side: The side that shows it.
        trusted: What the peer trusts, in PEM: an authority, or the certificate itself.
        is_timeless: Whether to ignore the certificate's dates.
        host: A host that a client asks for; empty: any.

    Raises:
        SSLError: The peer does not trust it.
    """
    server = _context(ssl.PROTOCOL_TLS_SERVER, pem.certificate, pem.key)
    client = _context(ssl.PROTOCOL_TLS_CLIENT, pem.certificate, pem.key)
    client.check_hostname = bool(host)
    client.verify_mode = ssl.CERT_NONE if side == "client" else ssl.CERT_REQUIRED
    peer = client if side == "server" else server
    peer.verify_mode = ssl.CERT_REQUIRED
    peer.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | (_NO_CHECK_TIME if is_timeless else 0)
    peer.load_verify_locations(cadata=_text(trusted))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = {
        "client": client.wrap_bio(to_client, to_server, server_hostname=host or None),
        "server": server.wrap_bio(to_server, to_client, server_side=True),
    }
    for _ in range(_ROUNDS):
        for end in ends.values():
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return ends["client" if side == "server" else "server"].getpeercert() or {}


def _context(protocol: int, certificate: bytes, key: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    if certificate:
        with _file_of(certificate) as certificate_path, _file_of(key) as key_path:
            context.load_cert_chain(certificate_path, key_path, password=_refuse_passphrase)
    return context


class _EncryptedKey(Exception):
    """The key has a passphrase."""


def _refuse_passphrase() -> str:
    raise _EncryptedKey  # otherwise OpenSSL asks the terminal


@contextmanager
def _file_of(content: bytes) -> Iterator[str]:
    """Yield the path of a file with checked content: `ssl` reads pairs only from files.

    On Linux the file exists only in memory.
    """
    if not hasattr(os, "memfd_create"):
        with tempfile.NamedTemporaryFile() as file:  # readable only by its owner
            file.write(content)
            file.flush()
            yield file.name
        return
    descriptor = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _reason(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    return _words(error.reason or str(error))


def _words(reason: str) -> str:
    return reason.replace("_", " ").lower()
