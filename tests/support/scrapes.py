"""Reads metrics as Prometheus does."""

import ssl
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return all samples: (name, its labels' values, sorted) |-> value."""
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(address: str, tls: ssl.SSLContext | None = None) -> str:
    """Return what a server tells; raises URLError if it does not answer."""
    url = f"{'https' if tls else 'http'}://{address}/metrics"
    with urllib.request.urlopen(url, timeout=10, context=tls) as answer:
        return str(answer.read().decode())
