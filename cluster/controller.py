"""The controller: a named Ray actor that places a cluster's processes and knows its workers.

Workers announce each start to it, and it tells the routers, over gRPC, since not all of them run in
Ray; it adds and removes workers. The launcher places the first ones, which start beside it. Ray
restarts it with its original deployment. The next announcements and Ray's list of actors restore
everything else, so its death stops no request and its restart needs no storage: workers announce
themselves every two seconds, routers reconnect, and a worker that was told to leave does so on its
own. While they load, workers report their progress to it for the launcher, because they answer no
calls yet.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from cluster.config import ClusterConfig
from cluster.deployment import Deployment
from cluster.errors import ConfigError, StartError, Stopping
from cluster.gateway_succession import GatewaySuccession
from cluster.groups import group_of, look_at_groups, remove_groups, reserve
from cluster.host_looks import file_problems, look_at, on_sound_hosts
from cluster.membership import HEARD_S, Membership
from cluster.own_address import own_address
from cluster.placement import (
    FIRST_GATEWAY,
    ROUTER_NAME,
    close_host,
    gateways,
    hosts_now,
    needs_of,
    place_gateway,
    place_router,
    place_worker,
)
from cluster.places import Place, check_move, check_room, choose_places, told_waiting
from cluster.pool_config import pool_of
from cluster.preflight import check_growth
from cluster.ray_actors import workers_on
from cluster.scaling import (
    ClusterWorkers,
    ScalePlan,
    check_drain,
    check_restart,
    is_worker,
    plan_move,
    plan_scale,
    worker_ids,
)
from cluster.server import MemberServer
from credentials.door import ClusterLinks
from credentials.party import CONTROLLER_PARTY_NAME
from credentials.secret import RouterKeys
from llm_engine.model_identity import ModelIdentity, read_identity
from observability.actor import has_come_back
from observability.logs import configure_logging, fields
from options.kept_by_name import kept_by_name
from router.membership import WorkerMember, WorkerRole

log = logging.getLogger(__name__)

PUSH_TIMEOUT_S = 5.0
REPLACE_PERIOD_S = 5.0
LOOK_S = 0.2  # from one look at the groups of workers to the next one


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFacts:
    """A controller's report on its cluster; it contains no key."""

    config: ClusterConfig
    device: str
    workers: ClusterWorkers
    is_stopping: bool = False  # no further change is accepted


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class Contracts:
    """The contract versions of a cluster, and what else its next processes would start with."""

    running: tuple[int, ...]  # of its workers; see protos.contract
    to_start: Mapping[str, int]  # a used host |-> version of its code
    # A process, as `pagewire restart` names it |-> why it could not use its host's files of TLS
    problems: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class ControllerActor:
    """Places the cluster's processes, and tells every router the membership.

    Args:
        deployment: The settings of all processes.
    """

    async def __init__(self, deployment: Deployment) -> None:  # type: ignore[misc] # Ray awaits it
        config = deployment.config
        configure_logging(config.log_level, config.log_format)
        self._deployment = deployment
        self._membership = Membership()
        self._loaded: dict[str, tuple[int, int]] = {}  # worker_id |-> bytes loaded, bytes in all
        self._started_at = _now()
        self._is_closed = False
        self._is_deployed = has_come_back()  # until then the launcher places workers
        self._ending: set[str] = set()  # workers that have said that they end
        self._has_ended = asyncio.Event()  # one of them, or one that was killed
        self._succession = GatewaySuccession(deployment)
        keys = deployment.secret.keys_of("controller", CONTROLLER_PARTY_NAME)
        try:
            host = own_address(config)
            door = ClusterLinks(config.tls_settings).door
            self._members = MemberServer(
                keys, host, config.controller_port, door, ports=config.free_ports
            )
            self._address = await self._members.start()
        except Exception:
            if not has_come_back():
                raise  # the launcher reports it
            # Ray gives up an actor whose constructor raises, but restarts a dead process.
            log.exception("controller_start_failed")
            os._exit(1)
        self._replacing = asyncio.create_task(self._replace_for_ever())

    # Calls of the launcher and the command line. There is no await between a decision and its
    # effects, so that two callers cannot both remove the last worker.

    async def deploy(self, places: Mapping[str, Place] = {}) -> dict[str, Any]:
        """Place the missing processes of the configured cluster; return all handles by name.

        Args:
            places: Those of all workers, if the launcher has placed them.
        """
        config = self._deployment.config
        self._check_open()
        actors = {ROUTER_NAME: place_router(self._deployment)}
        existing = frozenset(ray.util.list_named_actors())
        names = worker_ids(config.workers_of_pools)
        for name, where in (places or self._places_for(names)).items():
            actors[name] = self._place(name, where, is_new=name not in existing)
        self._is_deployed = True
        if config.http_port:
            *_, name = gateways(ray.util.list_named_actors()) or [FIRST_GATEWAY]
            actors[name] = place_gateway(self._deployment, name)
        return actors

    async def facts(self) -> ClusterFacts:
        """Return a report on the cluster."""
        return ClusterFacts(
            config=self._deployment.config,
            device=self._deployment.device,
            workers=self._workers(),
            is_stopping=self._is_closed,
        )

    async def contract_versions(self) -> Contracts:
        """Return the versions of the workers, and what their hosts have for restarted ones.

        Restarted processes run the code that a host has now, the one of a working_dir if the
        cluster has one. They read its files of TLS anew, of which running ones keep what was right.

        Raises:
            StartError: A host does not answer.
        """
        home = self._deployment.home_resource
        used = {each.node_id for each in self._membership.places.values()}
        nodes = [
            each
            for each in hosts_now()[0]
            if each["Alive"] and (each["NodeID"] in used or home in each["Resources"])
        ]
        looks = await look_at(self._deployment, nodes)
        return Contracts(
            running=tuple(sorted({each.contract_version for each in self._membership.members})),
            to_start={node["NodeManagerAddress"]: each.contract_version for node, each in looks},
            problems=file_problems(self._deployment, self._membership.places, looks),
        )

    async def scale(
        self, wanted: Mapping[str, int], grace_s: float
    ) -> tuple[dict[str, Any], ScalePlan]:
        """Set the numbers of workers; return the handles of new ones, and the plan.

        Args:
            wanted: Key of a pool |-> number; an absent pool stays as it is.
            grace_s: Seconds for running requests of workers that leave.

        Raises:
            ClusterError: Nothing has changed.
        """
        config, device = self._deployment.config, self._deployment.device

        def decide() -> tuple[ScalePlan, dict[str, Place]]:
            self._check_open()
            workers = self._workers()
            plan = plan_scale(workers, config, device, wanted)
            if plan.starts:
                names = [*(workers.staying - set(plan.drains)), *plan.starts]
                check_growth(config, device, Counter(map(pool_of, names)))
            places = self._places_for(plan.starts)
            if not config.pool_resources:  # hosts do not join later
                check_room(places)
            return plan, places

        plan, places = await on_sound_hosts(self._deployment, decide)
        actors = {name: self._place(name, where) for name, where in places.items()}
        await self._dismiss(plan.drains, grace_s)
        return actors, replace(plan, waiting=told_waiting(places))

    async def drain(self, worker_id: str, grace_s: float) -> None:
        """Have a worker finish its requests within `grace_s` seconds, and leave.

        Raises:
            ClusterError: Nothing has changed.
        """
        self._check_open()
        check_drain(self._workers(), worker_id)
        await self._dismiss((worker_id,), grace_s)

    async def move(self, worker_id: str, pool: str, grace_s: float) -> tuple[str, Any]:
        """Have a worker leave, and one of another pool take its place: the same GPU or host.

        Args:
            worker_id: The worker that leaves.
            pool: The key of the pool that gets one more.
            grace_s: Seconds for running requests of the worker that leaves.

        Returns:
            The name and the handle of the new one. Ray starts it when the place is free.

        Raises:
            ClusterError: Nothing has changed.
        """
        config, device = self._deployment.config, self._deployment.device

        def decide() -> tuple[str, dict[str, Place]]:
            self._check_open()
            workers = self._workers()
            name = plan_move(workers, config, device, worker_id, pool)
            names = [*(workers.staying - {worker_id}), name]
            check_growth(config, device, Counter(map(pool_of, names)))
            place = replace(self._membership.places[worker_id], group=group_of(worker_id))
            check_move(worker_id, place, config.pool(pool).amounts, hosts_now()[0])
            return name, {name: place}

        name, places = await on_sound_hosts(self._deployment, decide)
        actor = self._place(name, places[name], is_new=False)
        await self._dismiss((worker_id,), grace_s)
        return name, actor

    async def restart(self, worker_id: str, grace_s: float) -> int:
        """Have a worker finish its requests within `grace_s` seconds, and restart.

        Returns:
            The incarnation that ends.

        Raises:
            ClusterError: Nothing has changed.
        """
        self._check_open()
        check_restart(self._workers(), worker_id)
        ending = self._membership.restart(worker_id, grace_s)
        await self._push_all()
        try:
            actor = ray.get_actor(worker_id)
        except ValueError:
            raise StartError(
                f"{worker_id} has left the cluster meanwhile, by another command; see "
                "`pagewire status`"
            ) from None
        log.info("worker_restarted", extra=fields(worker_id=worker_id, grace_s=grace_s))
        actor.restart.remote(grace_s)
        return ending

    async def succeed_gateway(self, grace_s: float) -> None:
        """Place an HTTP gateway that takes over from the present one, which then ends.

        Args:
            grace_s: Seconds for what runs at the one that ends.

        Raises:
            ClusterError: The present one is unchanged.
        """
        self._check_open()
        await self._succession.succeed(grace_s)

    async def evacuate(self, node_id: str, grace_s: float) -> frozenset[str]:
        """Let the workers of a host end there, and start elsewhere when there is room.

        Ray starts nothing more on the host. Unlike a drain, this also ends the last worker of a
        role, because the host goes in any case.

        Args:
            node_id: The host, as Ray names it.
            grace_s: Seconds for running requests.

        Returns:
            The names of the workers.

        Raises:
            ClusterError: Nothing has changed.
        """
        self._check_open()
        home = self._deployment.home_resource
        if any(each["NodeID"] == node_id and home in each["Resources"] for each in hosts_now()[0]):
            raise ConfigError(
                "--here: found the host of the cluster's controller, which cannot go while the "
                "cluster runs; allowed: a host with workers only; nothing has changed"
            )
        await asyncio.to_thread(close_host, node_id)
        names = workers_on(node_id)
        staying = names - self._membership.leaving
        serving = staying if self._is_young() else staying & self._heard_of()
        for worker_id in serving:
            if worker_id in self._membership:
                self._membership.restart(worker_id, grace_s)
        await self._push_all()
        for worker_id in sorted(staying):
            log.info("worker_evacuated", extra=fields(worker_id=worker_id, grace_s=grace_s))
            with suppress(ValueError):  # it has just ended
                actor = ray.get_actor(worker_id)
                if worker_id in serving:
                    actor.restart.remote(grace_s)
                else:  # it loads, or does not answer, and serves no request
                    ray.kill(actor, no_restart=False)
        return names

    async def forget(self, names: Collection[str]) -> None:
        """Forget workers that a command has ended, so that they are not replaced."""
        for worker_id in names:
            self._forget(worker_id)
        self._publish()

    async def close(self) -> None:
        """Accept no further change: the cluster stops."""
        self._is_closed = True

    async def address(self) -> str:
        """Return the address at which routers get the members."""
        return self._address

    async def model_identity(self) -> ModelIdentity:
        """Return which model the router's host has now, for workers on hosts that join."""
        model = self._deployment.config.model
        assert model is not None
        return await asyncio.to_thread(read_identity, model)

    async def router_keys(self, name: str) -> RouterKeys:
        """Return the keys for routers outside Ray; users of this Ray could read them anyway."""
        return self._deployment.secret.router_keys(name)

    # Calls of workers.

    async def announce_worker(
        self,
        worker_id: str,
        incarnation: int,
        address: str,
        role: WorkerRole,
        is_leaving: bool,
        node_id: str,
        resources: Mapping[str, float],
        contract_version: int = 0,
    ) -> None:
        """Enter one start of a worker, and its place; idempotent."""
        member = WorkerMember(
            worker_id=worker_id,
            incarnation=incarnation,
            address=address,
            pool=role,
            is_draining=is_leaving,
            contract_version=contract_version,
        )
        if self._membership.announce(member, _now()):
            log.info(
                "worker_announced",
                extra=fields(
                    worker_id=worker_id,
                    incarnation=f"{incarnation:016x}",
                    address=address,
                    contract_version=contract_version,
                ),
            )
            self._publish()
        self._membership.settle(worker_id, incarnation, Place(node_id=node_id, resources=resources))
        if (grace_s := self._membership.grace_of(member)) is not None:
            # It does not know yet, or it has died since and come back.
            with suppress(ValueError):  # it has just ended
                ray.get_actor(worker_id).drain.remote(grace_s)
        elif (grace_s := self._membership.restart_grace_of(member)) is not None:
            # Ray does not repeat a call that was lost; for the worker a second one changes nothing.
            with suppress(ValueError):
                ray.get_actor(worker_id).restart.remote(grace_s)

    async def worker_left(self, worker_id: str, incarnation: int) -> None:
        """Forget a start of a worker that has drained."""
        self._ending.add(worker_id)
        self._has_ended.set()
        if self._membership.left(worker_id, incarnation):
            self._loaded.pop(worker_id, None)
            log.info("worker_left", extra=fields(worker_id=worker_id))
            self._publish()

    async def was_ready(self, worker_id: str) -> bool:
        """Return whether an earlier process of this worker has served, as far as it may be known.

        A controller that has just come back knows of none that has died meanwhile.
        """
        return worker_id in self._membership or (self._is_young() and has_come_back())

    async def report_loaded(self, worker_id: str, done_bytes: int, total_bytes: int) -> None:
        """Note the progress of a worker's weights; fast loads are never reported."""
        self._loaded[worker_id] = done_bytes, total_bytes

    async def loaded(self) -> tuple[int, int]:
        """Return loaded bytes and all bytes of the workers that have reported."""
        reports = self._loaded.values()
        return sum(done for done, _ in reports), sum(total for _, total in reports)

    async def pid(self) -> int:
        """Return the process id on its host."""
        return os.getpid()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Stopping

    def _workers(self) -> ClusterWorkers:
        names: list[str] = ray.util.list_named_actors()
        existing = {each for each in names if is_worker(each)}
        leaving = (self._membership.leaving | self._membership.gone) & existing
        staying = frozenset(existing - leaving)
        answering = (staying & self._heard_of()) - self._membership.restarting
        return ClusterWorkers(staying=staying, leaving=leaving, answering=answering)

    def _heard_of(self) -> frozenset[str]:
        return self._membership.heard_since(_now() - HEARD_S)

    def _is_young(self) -> bool:
        """Return whether workers may serve from which it has not heard yet."""
        return _now() < self._started_at + HEARD_S

    def _places_for(self, names: Iterable[str]) -> dict[str, Place]:
        """Return the places of these workers; some of them may exist already."""
        existing = frozenset(ray.util.list_named_actors())
        places = {name: Place(resources=needs_of(self._deployment, name)) for name in names}
        new = {name: each.resources for name, each in places.items() if name not in existing}
        # Of those that Ray has: one that did not start was ended by whoever asked for it.
        known = {n: each for n, each in self._membership.places.items() if n in existing}
        known_of_these = {name: known[name] for name in places if name in known}
        return places | known_of_these | choose_places(new, known, *hosts_now())

    def _place(self, worker_id: str, where: Place, *, is_new: bool = True) -> Any:
        """Place a worker, if its place is new in a group of its own."""
        self._loaded.pop(worker_id, None)
        where = reserve(worker_id, where) if is_new else where
        self._membership.place(worker_id, where)
        return place_worker(self._deployment, worker_id, where)

    async def _replace_for_ever(self) -> None:
        while not self._is_closed:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if self._ending else REPLACE_PERIOD_S):
                    await self._has_ended.wait()
            self._has_ended.clear()
            try:
                # Ray answers late while its head is away.
                existing = frozenset(await asyncio.to_thread(ray.util.list_named_actors))
                self._ending &= existing
                await self._tidy_groups()
                self._replace_missing(existing)
                await self._succession.retire_left_over(existing)
            except Exception:
                log.exception("replacing_failed")

    async def _tidy_groups(self) -> None:
        """Remove groups that no worker has, and place workers again that wait in vain in theirs.

        A leaving one that has come back ends: it serves no request, and its successor may be first.
        """
        if not self._is_deployed:
            return
        found = await asyncio.to_thread(look_at_groups)
        if not (found.unused or found.stuck or found.unready & self._membership.leaving):
            return
        # Workers are placed on this loop, without an await: the second look sees the worker of a
        # group that was new in the first one, and the group of such a worker.
        await asyncio.sleep(LOOK_S)
        found &= await asyncio.to_thread(look_at_groups)
        if self._is_closed:
            return
        remove_groups(found.unused)
        leaving = found.unready & self._membership.leaving
        displaced = found.stuck - leaving
        for worker_id in leaving | displaced:
            with suppress(ValueError):  # somebody has ended it
                ray.kill(ray.get_actor(worker_id), no_restart=True)
        for worker_id in leaving:
            self._forget(worker_id)
            self._publish()
        for name, where in self._places_for(sorted(displaced)).items():
            log.warning("worker_displaced", extra=fields(worker_id=name))
            self._place(name, where)

    def _replace_missing(self, existing: frozenset[str]) -> None:
        """Place workers again that have served and are to stay, but whose actors are gone.

        Ray gives up an actor whose process cannot load the code, even if only for a moment, and
        any user of Ray can end one.
        """
        members = {each.worker_id for each in self._membership.members}
        missing = members - existing - self._membership.leaving - self._heard_of()
        if self._is_closed or not missing:  # to place any, Ray is asked on this loop
            return
        for name, where in self._places_for(sorted(missing)).items():
            log.warning("worker_replaced", extra=fields(worker_id=name))
            self._place(name, where)

    async def _dismiss(self, names: tuple[str, ...], grace_s: float) -> None:
        """Have workers leave: first the routers stop sending them requests."""
        heard_of, is_young = self._heard_of(), self._is_young()
        for worker_id in names:
            self._membership.dismiss(worker_id, grace_s)
        await self._push_all()
        for worker_id in names:
            log.info("worker_dismissed", extra=fields(worker_id=worker_id, grace_s=grace_s))
            try:
                actor = ray.get_actor(worker_id)
            except ValueError:  # it has just ended
                self._forget(worker_id)
                continue
            if worker_id in heard_of or is_young:
                actor.drain.remote(grace_s)
            else:  # it loads, waits for a place or dies repeatedly, and serves no request
                ray.kill(actor, no_restart=True)
                self._forget(worker_id)
        self._publish()

    def _forget(self, worker_id: str) -> None:
        self._loaded.pop(worker_id, None)
        self._membership.forget(worker_id)
        self._has_ended.set()

    def _publish(self) -> None:
        self._members.publish(self._membership.members)

    async def _push_all(self) -> None:
        """Tell the routers, and wait until they apply it. A returning router is told then."""
        self._publish()
        await self._members.wait_applied(PUSH_TIMEOUT_S)


def _now() -> float:
    return asyncio.get_running_loop().time()
