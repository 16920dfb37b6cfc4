"""Formats sizes, counts and positions of bytes for people."""


def format_bytes(num_bytes: int) -> str:
    """Return a size in at most eight characters: 1536 is 1.5 KiB."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1023.5:
            is_whole = unit == "B" or size >= 99.95
            return f"{size:.0f} {unit}" if is_whole else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_count(count: int) -> str:
    """Return a count in at most four characters: 1536 is 1.5k, 65536 is 66k."""
    if count < 1000:
        return str(count)
    size = float(count)
    for unit in ("k", "M", "G"):
        size /= 1000
        if size < 9.95:
            return f"{size:.1f}{unit}"
        if size < 999.5:
            return f"{size:.0f}{unit}"
    return f"{size / 1000:.0f}T"


def format_rate(per_s: float) -> str:
    """Return a rate in at most four characters: 0.25 is 0.2, 1536.2 is 1.5k."""
    return f"{per_s:.1f}" if 0 < per_s < 9.95 else format_count(round(per_s))


def invalid_byte(error: UnicodeDecodeError, offset: int = 0) -> str:
    """Name the byte that is invalid in UTF-8: byte 0xe9 at offset 3.

    Args:
        error: The error of the decoding.
        offset: The offset of the decoded bytes.
    """
    return f"byte 0x{error.object[error.start]:02x} at offset {offset + error.start}"
