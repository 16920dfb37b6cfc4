"""Which cases benchmarks.kernels runs, and that each kind runs on the pool that its name says."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import attention_cases, kernels
from benchmarks.attention_cases import run_cascade, run_decode, run_prefill
from benchmarks.bench import FP8_SCALE, Timing
from benchmarks.cascade_cases import Forest
from benchmarks.kernels import prefixes_of, run_cases
from tests.benchmarks.rehearsal import Rehearsal
from tests.support.triton_interpreter import interpreted

FP8 = torch.float8_e4m3fn
NAMES = [name for name, _ in attention_cases.attention_cases()]


class Unlaunched(Rehearsal):
    """Launches nothing."""

    def time(
        self, case: str, launch: Callable[[], object], *, also_with_clean_l2: bool = False
    ) -> Timing:
        return Timing(case=case, us=2.0, max_us=3.0)


def test_draws_and_copies_are_told_in_bytes_per_second():
    prefixes = ("sampling/", "gather/", "scatter/", "copy/")
    with interpreted():
        first, *timings = run_cases(Unlaunched(), prefixes, page_size=16)

    assert (first.case, first.tbps) == ("launch/empty", 4 / 2.0 / 1e6)
    assert {each.case.split("/")[0] + "/" for each in timings} == set(prefixes)
    rates = {each.case: each.tbps for each in timings}
    assert rates["sampling/topk_topp/32"] == pytest.approx(32 * 128_256 * 4 / 2.0 / 1e6)
    for case in ("gather/64x2MiB@host", "scatter/64x2MiB@host", "copy/64x2MiB@from-host"):
        assert rates[case] == rates["copy/64x2MiB@host"] == 64 * 2**21 / 2.0 / 1e6
    assert None not in rates.values()


def test_the_committed_file_has_every_case_with_a_time_and_a_rate():
    results = Path(kernels.__file__).parent / "results" / "kernels-h200.json"
    rows = {row["case"]: row for row in json.loads(results.read_text())}

    assert set(NAMES) <= set(rows)
    for row in rows.values():
        assert row["us"] > 0
        assert ("tbps" in row) != ("tflops" in row)


def test_no_two_cases_have_one_name():
    assert len(NAMES) == len(set(NAMES))


def test_each_decode_case_is_followed_by_its_read_in_both_dtypes():
    decodes = [name for name in NAMES if name.startswith("decode/") and "@compact" not in name]

    all_cases = attention_cases.DECODE_CASES | attention_cases.RAGGED_CASES
    assert len(decodes) == 2 * len(all_cases)
    for name in decodes:
        assert NAMES[NAMES.index(name) + 1] == name.replace("decode/", "read/")


def test_each_attention_case_stands_beside_the_same_in_fp8():
    attention = ("decode/", "read/", "cascade/", "prefill/")
    variants = ("@fp8", "@compact", "@inexact", "@sustained")
    plain = [name for name in NAMES if name.startswith(attention) and not name.endswith(variants)]

    assert len(plain) > 60
    assert {name for name in NAMES if name.endswith("@fp8")} == {f"{name}@fp8" for name in plain}


def test_cases_are_chosen_by_several_prefixes():
    prefixes = prefixes_of("read/skew, prefill/8x,cascade/edge/4,512")

    assert [name for name in NAMES if name.startswith(prefixes)] == [
        "read/skew",
        "read/skew@fp8",
        "read/skew4",
        "read/skew4@fp8",
        "cascade/edge/4,512,4096",
        "cascade/edge/4,512,4096@fp8",
        "prefill/8x512@4096",
        "prefill/8x512@4096@compact",
        "prefill/8x512@4096@sustained",
        "prefill/8x512@4096@fp8",
    ]


def test_nothing_given_chooses_all_cases():
    assert all(name.startswith(prefixes_of("")) for name in NAMES)


def test_fp8_memory_holds_the_values_of_bfloat16_divided_by_the_scale():
    bench = Rehearsal()

    values = bench.fp8_memory.float() * FP8_SCALE

    assert bench.fp8_memory.dtype == FP8
    assert values.isfinite().all()
    # Half of the last of four bits, and of the smallest step
    torch.testing.assert_close(values, bench.memory.float(), rtol=2**-4, atol=2**-10 * FP8_SCALE)


# Of keys and values in e4m3, relative to the output (rms): tests/attn_kernels/test_fp8.py
FP8_ERROR = 0.05


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


def test_decode_on_fp8_differs_from_bfloat16_by_its_rounding_alone():
    bench = Rehearsal()
    outs = []
    for dtype in (torch.bfloat16, FP8):
        torch.manual_seed(0)
        with interpreted():
            (row,) = run_decode("decode/a", [20, 7], bench, 16, dtype=dtype)
        outs.append(bench.outs[-1].float())
        token_bytes = 4096 if dtype == torch.bfloat16 else 2048
        assert row.tbps == 27 * token_bytes / 2.0 / 1e6
        assert row.clean_us == row.plan_us == 1.0

    assert 0 < relative_error(outs[1], outs[0]) < FP8_ERROR


def test_prefill_on_fp8_differs_from_bfloat16_by_its_rounding_alone():
    bench = Rehearsal()
    outs = []
    for dtype in (torch.bfloat16, FP8):
        torch.manual_seed(0)
        with interpreted():
            (row,) = run_prefill("prefill/a", [(3, 20)], bench, 16, dtype=dtype)
        outs.append(bench.outs[-1].float())
        assert row.tflops is not None

    assert 0 < relative_error(outs[1], outs[0]) < FP8_ERROR


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_a_cascade_row_says_how_it_compares_with_flat(dtype: torch.dtype):
    bench = Rehearsal()
    forest = Forest(nodes=[(-1, 32)], requests=[(0, 5)] * 2)

    with interpreted():
        cascade, flat = run_cascade("cascade/a", forest, bench, 16, dtype=dtype)

    assert cascade.vs_flat == 1.0
    assert flat.vs_flat is None
    assert flat.case == "cascade/a@flat"
    assert torch.equal(*bench.outs)
