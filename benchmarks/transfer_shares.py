"""What first and second tokens say about transfers; see benchmarks.disaggregation for the cases."""

from collections.abc import Mapping

from benchmarks.stream_statistics import Row

LENGTHS = (0, 1024, 2048, 4096, 8192, 16_384, 32_768)  # tokens; 0: a page


def transfer_shares(rows: Mapping[str, Row]) -> list[Row]:
    """Return the figures derived from measured transfers; see benchmarks.disaggregation."""

    def row(kind: str, length: int) -> Row | None:
        return rows.get(transfer_case(kind, length))

    found = []
    page = row("again", 0)
    for length in LENGTHS[1:]:
        again = row("again", length)
        if page is None or again is None or again["second_ms"] <= page["second_ms"]:
            continue  # noise hides it
        moving_ms = again["second_ms"] - page["second_ms"]
        per_repeat = (again["bytes_moved"] - page["bytes_moved"]) / again["repeats"]
        found.append(
            {
                "case": f"transfer/scattered@{length}",
                "ms": round(moving_ms, 3),
                "gb_per_s": round(per_repeat / moving_ms / 1e6, 2),
                "from": [again["case"], page["case"]],
            }
        )
        sources = [row(kind, each) for each in (length, 0) for kind in ("new", "aggregated")]
        present = [each for each in sources if each]
        if len(present) < len(sources):
            continue
        new, alone, new_page, page_alone = present
        later_ms = new["ms"] - alone["ms"]
        exposed_ms = _after_first_ms(new) - _after_first_ms(alone)
        of_page_ms = _after_first_ms(new_page) - _after_first_ms(page_alone)
        found.append(
            {
                "case": f"transfer/ttft_share@{length}",
                "ms": round(later_ms, 3),
                "share": round(later_ms / new["ms"], 4),
                "hidden_share": round(1 - (exposed_ms - of_page_ms) / moving_ms, 4),
                **_counted(new),
                "from": [each["case"] for each in (*present, again, page)],
            }
        )
    return found


def _counted(new: Row) -> Row:
    if not new.get("receive_ms"):
        return {}  # of an older file, or too short for the worker's clock
    return {"hidden_share_counted": round(1 - new["exposed_ms"] / new["receive_ms"], 4)}


def _after_first_ms(row: Row) -> float:
    return float(row["second_ms"] - row["ms"])


def transfer_case(kind: str, length: int) -> str:
    """Return the name of a case of transfers; of length 0: of a page."""
    return f"transfer/{kind}@{length or 'page'}"
