"""What nvidia-smi says of processes, and which words of a command a result keeps."""

from pathlib import Path

import pytest

from benchmarks import measured_host


def test_gpu_memory_is_summed_by_process_over_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ["10, 300", "11, 500", "10, 40", "12, [N/A]"]
    monkeypatch.setattr(measured_host, "nvidia_smi", lambda *fields, of: rows)
    assert measured_host.gpu_memory_of({10: "a", 12: "b", 13: "c"}) == {"a": 340}


def test_a_result_names_files_without_folders_and_cases_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["program", "--cases", "kill/prefill/during", "hang/*", "--out", f"{tmp_path}/a.json"]
    monkeypatch.setattr("sys.argv", words)
    command = measured_host.conditions("soak", "abc")["command"]
    assert command == "python -m benchmarks.soak --cases kill/prefill/during hang/* --out a.json"


def test_only_gpus_that_cuda_shows_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        """#!/bin/sh
for word; do
  case $word in
    --id=0,3) ids="0 3" ;;
    --id=) exit 6 ;;
  esac
done
for id in ${ids:-0 1 2 3}; do echo "H100 $id, 580.1"; done
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert measured_host.num_gpus() == 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert measured_host.hardware()["gpus"] == ["H100 0", "H100 3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert measured_host.num_gpus() == 0
