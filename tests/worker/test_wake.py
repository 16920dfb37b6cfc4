"""A burst lasts from one request until none has come for a moment."""

import asyncio

from tests.support.virtual_time import run_virtual
from worker.wake import BURST_GAP_S, Wake


def test_a_burst_lasts_until_no_request_has_come_for_a_moment() -> None:
    async def scenario() -> None:
        wake = Wake()
        assert not wake.is_in_burst
        wake.set()
        assert not wake.is_in_burst, "a request that ends is none that arrives"
        for _ in range(3):
            wake.set_by_arrival()
            await asyncio.sleep(0.9 * BURST_GAP_S)
            assert wake.is_in_burst
        await asyncio.sleep(0.2 * BURST_GAP_S)
        assert not wake.is_in_burst
        assert wake.is_set()

    run_virtual(scenario())
