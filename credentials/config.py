"""Options of TLS: certificates within the cluster, and those that clients see."""

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from options.kept_by_name import kept_by_name
from options.option import OptionName, WrongOption, WrongOptions, check_options, option
from pagewire.protos.pem import PemFile, PemFiles

SERVER_NAME = "pagewire"
HOST = "{host}"  # in paths
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"


def path_here(path: str) -> str:
    """Return the path of a file on the host of this process, whose name replaces {host}."""
    return path.replace(HOST, socket.gethostname())


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(re.fullmatch(rf"{_LABEL}(?:\.{_LABEL})*", name))


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class TlsConfig:
    """Within the cluster: all of these files or none, read by each process on its own host."""

    certificate_file: str = option(
        "",
        "Certificate of this host's processes, in PEM, with its chain up to the authority. Each "
        "connection between routers, workers and controller is then encrypted, and both sides show "
        "one. Empty: connections are in clear. In this path and the two below, {host} stands for "
        "the name of the host that reads the file, as hostname prints it.",
    )
    key_file: str = option("", "Private key of that certificate, in PEM, without a passphrase.")
    authority_file: str = option(
        "",
        "Authority of all certificates of the cluster, in PEM; two of them during a replacement. "
        "It should certify nothing else.",
    )
    server_name: str = option(
        SERVER_NAME,
        "Name in all certificates of the cluster, whatever the host.",
        accepts=_is_name,
        accepted="a host name, such as pagewire",
    )
    allow_plain_nccl: bool = option(
        False,
        "NCCL encrypts nothing: allow pages to move between GPUs of several hosts in clear.",
    )

    def __post_init__(self) -> None:
        check_options(self)
        _check_whole(self, "certificate_file", "key_file", "authority_file")
        if self.is_on:
            return
        told = "{}: found {!r}; allowed: {!r} without {}, because connections are in clear"
        idle = {"server_name": SERVER_NAME, "allow_plain_nccl": False}
        problems = [
            WrongOption(told, OptionName(name), found, default, OptionName("certificate_file"))
            for name, default in idle.items()
            if (found := getattr(self, name)) != default
        ]
        if problems:
            raise WrongOptions(problems)

    @property
    def is_on(self) -> bool:
        """Whether connections within the cluster are encrypted."""
        return bool(self.certificate_file)

    @property
    def files(self) -> PemFiles:
        """The files for servers and clients; only if TLS is on."""
        return PemFiles(
            certificate=_file("tls", self, "certificate_file"),
            key=_file("tls", self, "key_file"),
            authorities=(_file("tls", self, "authority_file"),),
            sides=("server", "client"),
            is_mutual=True,
            name=PemFile(option="tls.server_name", path=self.server_name),
        )


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class FrontTlsConfig:
    """Between clients and routers, and browsers and HTTP gateways."""

    certificate_file: str = option(
        "",
        "Certificate that routers and HTTP gateways show to clients, in PEM, with its chain up to "
        "the authority. Empty: clients connect in clear. In this path and the two below, {host} "
        "stands for the name of the host where the command runs.",
    )
    key_file: str = option("", "Private key of that certificate, in PEM, without a passphrase.")
    client_authority_file: str = option(
        "",
        "Authority, in PEM, of the certificate that each client must show. Empty: none needed.",
    )

    def __post_init__(self) -> None:
        check_options(self)
        _check_whole(self, "certificate_file", "key_file")
        if self.client_authority_file and not self.certificate_file:
            raise WrongOptions([_incomplete(["certificate_file"], ["client_authority_file"])])

    @property
    def is_on(self) -> bool:
        """Whether clients connect over TLS."""
        return bool(self.certificate_file)

    @property
    def certificate(self) -> PemFile:
        """The certificate, which clients of this host may read; only if it is on."""
        return _file("front_tls", self, "certificate_file")

    def files(self, inside: TlsConfig) -> PemFiles:
        """Return the files of a server; only if it is on.

        Args:
            inside: The options within the cluster, whose processes are clients, too.
        """
        authorities = []
        if self.client_authority_file:
            authorities.append(_file("front_tls", self, "client_authority_file"))
            if inside.is_on:
                authorities.append(_file("tls", inside, "authority_file"))
        return PemFiles(
            certificate=self.certificate,
            key=_file("front_tls", self, "key_file"),
            authorities=tuple(authorities),
            sides=("server",),
        )


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class TlsSettings:
    """The TLS options of a cluster's processes."""

    inside: TlsConfig = field(default_factory=TlsConfig)
    front: FrontTlsConfig = field(default_factory=FrontTlsConfig)
    insecure: bool = False  # whether processes may listen in clear for other hosts


def _file(section: str, config: object, name: str) -> PemFile:
    return PemFile(option=f"{section}.{name}", path=path_here(getattr(config, name)))


def _check_whole(config: object, *names: str) -> None:
    """Refuse some of the files without the others."""
    given = [name for name in names if getattr(config, name)]
    missing = [name for name in names if name not in given]
    if given and missing:
        raise WrongOptions([_incomplete(missing, given)])


def _incomplete(missing: Sequence[str], given: Sequence[str]) -> WrongOption:
    places = [" and ".join("{}" for _ in names) for names in (missing, given)]
    template = "{}: found none; allowed: {}, as {} {} given".format(
        places[0],
        "a file" if len(missing) == 1 else "files",
        places[1],
        "is" if len(given) == 1 else "are",
    )
    return WrongOption(template, *map(OptionName, (*missing, *given)))
