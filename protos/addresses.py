"""How addresses are written: "host:port", with brackets around the colons of IPv6."""


def join_address(host: str, port: int | str) -> str:
    """Return "host:port", or "[host]:port" for an IPv6 host (RFC 3986, 3.2.2)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
