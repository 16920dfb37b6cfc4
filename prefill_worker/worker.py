"""The prefill worker: attempts and connections on top of scheduler and host."""

import asyncio
import logging
from collections.abc import Sequence

import grpc

from credentials.party import Party
from grammars.bits import TokenBits
from grammars.errors import GrammarError
from kv_transfer.connections import AcceptedConnections
from kv_transfer.driver import RunBlocking
from kv_transfer.errors import ConnectionBroken, TransferError, TransportRefused
from kv_transfer.joining import JoinedDigests
from kv_transfer.users import Users
from observability.logs import fields
from prefill_worker.admission import check_prompt
from prefill_worker.attempt import Attempt
from prefill_worker.config import PrefillConfig
from prefill_worker.errors import (
    ConnectionFailed,
    ConnectionUnknown,
    IncompatibleLayout,
    InvalidPrompt,
    TransportUnknown,
    WrongReceiver,
)
from prefill_worker.request import Progress, Prompt
from prefill_worker.scheduler import Scheduler
from prefill_worker.server import SERVICE, Tell, register_prefill_service, status_number
from prefill_worker.step_plan import StepPlan
from prefill_worker.wire import PrefillEnd, PrefillFailure, PrefillStart
from worker.context import WorkerContext
from worker.errors import InternalError, Overloaded, WorkerError
from worker.grammar_threads import GrammarThreads
from worker.sampling_check import constraint_refusal

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 16_384  # of all receivers, in any state


class PrefillWorker:
    """Attempts of decode workers; implements worker.host.Pool and server.PrefillSink.

    Args:
        context: State that it shares with the host.
        run_blocking: Runs page digests and grammars.
    """

    name = "prefill"
    service = SERVICE
    max_choices = 0  # decode workers limit them

    def __init__(
        self,
        context: WorkerContext[PrefillConfig],
        *,
        run_blocking: RunBlocking = asyncio.to_thread,
    ) -> None:
        config = context.config
        self.scheduler = Scheduler(
            config=config, cache=context.cache, page_size=context.layout.page_size
        )
        self._context = context
        self._config = config
        self._digests = JoinedDigests(context.storage, run_blocking=run_blocking)
        self._grammar_threads = GrammarThreads(run_blocking, context.tasks)
        self._accepted = AcceptedConnections(
            context.transports,
            # After the receiver, so that none of its requests meets a connection that is gone.
            idle_s=2 * config.transfer_deadlines.idle_s,
        )
        self._attempts: dict[Prompt, Attempt] = {}  # until nothing is left of them

    # Interface of the host.

    def register(self, server: grpc.aio.Server) -> None:
        """Add PrefillService to a server."""
        grant_s = self._config.transfer_deadlines.grant_s
        register_prefill_service(server, self, grant_s=grant_s)

    def planned(self, plan: StepPlan) -> None:
        """Pass on pages that were already in the cache."""
        self.progressed(plan.ready)

    def progressed(self, progress: Sequence[Progress]) -> None:
        """Pass finished pages and first tokens to their attempts."""
        for each in progress:
            attempt = self._attempts[each.prompt]
            try:
                attempt.progressed(each)
            except Exception:
                # A bug in one attempt must not end the others.
                logger.exception(
                    "progress_crashed", extra=fields(request_id=each.prompt.request_id)
                )
                self._fail(attempt, InternalError())

    def failed(self, work: Prompt, error: WorkerError) -> None:
        """End an attempt and tell its receiver why."""
        self._fail(self._attempts[work], error)

    async def wait_idle(self) -> None:
        """Return when nothing is left of any attempt."""
        await self._context.tasks.wait()

    def end_all(self, error: WorkerError) -> None:
        """End all attempts and tell their receivers why."""
        for attempt in list(self._attempts.values()):
            self._fail(attempt, error)

    async def wait_told(self) -> None:
        """Return when nothing is left of any attempt."""
        await self._context.tasks.wait()

    async def close(self) -> None:
        """Close the connections."""
        await self._accepted.close()

    # Interface of calls (see server.PrefillSink).

    async def connect(
        self,
        *,
        receiver: Party,
        sender_incarnation: int,
        connection_id: str,
        transport: str,
        offer: bytes,
        layout: str,
        contract_version: int,
    ) -> None:
        """Run this side's half of a connection's set-up, or raise WorkerError."""
        self._context.check_contract(contract_version)
        self._context.check_incarnation(sender_incarnation)
        if layout != self._context.layout.describe():
            raise IncompatibleLayout(
                f"layout {layout!r} is not this worker's {self._context.layout.describe()!r}"
            )
        deadlines = self._config.transfer_deadlines
        try:
            await self._accepted.connect(
                peer_key=(receiver.name, receiver.incarnation),
                connection_id=connection_id,
                transport_name=transport,
                offer=offer,
                key=self._context.credentials.transfer_key(
                    connection_id, sender=self._context.credentials.party, receiver=receiver
                ),
                deadline=asyncio.get_running_loop().time() + deadlines.connect_s,
            )
        except TransportRefused as error:
            raise TransportUnknown(str(error)) from error
        except TransferError as error:
            raise ConnectionFailed(str(error)) from error

    def open_attempt(self, start: PrefillStart, receiver: Party, tell: Tell) -> Attempt:
        """Begin to compute a prompt for a receiver, or raise WorkerError; see PrefillSink."""
        self._context.check_contract(start.contract_version)
        self._context.check_incarnation(start.ticket.sender_incarnation)
        if start.ticket.receiver_incarnation != receiver.incarnation:
            raise WrongReceiver(
                f"the ticket's receiver has incarnation {start.ticket.receiver_incarnation}, "
                f"the caller is {receiver}"
            )
        self._context.check_open()
        if len(self._attempts) >= MAX_ATTEMPTS:
            raise Overloaded(f"{MAX_ATTEMPTS} attempts have not ended, the limit of this worker")
        check_prompt(
            start.prompt,
            config=self._config,
            model=self._context.model,
            page_size=self._context.layout.page_size,
            num_waiting=self.scheduler.num_waiting,
        )
        try:
            accepted = self._accepted.get(
                (receiver.name, receiver.incarnation), start.connection_id
            )
        except ConnectionBroken as error:
            raise ConnectionUnknown(str(error)) from error
        attempt = Attempt(
            start,
            scheduler=self.scheduler,
            storage=self._context.storage,
            outgoing=accepted.outgoing,
            tell=tell,
            deadlines=self._config.transfer_deadlines,
            digests=self._digests,
            on_change=self._context.wake.set,
        )
        self._attempts[start.prompt] = attempt
        if start.prompt.params.constraint is None:
            self._start(attempt)
        self._context.tasks.start(
            self._run(attempt, accepted.users), name=f"attempt-{start.prompt.request_id}"
        )
        return attempt

    def _start(self, attempt: Attempt) -> None:
        """Let an attempt begin; a bug ends it."""
        try:
            attempt.start()
        except Exception:
            logger.exception("start_crashed", extra=fields(request_id=attempt.prompt.request_id))
            self._fail(attempt, InternalError())
        self._context.wake.set_by_arrival()

    async def _run(self, attempt: Attempt, users: Users) -> None:
        """Run an attempt, which has started unless its constraint must be looked at first."""
        prompt = attempt.prompt
        try:
            with users.one():
                if prompt.params.constraint is not None:
                    await self._set_mask(prompt)
                    self._context.check_open()  # still
                    self._start(attempt)
                await attempt.run()
        except WorkerError as error:
            attempt.refuse(PrefillEnd(code=status_number(error), message=str(error)))
        finally:
            del self._attempts[prompt]

    async def _set_mask(self, prompt: Prompt) -> None:
        """Find the tokens that a prompt's constraint allows.

        Raises:
            InvalidPrompt: None does, or it cannot be read.
            InternalError: There is a bug.
        """
        constraint = prompt.params.constraint
        assert constraint is not None

        def allowed() -> TokenBits:
            matcher = self._context.grammars.begin(constraint, prompt.salt)
            matcher.accept(prompt.tokens[prompt.prompt_len :])
            return matcher.allowed()

        try:
            prompt.allowed = await self._grammar_threads.run(prompt.salt, allowed)
        except GrammarError as error:
            raise InvalidPrompt(constraint_refusal(constraint, error)) from None
        except Exception:
            logger.exception("constraint_crashed", extra=fields(request_id=prompt.request_id))
            raise InternalError() from None

    def _fail(self, attempt: Attempt, error: WorkerError) -> None:
        attempt.fail(PrefillFailure(code=status_number(error), message=str(error)))
