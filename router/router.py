"""The router: composes registry, index, admission, dispatch and the public service."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import grpc

from credentials.door import IN_CLEAR
from grammars.tokenizer_file import tokenizer_digest
from observability.logs import fields
from pagewire import ClusterStatus
from pagewire.wire import status_from
from router.admission import Admission
from router.call import Reception
from router.chat_renderer import ChatRenderer, ChildRenderer
from router.chat_template import ChatTemplate
from router.config import RouterConfig
from router.constraint_check import ChildChecker, ConstraintChecker
from router.dispatch import Dispatcher
from router.errors import ChatTemplateError, ModelFolderError
from router.health import Health
from router.introductions import Introductions
from router.membership import WorkerMember
from router.metrics import RouterMetrics
from router.model_folder import ModelFolder, read_model_folder
from router.off_loop import OffLoop, RunBlocking
from router.prefix_index import PrefixIndex
from router.prompt import PromptEncoder
from router.resumption import ResumeTokens
from router.server import DescribeTls, InferenceServicer, add_to_server
from router.tenants.registry import Tenants
from router.worker_registry import WorkerRegistry

logger = logging.getLogger(__name__)


class Router:
    """One router process. Everything runs in the event loop that it is constructed in.

    Args:
        config: Limits and weights.
        model_dir: Folder with tokenizer.json, chat template and generation_config.json; None serves
            token ids only (no text, no chat, no stop strings).
        connect_channel: Makes a grpc.aio channel to one start of a worker.
        tenants: The callers allowed, as for the server; None: any.
        random_id: Returns 32 random hexadecimal digits; source of request ids and seeds.
        make_renderer: Makes the renderer of chats with the model's template.
        make_checker: Makes the checker of constraints with the tokenizer of a folder.
        run_blocking: Runs work that grows with a prompt.
        describe_tls: Describes its connections, for the cluster's status.
        controller_silence: Says why nothing is heard from the controller, for the same.

    Raises:
        ModelFolderError: A file of the model folder cannot be used.
    """

    def __init__(
        self,
        *,
        config: RouterConfig,
        model_dir: Path | None,
        connect_channel: Callable[[WorkerMember], grpc.aio.Channel],
        random_id: Callable[[], str],
        tenants: Tenants | None = None,
        make_renderer: Callable[[ChatTemplate], ChatRenderer] = ChildRenderer,
        make_checker: Callable[[Path], ConstraintChecker] = ChildChecker,
        run_blocking: RunBlocking = asyncio.to_thread,
        describe_tls: DescribeTls = lambda: (IN_CLEAR, IN_CLEAR),
        controller_silence: Callable[[], str] = lambda: "",
    ) -> None:
        folder = ModelFolder()
        if model_dir is not None:
            folder = read_model_folder(model_dir, max_prompt_chars=config.most_prompt_chars)
        self._model_dir = model_dir
        self._renderer = make_renderer(folder.chat_template) if folder.chat_template else None
        self._checker = make_checker(model_dir) if model_dir is not None else None
        self.index = PrefixIndex(max_pages=config.max_index_pages)
        self.registry = WorkerRegistry(
            config=config,
            tokenizer_digest=tokenizer_digest(model_dir) if model_dir is not None else "",
            connect_channel=connect_channel,
            index=self.index,
            on_lost=lambda worker, reason: self.dispatcher.worker_lost(worker, reason),
        )
        self.tenants = tenants or Tenants()
        self.dispatcher = Dispatcher(
            config=config,
            registry=self.registry,
            index=self.index,
            has_tenants=not self.tenants.is_open,
            on_dispatched=lambda wait_s: self.metrics.dispatched(self.model_name, wait_s),
        )
        off_loop = OffLoop(run_blocking, retry_delay_s=config.retry_delay_s)
        self.admission = Admission(
            config=config,
            folder=folder,
            encoder=PromptEncoder(folder=folder, renderer=self._renderer, off_loop=off_loop),
            registry=self.registry,
            resume_tokens=ResumeTokens(
                key=config.resume_key, lifetime_s=config.request_timeout_s, wall_clock=time.time
            ),
            off_loop=off_loop,
            constraints=self._checker,
        )
        self.metrics = RouterMetrics()
        self._reception = Reception(
            admission=self.admission,
            dispatcher=self.dispatcher,
            metrics=self.metrics,
            tenants=self.tenants,
            random_id=random_id,
            model_name=lambda: self.model_name,
        )
        self._servicer = InferenceServicer(
            self._reception,
            registry=self.registry,
            index=self.index,
            slow_client_timeout_s=config.slow_client_timeout_s,
            describe_tls=describe_tls,
            controller_silence=controller_silence,
        )
        self.health = Health(self.registry)
        self._introductions = Introductions(self.registry)
        self._followers: list[asyncio.Task[None]] = []  # of the registry

    def register(self, server: grpc.aio.Server) -> None:
        """Add InferenceService and the health service to a server."""
        add_to_server(self._servicer, server)
        self.health.add_to_server(server)

    async def start(self) -> None:
        """Get ready for chats and report health; workers are followed from `set_workers` on.

        Raises:
            ModelFolderError: The chat template cannot be used.
        """
        if self._renderer:
            try:
                await self._renderer.start()
            except ChatTemplateError as error:
                await self._renderer.close()
                raise ModelFolderError(f"chat template of {self._model_dir}: {error}") from error
        self._followers = [
            asyncio.create_task(self.health.run(), name="router-health"),
            asyncio.create_task(self._introductions.run(), name="router-introductions"),
        ]

    async def set_workers(self, workers: Iterable[WorkerMember]) -> None:
        """Set the membership. Idempotent; a worker that is absent stays for as long as it lives."""
        self.registry.set_members(workers)

    def cluster_status(self) -> ClusterStatus:
        """Return this router's current view of the cluster, as clients get it."""
        return status_from(self._servicer.cluster_status())

    @property
    def model_name(self) -> str:
        """The served model; empty until a worker has reported it."""
        return self.registry.model.name if self.registry.model else ""

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, give the running ones `grace_s` seconds, then end them."""
        self.admission.is_closed = True
        for task in self._followers:
            task.cancel()
        if self._followers:
            await asyncio.wait(self._followers, timeout=1)
        await self.health.stop()
        if not await self.admission.wait_idle(grace_s):
            logger.warning(
                "requests_abandoned", extra=fields(num_requests=self.admission.num_active)
            )
            self._reception.abandon()
            await self.admission.wait_idle(1.0)
        await self.dispatcher.stop()
        await self.registry.stop()
        if self._renderer:
            await self._renderer.close()
        if self._checker:
            await self._checker.close()
