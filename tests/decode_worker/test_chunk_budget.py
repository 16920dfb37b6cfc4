"""How prompt chunks adapt to the time that steps take."""

import math
from statistics import median

import pytest

from decode_worker.chunk_budget import ChunkBudget
from llm_engine.engine_api import FULL_SHARE

PAGE = 16
MAX_TOKENS = 2048


class Engine:
    """Steps of a device with a cost for decodes, for a chunk and for each of its tokens."""

    def __init__(
        self, *, decode_s: float, chunk_s: float = 0.0, token_s: float, budget_s: float
    ) -> None:
        self.decode_s, self.chunk_s, self.token_s = decode_s, chunk_s, token_s
        self.budget = ChunkBudget(budget_s=budget_s, min_tokens=PAGE, max_tokens=MAX_TOKENS)

    def step(self, num_tokens: int | None = None, *, decodes: int = 4, stall_s: float = 0) -> float:
        """Compute a step, with as large a chunk as may be; return how long it took."""
        if num_tokens is None:
            num_tokens = self.budget.num_tokens if decodes else MAX_TOKENS
        seconds = stall_s + self.token_s * num_tokens
        seconds += self.decode_s * bool(decodes) + self.chunk_s * bool(num_tokens)
        self.budget.observe(num_decodes=decodes, num_chunk_tokens=num_tokens, seconds=seconds)
        return seconds


@pytest.mark.parametrize("chunk_s", [0.0, 0.004, 0.01])
@pytest.mark.parametrize("token_s", [2e-6, 5e-5, 5e-4])
def test_steps_fill_the_budget_and_hardly_exceed_it(token_s: float, chunk_s: float) -> None:
    engine = Engine(decode_s=0.005, chunk_s=chunk_s, token_s=token_s, budget_s=0.03)
    engine.step(0)

    took = [engine.step() for _ in range(40)]

    assert max(took) < 0.031
    room = min(MAX_TOKENS, (0.03 - 0.005 - chunk_s) / token_s)
    assert engine.budget.num_tokens > 0.9 * room - 1


def test_a_chunk_is_never_smaller_than_a_page_however_slow_the_steps() -> None:
    engine = Engine(decode_s=0.1, token_s=0.01, budget_s=0.03)

    for _ in range(20):
        engine.step(0)
        engine.step()

    assert engine.budget.num_tokens == PAGE


def test_where_decodes_fill_the_budget_prompts_still_get_a_third_of_each_step() -> None:
    engine = Engine(decode_s=0.1, token_s=5e-4, budget_s=0.03)

    for _ in range(20):
        engine.step(0)
        engine.step()

    assert 90 <= engine.budget.num_tokens <= 100


@pytest.mark.parametrize("before_s", [0.0, 0.005, 0.1])
def test_the_third_follows_the_decodes_while_all_steps_have_prompts(before_s: float) -> None:
    engine = Engine(decode_s=before_s, token_s=5e-4, budget_s=0.03)
    if before_s:
        engine.step(0)
    for _ in range(20):
        engine.step()

    for percent in range(100):  # a batch grows or shrinks
        engine.decode_s = before_s + (0.04 - before_s) * percent / 100
        engine.step()
    took = [engine.step() for _ in range(200)]

    assert 0.055 < median(took) < 0.065
    assert sum(each < 0.041 for each in took) < 0.1 * len(took), "hardly any goes without prompts"


def test_one_stalled_step_costs_little() -> None:
    engine = Engine(decode_s=0.005, token_s=5e-5, budget_s=0.03)
    for _ in range(20):
        engine.step()
    before = engine.budget.num_tokens

    engine.step(stall_s=1.5)

    assert engine.budget.num_tokens >= before // 2
    for _ in range(3):
        engine.step()
    assert engine.budget.num_tokens > 0.9 * before


def test_one_stalled_step_without_a_chunk_costs_little_though_all_later_ones_have_chunks() -> None:
    engine = Engine(decode_s=0.005, token_s=5e-5, budget_s=0.03)
    for _ in range(20):
        engine.step()
    before = engine.budget.num_tokens

    engine.step(0, stall_s=0.1)

    for _ in range(5):
        engine.step()
    assert engine.budget.num_tokens > 0.9 * before
    assert engine.step() < 0.033


def test_the_short_end_of_a_prompt_tells_nothing() -> None:
    engine = Engine(decode_s=0.005, chunk_s=0.01, token_s=5e-5, budget_s=0.03)
    for _ in range(20):
        engine.step()
    before = engine.budget.num_tokens

    engine.step(1)

    assert engine.budget.num_tokens == before


@pytest.mark.parametrize("room", [21.4, 85.4, 256.4])
def test_the_smallest_full_pass_shows_that_more_would_fit(room: float) -> None:
    engine = Engine(decode_s=0.005, token_s=0.025 / room, budget_s=0.03)

    def smallest_full_pass() -> int:
        return math.ceil(FULL_SHARE * engine.budget.num_tokens)

    engine.step(0)
    for _ in range(20):
        engine.step(smallest_full_pass())
    assert engine.budget.num_tokens == int(room)

    engine.token_s /= 4
    for _ in range(20):
        engine.step(smallest_full_pass())

    assert engine.budget.num_tokens >= 4 * int(room)


def test_more_decodes_leave_less() -> None:
    engine = Engine(decode_s=0.005, token_s=5e-5, budget_s=0.03)
    for _ in range(20):
        engine.step()

    engine.decode_s = 0.02
    engine.step(0)
    for _ in range(20):
        engine.step()

    assert engine.step() < 0.031
    assert engine.budget.num_tokens == pytest.approx(0.01 / 5e-5, rel=0.1)


def test_steps_that_only_prefill_teach_what_the_first_shared_one_may_hold() -> None:
    engine = Engine(decode_s=0.005, token_s=5e-5, budget_s=0.03)

    for _ in range(8):
        engine.step(decodes=0)

    assert engine.budget.num_tokens > 400
    assert engine.step() < 0.036


def test_without_a_budget_tokens_alone_are_the_limit() -> None:
    engine = Engine(decode_s=0.005, token_s=0.01, budget_s=0.0)

    engine.step()

    assert engine.budget.num_tokens == MAX_TOKENS
