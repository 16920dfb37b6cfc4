"""Base of both pools' Ray actors: each start is a new incarnation, and a failure ends it.

Ray imports this wherever an actor is placed, so what serves is imported where it serves.
"""

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import ray

from credentials.secret import PartyKeys
from llm_engine.gpu_context import making_context
from llm_engine.model_identity import ModelIdentity
from observability.actor import has_come_back
from observability.logs import configure_logging, fields
from observability.serving_process import process_age_s, stop_in_time, without_collections
from options.kept_by_name import kept_by_name
from worker.errors import HostUnfit
from worker.own_host import host_names, look
from worker.settings import WorkerSettings

if TYPE_CHECKING:
    from worker.config import HostConfig
    from worker.context import WorkerContext
    from worker.host import Pool
    from worker.identity import WorkerIdentity

log = logging.getLogger(__name__)

ANNOUNCE_TIMEOUT_S = 5.0
CONTROLLER_START_S = 120.0  # as the launcher waits; first workers start beside it
IDENTITY_TIMEOUT_S = 60.0  # for the controller to read some bytes of each tensor

Config = TypeVar("Config", bound="HostConfig")


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStart(Generic[Config]):
    """What each start of a worker gets; Ray stores it."""

    settings: WorkerSettings
    config: Config  # limits and deadlines
    keys: PartyKeys  # prove its identity
    # The actor to which each start is announced. A name, because Ray cannot restart an actor whose
    # arguments hold a handle of a dead actor.
    controller_name: str


class WorkerActor(ABC, Generic[Config]):
    """One worker; `__init__` returns when it serves."""

    pool: ClassVar[str]

    async def __init__(self, start: WorkerStart[Config]) -> None:  # type: ignore[misc] # Ray awaits it
        settings = start.settings
        configure_logging(settings.log_level, settings.log_format)
        _note_step("worker_begins", settings.worker_id)
        self._settings = settings
        engine = asyncio.get_running_loop().run_in_executor(None, _import_engine, settings.device)
        is_restart = has_come_back()
        try:
            self._controller = ray.get_actor(start.controller_name)
            is_restart = await self._was_ready()
            if not settings.host:
                expected = None if is_restart else await self._model_identity()
                settings = await asyncio.to_thread(_on_this_host, settings, expected)
                self._settings = settings
            from worker.process import WorkerProcess

            await engine
            _note_step("engine_imported", settings.worker_id)
            self._process = WorkerProcess(
                settings,
                start.config,
                start.keys,
                announce=self._announce,
                report_loaded=self._report_loaded,
            )
            await self._process.start(self._make_pool)
        except Exception:
            if not is_restart:
                raise  # the launcher reports it
            # Ray gives up an actor whose constructor raises, but restarts a dead process.
            log.exception("worker_start_failed", extra=fields(worker_id=settings.worker_id))
            os._exit(1)
        self._watching: asyncio.Task[None] = asyncio.create_task(self._exit_when_failed())
        self._leaving: asyncio.Task[None] | None = None

    async def wait_ready(self) -> str:
        """Return the gRPC address."""
        assert self._process.identity
        return self._process.identity.address

    async def stop(self, grace_s: float) -> None:
        """Give running requests `grace_s` seconds, then end everything but the actor."""
        self._watching.cancel()
        await self._process.stop(grace_s)

    async def drain(self, grace_s: float) -> None:
        """Begin to leave: refuse new work, give running requests `grace_s` seconds, then exit.

        Returns at once and needs no further call; a second call changes nothing.
        """
        if self._leaving is None:
            self._watching.cancel()
            self._leaving = asyncio.create_task(self._leave(grace_s))

    async def restart(self, grace_s: float) -> None:
        """Begin to end: give running requests `grace_s` seconds, then exit; Ray restarts it.

        Returns at once and needs no further call; a second call changes nothing.
        """
        if self._leaving is None:
            self._watching.cancel()
            self._leaving = asyncio.create_task(self._begin_anew(grace_s))

    async def pid(self) -> int:
        """Return the process id on its host."""
        return os.getpid()

    @abstractmethod
    def _make_pool(self, context: "WorkerContext[Config]") -> "Pool":
        """Make the pool's part of the worker."""

    async def _was_ready(self) -> bool:
        call: Any = self._controller.was_ready.remote(self._settings.worker_id)
        timeout_s = ANNOUNCE_TIMEOUT_S if has_come_back() else CONTROLLER_START_S
        try:
            return bool(await asyncio.wait_for(call, timeout_s))
        except (ray.exceptions.RayError, TimeoutError):
            return True  # at the first start of a cluster the controller answers

    async def _model_identity(self) -> ModelIdentity:
        """Return which model the router's host has now: it may have changed on all hosts."""
        call: Any = self._controller.model_identity.remote()
        try:
            identity: ModelIdentity = await asyncio.wait_for(call, IDENTITY_TIMEOUT_S)
        except TimeoutError as error:
            raise HostUnfit("the router's host does not report which model it has") from error
        return identity

    async def _leave(self, grace_s: float) -> None:
        worker_id = self._settings.worker_id
        log.info("worker_drains", extra=fields(worker_id=worker_id, grace_s=grace_s))
        await stop_in_time(self._process.drain, grace_s, worker_id=worker_id)
        assert self._process.identity
        call: Any = self._controller.worker_left.remote(
            worker_id, self._process.identity.incarnation
        )
        with suppress(ray.exceptions.RayError, TimeoutError):
            await asyncio.wait_for(call, ANNOUNCE_TIMEOUT_S)
        log.info("worker_drained", extra=fields(worker_id=worker_id))
        # Ray restarts an actor that exits, but not one that was killed on request.
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def _begin_anew(self, grace_s: float) -> None:
        worker_id = self._settings.worker_id
        log.info("worker_restarts", extra=fields(worker_id=worker_id, grace_s=grace_s))
        await stop_in_time(self._process.stop, grace_s, worker_id=worker_id)
        os._exit(1)

    async def _announce(self, identity: "WorkerIdentity", is_leaving: bool) -> None:
        own = ray.get_runtime_context()
        call: Any = self._controller.announce_worker.remote(
            identity.worker_id,
            identity.incarnation,
            identity.address,
            self.pool,
            is_leaving,
            own.get_node_id(),
            own.get_assigned_resources(),
            identity.contract_version,
        )
        try:
            await asyncio.wait_for(call, ANNOUNCE_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            # The controller restarts and hears the next announcement.
            log.warning(
                "announce_failed", extra=fields(worker_id=identity.worker_id, error=str(error))
            )

    def _report_loaded(self, done_bytes: int, total_bytes: int) -> None:
        # The answer is not awaited, so a dead controller neither delays nor fails a start.
        self._controller.report_loaded.remote(self._settings.worker_id, done_bytes, total_bytes)

    async def _exit_when_failed(self) -> None:
        await self._process.wait_failed()
        log.critical("worker_ends", extra=fields(worker_id=self._settings.worker_id))
        os._exit(1)


def _note_step(event: str, worker_id: str) -> None:
    """Log how old the process is: a start takes the time between two of these and worker_ready."""
    log.debug(event, extra=fields(worker_id=worker_id, process_s=round(process_age_s(), 2)))


def _import_engine(device: str) -> None:
    """Import what computes: torch takes seconds, in which other processes are asked."""
    with without_collections():
        if device == "cpu":
            import llm_engine.load_engine  # noqa: F401

            return
        with making_context():
            from llm_engine.load_engine import import_kernels

            with suppress(ImportError):  # load_engine raises it where it needs them
                import_kernels()


def _on_this_host(settings: WorkerSettings, expected: ModelIdentity | None) -> WorkerSettings:
    """Return the settings for this host; HostUnfit: the worker cannot run here."""
    nodes: Any = ray.nodes()  # type: ignore[no-untyped-call]
    own_id = ray.get_runtime_context().get_node_id()
    [own] = [each for each in nodes if each["NodeID"] == own_id]
    found = look(
        settings.by_host,
        settings.model_dir,
        host_names(own),
        own["NodeManagerAddress"],
        expected,
        settings.tls.inside,
    )
    if found.problems:
        raise HostUnfit("; ".join(found.problems))
    return replace(settings, host=found.address, model_dir=found.model)
