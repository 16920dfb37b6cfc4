"""When end tokens may be drawn and why a choice ends."""

from typing import Any

import pytest

from llm_engine.drawing import FinishReason, finish_reason, next_draw
from llm_engine.sampling import SamplingParams, choice_seed

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("params", "output", "expected"),
    [
        ({}, [5], None),
        ({}, [0], STOP),
        ({"ignore_eos": True}, [0], None),
        ({"stop_token_ids": (5,)}, [5], STOP),
        ({"stop_token_ids": (5,), "ignore_eos": True}, [5], STOP),
        ({"stop_token_ids": (5,)}, [5, 6], None),
        ({"max_tokens": 2}, [5, 6], LENGTH),
        ({"max_tokens": 2}, [5, 0], STOP),
        ({}, [5] * 6, LENGTH),  # the context ends at 10
    ],
)
def test_finish_reason(
    params: dict[str, Any], output: list[int], expected: FinishReason | None
) -> None:
    reason = finish_reason(
        SamplingParams(**params),
        num_prompt_tokens=4,
        output_token_ids=output,
        eos_token_ids=(0,),
        max_context_tokens=10,
    )
    assert reason is expected


@pytest.mark.parametrize(
    ("params", "output", "banned"),
    [
        ({}, [], ()),
        ({"min_tokens": 2}, [], (0,)),
        ({"min_tokens": 2}, [5], (0,)),
        ({"min_tokens": 2}, [5, 6], ()),
        ({"min_tokens": 2, "stop_token_ids": (7,)}, [5], (7, 0)),
        ({"min_tokens": 2, "stop_token_ids": (7,), "ignore_eos": True}, [5], (7,)),
        ({"min_tokens": 2, "ignore_eos": True}, [5], ()),
    ],
)
def test_end_tokens_are_banned_before_min_tokens(
    params: dict[str, Any], output: list[int], banned: tuple[int, ...]
) -> None:
    draw = next_draw(
        SamplingParams(**params),
        choice=0,
        prompt_token_ids=[1, 2],
        output_token_ids=output,
        eos_token_ids=(0,),
    )
    assert draw.banned_token_ids == banned
    assert draw.position == 2 + len(output)


def test_each_choice_draws_with_its_own_seed() -> None:
    draws = [
        next_draw(
            SamplingParams(seed=9),
            choice=choice,
            prompt_token_ids=[1],
            output_token_ids=[],
            eos_token_ids=(),
        )
        for choice in range(3)
    ]
    assert [draw.seed for draw in draws] == [choice_seed(9, choice) for choice in range(3)]
    assert len({draw.seed for draw in draws}) == 3
