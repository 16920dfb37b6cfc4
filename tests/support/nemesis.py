"""Brings faults over a fake cluster, and takes them away again.

Each method is the kind of a Fault; `ledger` counts what really happened, because a fault that
missed proves nothing.
"""

import asyncio
from collections import Counter, deque

from tests.support.fake_cluster import FakeCluster
from tests.support.loopback import FaultKind, LoopbackFault
from tests.support.scenario import Fault


class Nemesis:
    """Executes the faults of one scenario."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self.ledger: Counter[str] = Counter()
        self._copy_faults: deque[LoopbackFault] = deque()  # for the next copies between pools
        cluster.pages.fault_policy = self._next_copy_fault

    async def run(self, faults: tuple[Fault, ...]) -> None:
        """Return when every fault has come and gone."""
        await asyncio.gather(*(self._bring(fault) for fault in faults))

    async def _bring(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        if await getattr(self, fault.kind)(fault):
            self.ledger[fault.kind] += 1

    def _next_copy_fault(self, connection_id: str, index: int) -> LoopbackFault:
        if not self._copy_faults:
            return LoopbackFault()
        fault = self._copy_faults.popleft()
        self.ledger[fault.kind.name.lower() if fault.kind is not FaultKind.NONE else "delay"] += 1
        return fault

    async def damage(self, fault: Fault) -> bool:
        """The next copy of pages goes wrong; `targets` names the FaultKind."""
        kind = FaultKind[fault.targets[0].upper()]
        self._copy_faults.append(LoopbackFault(kind=kind, abort_s=min(fault.lasts_s, 1.0)))
        return True

    async def delay(self, fault: Fault) -> bool:
        """The next copy of pages takes longer, perhaps than its deadline."""
        self._copy_faults.append(LoopbackFault(delay_s=fault.lasts_s))
        return True

    async def fail_pass(self, fault: Fault) -> bool:
        """The next pass of a worker raises."""
        self._cluster.workers[fault.targets[0]].executor.num_failing_passes += 1
        return True

    async def break_engine(self, fault: Fault) -> bool:
        """The engine of a worker computes nothing any more, however often it restarts."""
        [worker_id] = fault.targets
        if worker_id in self._cluster.broken:
            return False
        self._cluster.broken.add(worker_id)
        self._cluster.workers[worker_id].executor.is_broken = True
        await asyncio.sleep(fault.lasts_s)
        self._cluster.broken.discard(worker_id)
        self._cluster.workers[worker_id].executor.is_broken = False
        return True

    async def kill_prefill(self, fault: Fault) -> bool:
        return await self._kill_worker(fault, silently=False)

    async def kill_decode(self, fault: Fault) -> bool:
        return await self._kill_worker(fault, silently=False)

    async def lose_prefill(self, fault: Fault) -> bool:
        """The host loses its power: nobody is told."""
        return await self._kill_worker(fault, silently=True)

    async def lose_decode(self, fault: Fault) -> bool:
        return await self._kill_worker(fault, silently=True)

    async def _kill_worker(self, fault: Fault, *, silently: bool) -> bool:
        [worker_id] = fault.targets
        if self._cluster.process(worker_id).state == "dead":
            return False
        self._cluster.process(worker_id).resume()
        self._cluster.kill(worker_id, silently=silently)
        await asyncio.sleep(fault.lasts_s)
        await self._cluster.start_worker(worker_id)
        return True

    async def kill_router(self, fault: Fault) -> bool:
        [name] = fault.targets
        if self._cluster.process(name).state == "dead":
            return False
        self._cluster.kill(name)
        await asyncio.sleep(fault.lasts_s)
        await self._cluster.start_router(name)
        return True

    async def pause_prefill(self, fault: Fault) -> bool:
        return await self._pause(fault)

    async def pause_decode(self, fault: Fault) -> bool:
        return await self._pause(fault)

    async def _pause(self, fault: Fault) -> bool:
        process = self._cluster.process(fault.targets[0])
        if process.state != "running":
            return False
        process.pause()
        await asyncio.sleep(fault.lasts_s)
        process.resume()
        return True

    async def slow_down(self, fault: Fault) -> bool:
        """A worker computes ten times slower."""
        executor = self._cluster.workers[fault.targets[0]].executor
        executor.slowdown = 10.0
        await asyncio.sleep(fault.lasts_s)
        executor.slowdown = 1.0
        return True

    async def cut_control(self, fault: Fault) -> bool:
        return await self._cut(fault)

    async def cut_data(self, fault: Fault) -> bool:
        return await self._cut(fault)

    async def _cut(self, fault: Fault) -> bool:
        """Nothing passes between two processes for a while."""
        link = self._cluster.network.link(*fault.targets)
        link.cut()
        await asyncio.sleep(fault.lasts_s)
        link.heal()
        return True

    async def reset_control(self, fault: Fault) -> bool:
        self._cluster.network.reset(*fault.targets)
        return True

    async def reset_data(self, fault: Fault) -> bool:
        self._cluster.network.reset(*fault.targets)
        return True
