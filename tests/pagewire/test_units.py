import pytest

from pagewire.cli.units import format_bytes, format_count


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**30, "5.0 GiB"), (2**41, "2.0 TiB")],
)
def test_sizes_are_written_for_people(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0"), (999, "999"), (1000, "1.0k"), (9949, "9.9k"), (9950, "10k"), (65536, "66k")),
        *((999_499, "999k"), (999_500, "1.0M"), (999_999_999, "1.0G"), (10**15, "1000T")),
    ],
)
def test_counts_for_people_are_short(count, text):
    assert format_count(count) == text
