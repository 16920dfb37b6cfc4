"""That workloads have the tokens they should, shared where they should be."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.prompts import Seeds, Segment, TraceScale, mix, read_trace, token_ids, wave

VOCAB = 500


def trace(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(at_ms: int, tokens: int, hash_ids: list[int], output: int = 10) -> dict[str, Any]:
    return {
        "timestamp": at_ms,
        "input_length": tokens,
        "output_length": output,
        "hash_ids": hash_ids,
    }


def test_equal_segments_are_equal_tokens_and_others_are_not() -> None:
    one, two = wave(Seeds(0), 2, shared=40, unique=20)
    first, second = token_ids(one.prompt, VOCAB), token_ids(two.prompt, VOCAB)

    assert len(first) == len(second) == one.prompt_tokens == 60
    assert first[:40] == second[:40]
    assert first[40:] != second[40:]
    assert token_ids(one.prompt, VOCAB) == first
    assert all(10 <= each < VOCAB for each in first)


def test_no_two_waves_share_a_token_run() -> None:
    seeds = Seeds(0)
    waves = [*wave(seeds, 3, unique=5), *wave(seeds, 3, shared=5, unique=5)]
    seen = [segment.seed for spec in waves for segment in spec.prompt]

    assert len(set(seen)) == len(seen) - 2  # three of them have one prefix


def test_a_mix_has_exactly_the_tokens_asked_for_in_unequal_lengths() -> None:
    specs = mix(Seeds(0), requests=512, input_tokens=502_942, output_tokens=121_658)
    inputs = sorted(spec.prompt_tokens for spec in specs)

    assert sum(inputs) == 502_942
    assert sum(spec.max_tokens for spec in specs) == 121_658
    assert inputs[0] >= 1
    assert (
        inputs[256] < 502_942 / 512 < inputs[-1] / 4
    )  # the median of a lognormal is below its mean
    again = mix(Seeds(9), requests=512, input_tokens=502_942, output_tokens=121_658)
    assert sorted(spec.prompt_tokens for spec in again) == inputs


def test_a_trace_becomes_requests_that_share_blocks(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        row(0, 1100, [0, 1, 2], output=7),
        row(0, 600, [0, 3]),
        row(3000, 512, [0]),
        row(6000, 512, [0]),
    )

    specs, too_long = read_trace(path, TraceScale(seconds=6), seed=100, max_context=4096)

    assert too_long == 0
    assert [spec.prompt for spec in specs] == [
        (Segment(100, 512), Segment(101, 512), Segment(102, 76)),
        (Segment(100, 512), Segment(103, 88)),
        (Segment(100, 512),),
    ]
    assert [spec.max_tokens for spec in specs] == [7, 10, 10]
    # The two of the first tick are spread over its 3 seconds.
    assert [spec.offset_s for spec in specs] == [0.0, 1.5, 3.0]


def test_a_trace_is_scaled_and_what_is_too_long_left_out(tmp_path: Path) -> None:
    path = trace(tmp_path, row(3000, 1024, [0, 1], output=100), row(3000, 51_200, list(range(100))))
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))

    scale = TraceScale(seconds=60, rate=2.0, lengths=0.25)
    specs, too_long = read_trace(packed, scale, seed=0, max_context=4096)

    assert too_long == 1
    (spec,) = specs
    assert spec.prompt == (Segment(0, 128), Segment(1, 128))
    assert spec.max_tokens == 25
    assert spec.offset_s == 1.5


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{}", "line 2: no row of a Mooncake trace"),
        ("[1, 2]", "line 2: no row"),
        ("nothing", "line 2: no row"),
        (json.dumps(row(0, 1024, [5])), "line 2: 1024 input tokens with 1 hash ids"),
        (json.dumps(row(0, 0, [])), "line 2: 0 input tokens with 0 hash ids"),
    ],
)
def test_a_line_of_another_format_is_refused_by_number(
    line: str, words: str, tmp_path: Path
) -> None:
    path = trace(tmp_path, row(0, 512, [0]))
    path.write_text(path.read_text() + line + "\n")

    with pytest.raises(ValueError, match=words):
        read_trace(path, TraceScale(seconds=60), seed=0, max_context=4096)


def test_a_scale_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="rate is 0"):
        TraceScale(seconds=1, rate=0)
