"""Introduces prefill workers to decode workers, before a request needs them.

A connection takes two workers some round trips, with NCCL up to seconds. It is made as soon as the
router knows both. If all candidates of a request fail, perhaps because they left while it waited, a
decode worker also asks the prefill workers that it was last told of. So it hears of each change,
even while it drains. A failure here costs nothing: the first request then connects.
"""

import asyncio
import logging

import grpc

from observability.logs import fields
from pagewire.protos.call_tasks import is_own_cancellation
from router import wire
from router.membership import WorkerMember
from router.worker import Worker
from router.worker_registry import WorkerRegistry

logger = logging.getLogger(__name__)

REFRESH_S = 5.0  # until another attempt, when nothing changes
MEET_S = 5.0  # for one call


class Introductions:
    """Follows the registry; one call at a time to each decode worker, which delays no other."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry
        self._told: dict[Worker, frozenset[WorkerMember]] = {}  # decode worker |-> known to it
        self._called: set[Worker] = set()  # decode workers that are being told

    async def run(self) -> None:
        """Introduce until cancelled."""
        async with asyncio.TaskGroup() as calls:
            async for _ in self._registry.changes(REFRESH_S):
                decodes = self._registry.serving("decode")
                self._told = {each: told for each, told in self._told.items() if each in decodes}
                for worker in decodes:
                    if worker not in self._called:
                        self._called.add(worker)
                        calls.create_task(self._introduce(worker))

    async def _introduce(self, worker: Worker) -> None:
        """Tell a decode worker the present prefill workers, also those that come meanwhile."""
        try:
            while self._told.get(worker, frozenset()) != (prefills := self._prefills()):
                if not await self._tell(worker, prefills):
                    return
                self._told[worker] = prefills
        finally:
            self._called.discard(worker)

    def _prefills(self) -> frozenset[WorkerMember]:
        return frozenset(worker.member for worker in self._registry.ready("prefill"))

    async def _tell(self, worker: Worker, prefills: frozenset[WorkerMember]) -> bool:
        """Return whether a decode worker was told."""
        members = sorted(prefills, key=lambda member: member.worker_id)
        try:
            await wire.meet(worker.channel, members, timeout_s=MEET_S)
        except grpc.aio.AioRpcError as error:
            logger.info(
                "introduction_failed",
                extra=fields(worker_id=worker.member.worker_id, reason=error.details()),
            )
        # Its channel was closed, because it has restarted or left:
        except grpc.aio.UsageError:
            pass  # before the call
        except asyncio.CancelledError:  # during the call
            if is_own_cancellation():
                raise
        except Exception:  # a bug with one worker must not end the introductions of all
            worker_id = worker.member.worker_id
            logger.exception("introduction_crashed", extra=fields(worker_id=worker_id))
        else:
            return True
        return False
