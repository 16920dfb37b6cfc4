"""Follows the tenants file: a change takes effect within seconds, without a restart."""

import asyncio
import logging
from pathlib import Path

from observability.logs import fields
from router.errors import TenantsFileError
from router.tenants.file import TenantsFile, read_tenants, version_of
from router.tenants.registry import Tenants

log = logging.getLogger(__name__)

# A check costs a microsecond. Notifications of changes miss those of a mounted file, such as a
# Secret of Kubernetes.
PERIOD_S = 1.0


class TenantsWatch:
    """Keeps tenants equal to a file; a file that cannot be used changes nothing.

    Args:
        path: The path of the file.
        tenants: Changed when it changes.
        read: What `path` held when the tenants were made.
    """

    def __init__(self, path: Path, tenants: Tenants, read: TenantsFile) -> None:
        self._path = path
        self._tenants = tenants
        self._version = read.version
        self._warn_of(read)

    async def run(self) -> None:
        """Check the file until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self.look()
            except Exception:  # a bug: withdrawn tokens must not stay valid with the next change
                log.exception("tenants_watch_failed", extra=fields(path=self._path))

    async def look(self) -> None:
        """Read the file if it has changed since the last time; log the result once."""
        version = await asyncio.to_thread(version_of, self._path)
        if version == self._version:
            return
        self._version = version
        try:
            read = await asyncio.to_thread(read_tenants, self._path)
        except TenantsFileError as error:
            log.warning(
                "tenants_file_refused",
                extra=fields(reason=str(error), consequence="the tenants stay as they were"),
            )
            return
        self._version = read.version
        self._warn_of(read)
        self._tenants.change(read.rules, asyncio.get_running_loop().time())
        log.info("tenants_changed", extra=fields(path=self._path, num_tenants=len(read.rules)))

    def _warn_of(self, read: TenantsFile) -> None:
        if read.warning:
            log.warning("tenants_file_open", extra=fields(reason=read.warning))
