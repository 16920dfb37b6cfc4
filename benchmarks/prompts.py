"""Prompts of random token ids, and the workloads made of them. Pure.

A prompt is a list of segments, each a seed and a length: prompts with equal first segments have
that prefix in common, and whoever has the seeds makes the same tokens.
"""

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

FIRST_TOKEN_ID = 10  # after the special tokens
TRACE_TICK_MS = 3000  # of the Mooncake traces: arrivals are rounded down to it
TRACE_BLOCK_TOKENS = 512  # that share one hash id

# Sums of the offline mix that peers were measured with; how far its lengths spread is not known.
MIX_REQUESTS, MIX_INPUT_TOKENS, MIX_OUTPUT_TOKENS = 512, 502_942, 121_658
MIX_INPUT_SIGMA, MIX_OUTPUT_SIGMA = 0.8, 0.6


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of random tokens."""

    seed: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSpec:
    """One request of a workload."""

    prompt: tuple[Segment, ...]
    max_tokens: int
    offset_s: float = 0.0  # after the beginning of its wave
    keeps_tokens: bool = False  # in its record
    temperature: float = 0.0
    seed: int = 0  # of draws
    traceparent: str = ""  # the caller's span; empty: none
    leaves_after: int = 0  # tokens, after which the client leaves; 0: it reads to the end

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(segment.length for segment in self.prompt)


def token_ids(prompt: Sequence[Segment], vocab_size: int) -> list[int]:
    """Return the tokens of a prompt."""
    ids: list[int] = []
    for segment in prompt:
        source = np.random.default_rng(segment.seed)
        ids += source.integers(FIRST_TOKEN_ID, vocab_size, segment.length).tolist()
    return ids


class Seeds:
    """Hands out seeds that no other prompt of the run has."""

    def __init__(self, first: int) -> None:
        self._next = first

    def segment(self, length: int) -> Segment:
        """Return a run of tokens of its own."""
        self._next += 1
        return Segment(self._next, length)


def wave(
    seeds: Seeds, streams: int, *, unique: int, shared: int = 0, max_tokens: int = 2
) -> list[StreamSpec]:
    """Return requests that come at once: `unique` tokens each, after `shared` ones of all."""
    prefix = (seeds.segment(shared),) if shared else ()
    return [
        StreamSpec(prompt=(*prefix, seeds.segment(unique)), max_tokens=max_tokens)
        for _ in range(streams)
    ]


def mix(seeds: Seeds, *, requests: int, input_tokens: int, output_tokens: int) -> list[StreamSpec]:
    """Return requests of lognormal lengths, all at once, whose tokens sum to what is asked for."""
    source = random.Random(1)  # noqa: S311 - reproducible, nothing secret
    inputs = _lengths(source, requests, input_tokens, MIX_INPUT_SIGMA)
    outputs = _lengths(source, requests, output_tokens, MIX_OUTPUT_SIGMA)
    return [
        StreamSpec(prompt=(seeds.segment(each),), max_tokens=max_tokens)
        for each, max_tokens in zip(inputs, outputs, strict=True)
    ]


def _lengths(source: random.Random, count: int, total: int, sigma: float) -> list[int]:
    """Return lognormal lengths of at least 1 that sum to `total`."""
    draws = [source.lognormvariate(0.0, sigma) for _ in range(count)]
    scale = (total - count) / sum(draws)
    lengths = [1 + int(draw * scale) for draw in draws]
    for index in range(total - sum(lengths)):  # what was rounded off, less than one each
        lengths[index] += 1
    return lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceScale:
    """How much of a trace is replayed, and how fast."""

    seconds: float  # of the trace's own time, from its beginning
    rate: float = 1.0  # 2: twice as many requests per second
    lengths: float = 1.0  # 0.5: prompts and answers half as long

    def __post_init__(self) -> None:
        for name in ("seconds", "rate", "lengths"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class _TraceRow:
    at_ms: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


def read_trace(
    path: Path, scale: TraceScale, *, seed: int, max_context: int
) -> tuple[list[StreamSpec], int]:
    """Return the requests of a Mooncake trace, and how many are left out as too long.

    Each line has `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for each
    block of 512 tokens: equal first ids are equal prefixes. Requests with one timestamp are spread
    evenly over its 3 seconds, or arrivals would be bursts that the traced service never saw.

    Raises:
        ValueError: If a line is not of this format; it names the line.
    """
    specs = []
    too_long = 0
    for _, ticked in groupby(_rows(path, scale.seconds), key=lambda row: row.at_ms):
        rows = list(ticked)
        for index, row in enumerate(rows):
            at_ms = row.at_ms + TRACE_TICK_MS * index / len(rows)
            spec = _from_trace(row, at_ms / 1e3, scale, seed)
            if spec.prompt_tokens + spec.max_tokens > max_context:
                too_long += 1
            else:
                specs.append(spec)
    return specs, too_long


def _rows(path: Path, seconds: float) -> Iterator[_TraceRow]:
    """Yield the rows before a time."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for number, line in enumerate(lines, 1):
            row = _parsed(line, f"{path.name}, line {number}")
            if row.at_ms >= 1e3 * seconds:
                return
            yield row


def _parsed(line: str, where: str) -> _TraceRow:
    try:
        fields = json.loads(line)
        row = _TraceRow(
            at_ms=float(fields["timestamp"]),
            input_tokens=int(fields["input_length"]),
            output_tokens=int(fields["output_length"]),
            hash_ids=tuple(map(int, fields["hash_ids"])),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: no row of a Mooncake trace: {error!r}") from error
    if not row.hash_ids or len(row.hash_ids) != -(-row.input_tokens // TRACE_BLOCK_TOKENS):
        raise ValueError(
            f"{where}: {row.input_tokens} input tokens with {len(row.hash_ids)} hash ids; a block "
            f"has {TRACE_BLOCK_TOKENS} tokens"
        )
    return row


def _from_trace(row: _TraceRow, at_s: float, scale: TraceScale, seed: int) -> StreamSpec:
    def scaled(tokens: int) -> int:
        return max(round(tokens * scale.lengths), 1)

    *full, last = row.hash_ids
    rest = row.input_tokens - TRACE_BLOCK_TOKENS * len(full)
    segments = [Segment(seed + hash_id, scaled(TRACE_BLOCK_TOKENS)) for hash_id in full]
    return StreamSpec(
        prompt=(*segments, Segment(seed + last, scaled(rest))),
        max_tokens=scaled(row.output_tokens),
        offset_s=at_s / scale.rate,
    )
