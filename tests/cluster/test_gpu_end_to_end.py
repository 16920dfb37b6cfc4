"""The demo on GPUs: Triton attention, pages over NCCL or within one GPU, bfloat16."""

import os
import re
import subprocess
import sys

import pytest

from cluster.devices import count_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def answers():
    """Of all demos so far."""
    return set()


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2), (3, 1)])
def test_demo_moves_pages_between_gpus(prefill, decode, answers):
    """With fewer GPUs than workers, those of a pool share one."""
    num_gpus = count_gpus()
    assert num_gpus, "needs a GPU"
    per_gpu = max(prefill, decode) if num_gpus > 1 else prefill + decode
    per_gpu = 1 if num_gpus >= prefill + decode else per_gpu
    command = [sys.executable, "-m", "cli", "demo", "--device", "cuda"]
    command += ["--prefill", str(prefill), "--decode", str(decode)]
    command += ["--workers-per-gpu", str(per_gpu)]

    wide = os.environ | {"COLUMNS": "240"}  # each answer on one line
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, env=wide)

    assert result.returncode == 0, result.stderr
    assert "workers compute on cuda" in result.stdout
    moved = re.search(r"first wave moved (\d+) pages, the second (\d+)", result.stdout)
    assert int(moved[1]) > int(moved[2])
    waves = re.findall(r"^ \d  \w+ .*\?  .+$", result.stdout, re.MULTILINE)
    assert len(waves) == 16
    assert waves[:8] == waves[8:]
    answers.add(tuple(waves))
    assert len(answers) == 1, "another shape of the cluster gave other answers"
