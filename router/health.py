"""The standard health service: the process is alive at once, ready when a decode worker is."""

import asyncio
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from router.reported_wait import wait_reported
from router.worker_registry import WorkerRegistry

INFERENCE_SERVICE = "pagewire.v1.InferenceService"
_REFRESH_S = 60.0  # a change is noticed at once; this only bounds the wait


class Health:
    """Reports "" (liveness) and the inference service's name (readiness)."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry
        self._servicer = health.aio.HealthServicer()
        self._was_ready = asyncio.Event()

    def add_to_server(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def run(self) -> None:
        """Follow the registry until cancelled."""
        async for _ in self._registry.changes(_REFRESH_S):
            is_ready = bool(self._registry.ready("decode"))
            status = health_pb2.HealthCheckResponse
            await self._servicer.set(
                INFERENCE_SERVICE, status.SERVING if is_ready else status.NOT_SERVING
            )
            if is_ready:
                self._was_ready.set()

    async def wait_ready(self, waits: Callable[[str], None]) -> None:
        """Wait until the router has been ready for the first time; see wait_reported."""
        await wait_reported(self._was_ready, self._why_not_ready, waits)

    async def stop(self) -> None:
        """Report not serving from now on."""
        await self._servicer.enter_graceful_shutdown()

    def _why_not_ready(self) -> str:
        return f"no decode worker takes requests{self._registry.told_misfits('decode')}"
