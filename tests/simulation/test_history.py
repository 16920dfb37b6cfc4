"""The checker finds every kind of wrong history: a checker that never fails proves nothing."""

from dataclasses import replace

import pytest

from llm_engine.drawing import FinishReason
from llm_engine.sampling import SamplingParams
from pagewire.protos import common_pb2, inference_pb2
from tests.support.fake_engine import FakeModel
from tests.support.history import Delta, RequestHistory, check_history
from tests.support.oracle import RequestSpec, expected_choices

MODEL = FakeModel(vocab_size=100, eos_token_ids=(0,))
SPEC = RequestSpec(
    name="r0",
    prompt=(5, 6, 7),
    n=2,
    params=SamplingParams(seed=3, max_tokens=4, ignore_eos=True),
)
EXPECTED = expected_choices(SPEC, model=MODEL, max_context_tokens=50)


def _right_history() -> RequestHistory:
    """Two choices, interleaved, two tokens a message."""
    deltas = []
    for first_index in (0, 2):
        for choice, answer in enumerate(EXPECTED):
            deltas.append(
                Delta(
                    at=float(first_index),
                    request_id="id",
                    choice=choice,
                    first_index=first_index,
                    tokens=answer.tokens[first_index : first_index + 2],
                    finish_reason=FinishReason.LENGTH if first_index == 2 else None,
                )
            )
    usage = inference_pb2.Usage(
        prompt_tokens=3,
        completion_tokens=8,
        stats=common_pb2.RequestStats(resumptions=1, prefill_computed_tokens=3),
    )
    deltas[-1] = replace(deltas[-1], usage=usage)
    return RequestHistory(spec=SPEC, deltas=deltas, ends=["OK"])


def test_a_right_history_has_no_violations() -> None:
    assert check_history(_right_history(), EXPECTED) == []


@pytest.mark.parametrize(
    ("index", "change", "violation"),
    [
        (2, {"first_index": 3}, "index 3 came where 2 was due"),
        (2, {"first_index": 0}, "index 0 came where 2 was due"),
        (0, {"tokens": (EXPECTED[0].tokens[0], 99)}, "token 1 of 4 is wrong"),
        (0, {"finish_reason": FinishReason.LENGTH}, "came after the end"),
        (2, {"finish_reason": FinishReason.STOP}, "finished by"),
        (2, {"finish_reason": None}, "never finished"),
        (1, {"choice": 7}, "choice 7 was not asked for"),
        (1, {"request_id": "other"}, "several request ids"),
        (1, {"usage": inference_pb2.Usage()}, "usage came before"),
        (3, {"usage": None}, "no usage"),
        (3, {"usage": inference_pb2.Usage(prompt_tokens=3)}, "usage counts"),
        (3, {"usage": inference_pb2.Usage()}, "nothing was computed"),
    ],
)
def test_a_changed_message_is_a_violation(
    index: int, change: dict[str, object], violation: str
) -> None:
    history = _right_history()
    history.deltas[index] = replace(history.deltas[index], **change)

    assert violation in " ".join(check_history(history, EXPECTED))


def test_a_lost_a_repeated_and_a_late_message_are_violations() -> None:
    for rearrange in (
        lambda deltas: deltas[1:],
        lambda deltas: [deltas[0], *deltas],
        lambda deltas: [deltas[2], deltas[1], deltas[0], deltas[3]],
    ):
        history = _right_history()
        history.deltas = rearrange(history.deltas)
        assert check_history(history, EXPECTED)


def test_a_request_ends_once_and_as_allowed() -> None:
    history = _right_history()
    for ends in ([], ["OK", "OK"], ["UNAVAILABLE"]):
        history.ends = ends
        assert check_history(history, EXPECTED)

    history.ends = ["UNAVAILABLE"]
    assert check_history(history, EXPECTED, allowed_ends=("OK", "UNAVAILABLE")) == []
    history.spec = replace(SPEC, cancels_after_s=1.0)
    history.ends = ["CANCELLED"]
    assert check_history(history, EXPECTED) == []


def test_too_many_resumptions_are_a_violation() -> None:
    history = _right_history()

    assert "1 resumptions" in check_history(history, EXPECTED, max_resumptions=0)[0]
