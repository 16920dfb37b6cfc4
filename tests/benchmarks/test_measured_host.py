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
