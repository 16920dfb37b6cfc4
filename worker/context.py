"""State that the host and the pool of one worker share: identity, cache, flags."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from credentials.cluster import ClusterCredentials
from grammars.errors import NoVocabulary
from grammars.store import Grammars
from kv_cache.prefix_cache import PrefixCache
from kv_transfer.transport import Transport
from protos.contract import contract_difference
from worker.background import BackgroundTasks
from worker.config import HostConfig
from worker.errors import Draining, Failing, OtherContract, StaleIncarnation
from worker.executor import EngineExecutor
from worker.identity import ModelInfo, WorkerIdentity
from worker.wake import Wake

if TYPE_CHECKING:  # it imports tokenizers
    from grammars.vocabulary import ModelTokens


Config_co = TypeVar("Config_co", bound=HostConfig, covariant=True)


class WorkerContext(Generic[Config_co]):
    """One start of one worker. Owned by the event loop that serves it.

    Args:
        config: Limits and deadlines of the worker's pool.
        identity: The worker and its incarnation.
        model: The model that the executor's engine serves.
        executor: Runs the engine without blocking the event loop. The caller closes it after the
            worker has stopped.
        credentials: The credentials of this start, for calls to other workers and connection keys.
        transports: The transports of pages, best first, made for the engine's storage. The host
            closes them.

    Attributes:
        model: The model within the limits of the engine's pages.
        grammars: The model's grammars, for answers with a constraint.
        wake: Set it to have the scheduler look again.
        is_draining: The worker takes nothing new.
        is_failing: The worker cannot go on; is_draining is set, too.
    """

    def __init__(
        self,
        *,
        config: Config_co,
        identity: WorkerIdentity,
        model: ModelInfo,
        executor: EngineExecutor,
        credentials: ClusterCredentials,
        transports: Sequence[Transport],
    ) -> None:
        self.config = config
        self.identity = identity
        self.executor = executor
        self.credentials = credentials
        self.transports = tuple(transports)
        self.storage = executor.engine.storage
        self.layout = executor.engine.layout
        self.model = model.within(self.storage.num_pages * self.layout.page_size)
        self.cache = PrefixCache(
            num_pages=self.storage.num_pages,
            page_size=self.layout.page_size,
            fingerprint=self.layout.model_fingerprint,
            hash_key=config.hash_key,
        )
        self.grammars = Grammars(self._read_vocabulary, model.eos_token_ids)
        self.tasks = BackgroundTasks()
        self.wake = Wake()
        self.is_draining = False
        self.is_failing = False

    def _read_vocabulary(self) -> "ModelTokens":
        from grammars.vocabulary import read_vocabulary

        if self.model.text_folder is None:
            raise NoVocabulary("this worker has none")
        return read_vocabulary(self.model.text_folder, self.model.vocab_size)

    def check_incarnation(self, incarnation: int) -> None:
        """Raise StaleIncarnation if a caller means another incarnation of this worker."""
        if incarnation != self.identity.incarnation:
            raise StaleIncarnation(
                f"the call is for incarnation {incarnation}, this is {self.identity.incarnation}"
            )

    def check_contract(self, version: int) -> None:
        """Raise OtherContract if a caller speaks another version of the contract."""
        if difference := contract_difference(version, self.identity.contract_version):
            raise OtherContract(difference)

    def check_open(self) -> None:
        """Raise Draining or Failing if the worker takes nothing new."""
        if self.is_failing:
            raise Failing("this worker fails")
        if self.is_draining:
            raise Draining("the worker is draining")
