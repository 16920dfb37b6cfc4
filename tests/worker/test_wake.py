"""A burst lasts from one request until none has come for a moment."""

import asyncio

import pytest

from tests.support.virtual_time import run_virtual
from worker.wake import NEXT_CALL_S, NEXT_MESSAGE_S, SEVERAL, Wake


@pytest.mark.parametrize(("num_together", "gap_s"), [(1, NEXT_CALL_S), (SEVERAL, NEXT_MESSAGE_S)])
def test_a_burst_lasts_until_no_request_has_come_for_a_moment(
    num_together: int, gap_s: float
) -> None:
    async def scenario() -> None:
        wake = Wake()
        assert not wake.is_in_burst
        wake.set()
        assert not wake.is_in_burst, "a request that ends is none that arrives"
        for _ in range(3):
            await asyncio.sleep(NEXT_CALL_S)
            for _ in range(num_together):
                wake.set_by_arrival()
            await asyncio.sleep(0.9 * gap_s)
            assert wake.is_in_burst
        await asyncio.sleep(0.2 * gap_s)
        assert not wake.is_in_burst
        assert wake.is_set()

    run_virtual(scenario())
