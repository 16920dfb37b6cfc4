"""Addresses: "host:port", with brackets around IPv6 hosts, and whether other hosts reach them."""

import ipaddress


def join_address(host: str, port: int | str) -> str:
    """Return "host:port", or "[host]:port" for an IPv6 host (RFC 3986, 3.2.2)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return host, without brackets, and port of an address that `join_address` makes."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this host can reach an address."""
    address = ipaddress.ip_address(host.partition("%")[0])  # without its zone
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
