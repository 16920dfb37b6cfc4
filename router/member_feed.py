"""Follows the membership that the cluster's controller publishes.

The stream is reopened whenever it breaks or is silent, and it begins with all members. Until then
the router uses the members that it knows. A restarted controller has another incarnation: the first
call learns it, and the next one names it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc

from credentials.channel import ProvenChannel, told_incarnation
from observability.logs import fields
from pagewire.failures import speaks_no_grpc
from pagewire.protos.call_tasks import is_own_cancellation
from router import wire
from router.errors import ControllerGone
from router.lost_reason import lost_reason
from router.membership import WorkerMember
from router.reported_wait import wait_reported

logger = logging.getLogger(__name__)

SILENT_S = 6.0  # of a controller that sends all members once a second
RETRY_S = 0.5
START_S = 15.0  # a controller that still places processes answers late, and is not lost
UNKNOWN_INCARNATION = 0
# What no wait cures, in the words of `pagewire router`: in Ray, a router is given the right ones.
_NO_CONTROLLER = (
    "--controller: found a router or another server; allowed: the address of the cluster's "
    "controller, see controller_port"
)
_ADVICE = {
    grpc.StatusCode.UNIMPLEMENTED: _NO_CONTROLLER,
    grpc.StatusCode.UNAUTHENTICATED: "--keys: found keys that it does not accept; allowed: keys of "
    "its cluster, which `pagewire router-keys` writes",
}


class MemberFeed:
    """Keeps a router's members up to date.

    Args:
        router_id: For the controller's log.
        find_controller: Returns its address; raises ControllerGone.
        connect_controller: Makes a channel to an address, for one incarnation.
        take: Called with all members, whenever they change.
    """

    def __init__(
        self,
        *,
        router_id: str,
        find_controller: Callable[[], Awaitable[str]],
        connect_controller: Callable[[str, int], ProvenChannel],
        take: Callable[[Sequence[WorkerMember]], Awaitable[None]],
    ) -> None:
        self._router_id = router_id
        self._find_controller = find_controller
        self._connect_controller = connect_controller
        self._take = take
        self._incarnation = UNKNOWN_INCARNATION
        self._reason = "no answer yet"  # or why the last attempt failed; empty: it answers
        self._logged_reason = ""  # of the present loss; empty: none is logged
        self._followed = asyncio.Event()  # set once the controller has sent the members

    @property
    def silence(self) -> str:
        """Why nothing is heard from the controller; empty: it is heard."""
        return self._reason

    async def run(self) -> None:
        """Follow until cancelled."""
        self._late_at = asyncio.get_running_loop().time() + START_S
        while True:
            try:
                await self._follow()
            except Exception as error:
                if is_own_cancellation():  # gRPC may raise the end of the call instead
                    raise asyncio.CancelledError from error
                if not isinstance(error, grpc.aio.AioRpcError | ControllerGone | OSError):
                    logger.exception("member_feed_failed", extra=fields(router_id=self._router_id))
                told = told_incarnation(error) if isinstance(error, grpc.aio.AioRpcError) else None
                if told is not None and self._incarnation == UNKNOWN_INCARNATION:
                    self._incarnation = told
                    continue
                self._incarnation = UNKNOWN_INCARNATION if told is None else told
                self._note_lost(_reason(error))
            except asyncio.CancelledError:
                if is_own_cancellation():
                    raise
                # gRPC cancels calls whose channel breaks in certain moments.
            await asyncio.sleep(RETRY_S)

    async def wait_followed(self, waits: Callable[[str], None]) -> None:
        """Wait until the controller has sent its members, even none; see wait_reported."""
        await wait_reported(self._followed, lambda: self._reason, waits)

    def _note_lost(self, reason: str) -> None:
        self._reason = reason
        if not self._followed.is_set() and asyncio.get_running_loop().time() < self._late_at:
            return
        if reason != self._logged_reason:  # once for each reason, not for each attempt
            logger.warning(
                "controller_lost", extra=fields(router_id=self._router_id, reason=reason)
            )
        self._logged_reason = reason

    async def _follow(self) -> None:
        address = await self._find_controller()
        channel = self._connect_controller(address, self._incarnation)
        call = wire.watch_members(channel)
        try:
            # Nothing is written before the first members: a write to a call that has just been
            # refused fails without the reason, which tells the incarnation to name.
            applied = 0
            while True:
                try:
                    message = await asyncio.wait_for(call.read(), SILENT_S)
                except TimeoutError:
                    raise ControllerGone(f"silent for {SILENT_S:g} s") from None
                if message is grpc.aio.EOF:
                    raise ControllerGone("it ended the stream")
                if message.version == applied:
                    continue
                if not applied:
                    self._logged_reason = ""
                    logger.info(
                        "controller_followed",
                        extra=fields(
                            router_id=self._router_id,
                            address=address,
                            incarnation=f"{self._incarnation:016x}",
                        ),
                    )
                await self._take(wire.members(message))
                self._followed.set()
                self._reason = ""
                applied = message.version
                await self._tell(call, applied)
        finally:
            call.cancel()
            await channel.close()

    async def _tell(self, call: Any, applied: int) -> None:
        with suppress(asyncio.InvalidStateError):  # it is over; the next read learns why
            await call.write(wire.members_request(self._router_id, applied))


def _reason(error: Exception) -> str:
    told = lost_reason(error)
    if isinstance(error, grpc.aio.AioRpcError):
        return _NO_CONTROLLER if speaks_no_grpc(told) else _ADVICE.get(error.code(), told)
    return told
