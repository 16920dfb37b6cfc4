"""Authorities of the tests, and certificates from them as files."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import trustme

from credentials.config import HOST, SERVER_NAME, FrontTlsConfig, TlsConfig, TlsSettings


class Pair(NamedTuple):
    """Paths of a certificate and its key."""

    certificate_file: str
    key_file: str


class Authority:
    """An authority; `file` is its own certificate."""

    def __init__(
        self, folder: Path, name: str = "authority", root: "Authority | None" = None
    ) -> None:
        self._folder = folder
        self._name = name
        self._ca = root._ca.create_child_ca() if root else trustme.CA()
        self._num_pairs = 0
        self.file = str(folder / f"{name}.pem")
        self._ca.cert_pem.write_to_path(self.file)

    def pair(
        self, *names: str, days: tuple[float, float] = (-1, 30), replaces: Pair | None = None
    ) -> Pair:
        """Issue a certificate for hosts.

        Args:
            names: Names of the hosts.
            days: First and last day of its validity, counted from now.
            replaces: The pair whose files to overwrite, both at once, as a renewal should.
        """
        now = datetime.now(UTC)
        issued = self._ca.issue_cert(
            *names,
            not_before=now + timedelta(days=days[0]),
            not_after=now + timedelta(days=days[1]),
        )
        self._num_pairs += 1
        stem = self._folder / f"{self._name}-{self._num_pairs}"
        pair = replaces or Pair(f"{stem}.crt", f"{stem}.key")
        certificate = b"".join(each.bytes() for each in issued.cert_chain_pems)
        for path, content in zip(pair, (certificate, issued.private_key_pem.bytes()), strict=True):
            scratch = Path(f"{path}.new")
            scratch.write_bytes(content)
            scratch.chmod(0o600)  # as keys should be
            os.replace(scratch, path)
        return pair

    def inside(self, pair: Pair | None = None) -> TlsConfig:
        """Return the TLS options of a process in a cluster with this authority."""
        pair = pair or self.pair(SERVER_NAME)
        return TlsConfig(authority_file=self.file, **pair._asdict())

    def inside_by_host(self, *hosts: str) -> TlsConfig:
        """Give each host a certificate of its own, at a path with its name; return the options."""

        def pair_of(host: str) -> Pair:
            stem = self._folder / f"{self._name}-{host}"
            return Pair(f"{stem}.crt", f"{stem}.key")

        for host in hosts:
            self.pair(SERVER_NAME, replaces=pair_of(host))
        return self.inside(pair_of(HOST))

    def settings(self, *, asks_clients: bool = False) -> TlsSettings:
        """Return TLS everywhere, for clients that expect localhost or 127.0.0.1."""
        front = FrontTlsConfig(
            **self.pair("localhost", "127.0.0.1")._asdict(),
            client_authority_file=self.file if asks_clients else "",
        )
        return TlsSettings(inside=self.inside(), front=front)
