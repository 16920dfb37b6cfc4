"""That damaged pages are really damaged, found and never read, over real sockets and engines."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks import corruption
from benchmarks.corruption import PAGES, Count, measure
from benchmarks.damaging_sender import NoTransport
from benchmarks.page_damage import KINDS, Damage, damaged
from tests.support.planted_bugs import no_digest_check

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FEW = 100


def pages(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (6, 512), dtype=np.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_damage_makes_its_places_wrong_and_no_other(kind: str) -> None:
    right, stale = pages(1), pages(2)
    places = (4, 1)[: KINDS[kind][1]]

    for seed in range(50):
        arrives = damaged(right, [Damage(kind=kind, places=places)], stale=stale, seed=seed)

        wrong = np.flatnonzero((arrives != right).any(axis=1))
        assert wrong.tolist() == sorted(places)


def test_damage_that_changes_nothing_is_no_damage() -> None:
    right = pages(1)

    with pytest.raises(ValueError, match=r"pages \[\] of the chunk are wrong, not \[2\]"):
        damaged(right, [Damage(kind="stale", places=(2,))], stale=right, seed=1)


def test_every_damaged_page_is_found_and_none_is_read() -> None:
    count, over = measure(FEW)

    assert over["transport"] == "tcp"
    assert count.missed == []
    assert set(count.injected) == set(KINDS)
    assert count.found == count.injected
    assert count.injected.total() >= FEW
    assert count.whole_transfers > count.failed_whole_transfers == 0
    assert count.wrong_commits == 0
    assert count.tokens > count.wrong_tokens == 0


def test_a_result_names_all_gpus_although_the_receiver_sees_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def sees_one(*_args: object, **_options: object) -> tuple[Count, dict[str, object]]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        return Count(), {}

    def conditions(*_args: object) -> dict[str, object]:
        return {"hardware": {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")}}

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(corruption, "measure", sees_one)
    monkeypatch.setattr(corruption, "conditions", conditions)
    out = tmp_path / "corruption.json"
    monkeypatch.setattr("sys.argv", ["corruption", "--out", str(out)])

    corruption.main()

    assert json.loads(out.read_text())["hardware"]["gpus"] == ["0", "1"]


@pytest.mark.thorough
def test_without_digests_damage_would_be_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    no_digest_check(monkeypatch)

    count, _ = measure(FEW)

    assert count.found.total() == 0
    assert count.wrong_commits >= FEW
    assert len(count.missed) == count.transfers


def test_a_transport_that_a_device_lacks_is_refused_by_name() -> None:
    with pytest.raises(NoTransport, match="cpu has no transport 'nccl', only tcp"):
        measure(1, transport="nccl")


def test_a_result_has_a_row_for_each_kind_and_their_sum() -> None:
    count = Count()
    count.injected["bit"] += 3
    count.found["bit"] += 2

    *kinds, total = count.rows()

    assert [row["case"] for row in kinds] == list(KINDS)
    assert (kinds[0]["pages"], kinds[0]["found"]) == (3, 2)
    assert (total["pages"], total["found"]) == (3, 2)


@pytest.mark.parametrize(
    "path", sorted(RESULTS.glob("corruption-*.json")), ids=lambda path: path.stem
)
def test_what_is_published_is_enough_and_was_all_found(path: Path) -> None:
    *kinds, total = json.loads(path.read_text(encoding="utf-8"))["cases"]

    assert {row["case"] for row in kinds} == set(KINDS)
    for row in kinds:
        assert row["found"] == row["pages"] > PAGES / len(KINDS) / 2
    assert total["found"] == total["pages"] >= PAGES
    assert total["wrong_commits"] == total["wrong_tokens"] == total["failed_whole_transfers"] == 0
    assert total["tokens"] > 0
    assert total["missed"] == []
