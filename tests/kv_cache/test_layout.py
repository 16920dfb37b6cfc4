from dataclasses import replace

import pytest

from kv_cache.layout import KVLayout, num_pages_for

LAYOUT = KVLayout(
    num_layers=32,
    num_kv_heads=8,
    page_size=64,
    head_dim=128,
    dtype="bfloat16",
    model_fingerprint="m",
)


def test_a_page_of_llama_3_8b_is_8_mib() -> None:
    assert LAYOUT.page_bytes == 8 << 20
    assert LAYOUT.page_shape == (32, 2, 8, 64, 128)


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 31},
        {"num_kv_heads": 4},
        {"page_size": 32},
        {"head_dim": 64},
        {"dtype": "float16"},
        {"model_fingerprint": "n"},
    ],
)
def test_descriptions_differ_when_any_field_does(change: dict[str, object]) -> None:
    assert replace(LAYOUT, **change).describe() != LAYOUT.describe()  # type: ignore[arg-type]


def test_bad_fields_are_named() -> None:
    with pytest.raises(ValueError, match="page_size is 0, must be at least 1"):
        replace(LAYOUT, page_size=0)
    with pytest.raises(ValueError, match="dtype 'int4' is not one of"):
        replace(LAYOUT, dtype="int4")


def test_num_pages_rounds_up() -> None:
    assert [num_pages_for(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
