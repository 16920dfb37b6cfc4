"""Admits requests: bounds their number, tokenizes prompts, completes their parameters."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

from grammars.errors import GrammarError
from kv_cache.page_hash import page_hashes
from pagewire.protos.token_ids import TOKEN_BYTES
from protos.shares import may_take
from router.chat_format import ToolCallFormat, begins_in_reasoning, has_reasoning, tool_call_format
from router.config import RouterConfig
from router.constraint_check import ConstraintChecker
from router.errors import InvalidRequest, NoWorker, Overloaded, RouterStops
from router.generation import Generation
from router.model_folder import ModelFolder
from router.off_loop import OffLoop
from router.prompt import LARGE_PIECES_BYTES, Chat, Prompt, PromptEncoder
from router.request import AskedSampling, GenerationRequest, Sampling, ServedModel
from router.resumption import Begun, ResumeTokens, Resumption
from router.tenants.account import Account
from router.tenants.tenant import Tenant, TenantRules
from router.validation import (
    check_model,
    check_packed_token_ids,
    check_prompt,
    check_resumption,
    check_tokens,
    complete_sampling,
    end_token_ids,
)
from router.worker_registry import WorkerRegistry

T = TypeVar("T")

IssueToken = Callable[[], bytes]  # makes a call's resume token; empty: it cannot be resumed


@dataclass(kw_only=True, slots=True)  # not frozen: to make one would take many times as long
class Asking:
    """A call that asks to be admitted."""

    account: Account
    request_id: str
    model_name: str
    prompt: Prompt
    asked: AskedSampling
    arrived_at: float  # loop time
    time_remaining_s: float | None
    resumption: Resumption | None = None  # None: a new call


class _CheckedPrompt(NamedTuple):
    packed: bytes
    page_hashes: tuple[bytes, ...]


class Admission:
    """Owns the limit of active requests and knows the model."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        folder: ModelFolder,
        encoder: PromptEncoder,
        registry: WorkerRegistry,
        resume_tokens: ResumeTokens,
        off_loop: OffLoop,
        constraints: ConstraintChecker | None,
    ) -> None:
        self.num_active = 0
        self.num_finished = 0  # calls that succeeded, since the start
        self.is_closed = False  # takes nothing new
        self._config = config
        self._folder = folder
        self._encoder = encoder
        self._registry = registry
        self._resume_tokens = resume_tokens
        self._off_loop = off_loop
        self._constraints = constraints  # None: the router has no tokenizer
        self._idle = asyncio.Event()
        self._idle.set()
        template = folder.chat_template.source if folder.chat_template else ""
        self.has_chat_template = bool(template)
        self.tool_call_format: ToolCallFormat | None = tool_call_format(template)
        self.has_reasoning = has_reasoning(template)
        self.max_request_bytes = config.max_request_bytes
        self.sampling_defaults = folder.defaults.replaced(config.sampling_defaults)

    def take_place(self, tenant: Tenant, num_answers: int) -> None:
        """Take a place among the active requests, until `leave_place`.

        Args:
            tenant: Whose call it is.
            num_answers: The choices that the call asks for; for one that generates nothing, as how
                many it counts.

        Raises:
            InvalidRequest: The tenant may never have as many answers at a time.
            Overloaded: No place is free, or none for this tenant, which must not have all.
            RouterStops: The router takes no new requests.
        """
        if self.is_closed:
            raise RouterStops("the router is stopping")
        limit = self._config.max_active_requests
        if self.num_active >= limit:
            raise Overloaded(
                f"{limit} requests are active, the limit of this router",
                self._config.retry_delay_s,
            )
        tenant.check_active(num_answers, self._config.retry_delay_s)
        if not may_take(tenant.num_active, self.num_active, limit, tenant.rules.weight_of_room):
            raise Overloaded(
                f"{tenant.num_active} calls of this tenant are active; the rest of the "
                f"router's {limit} places is for other tenants",
                self._config.retry_delay_s,
            )
        self.num_active += 1
        tenant.num_active += 1
        tenant.num_answers += num_answers
        self._idle.clear()

    def leave_place(self, tenant: Tenant, num_answers: int) -> None:
        """Give back what `take_place` took."""
        self.num_active -= 1
        tenant.num_active -= 1
        tenant.num_answers -= num_answers
        if not self.num_active:
            self._idle.set()

    @contextmanager
    def place(self, tenant: Tenant, num_answers: int) -> Iterator[None]:
        """Hold a place; arguments and errors as of `take_place`."""
        self.take_place(tenant, num_answers)
        try:
            yield
        finally:
            self.leave_place(tenant, num_answers)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is active; False when time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def tokenize(
        self, model_name: str, prompt: Prompt, tenant: TenantRules
    ) -> tuple[str, bytes]:
        """Return the text and the packed token ids that `admit` would use."""
        model = await self._model()
        check_model(model_name, model)
        return await self._encode(prompt, model, lambda packed: packed, tenant)

    async def detokenize(
        self,
        model_name: str,
        packed: bytes,
        *,
        skip_special_tokens: bool,
        with_pieces: bool,
        tenant: TenantRules,
    ) -> tuple[str, list[str]]:
        """Return the text of packed token ids and, if requested, the text of each one."""
        model = await self._model()
        check_model(model_name, model)
        check_packed_token_ids("token_ids", packed)
        check_tokens("token_ids", packed, model)
        return await self._encoder.decode(
            packed,
            skip_special_tokens=skip_special_tokens,
            with_pieces=with_pieces,
            tenant=tenant,
        )

    def admit_at_once(self, asking: Asking) -> tuple[Generation, IssueToken] | None:
        """Do what `admit` does, if nothing has to be waited for; None: nothing was done.

        Raises:
            InvalidRequest: A field is wrong.
            Overloaded: The tenant has used too many tokens.
        """
        model = self._registry.model
        if model is None or asking.resumption or asking.asked.constraint:
            return None
        check_model(asking.model_name, model)
        encoded = self._encoder.encode_at_once(
            asking.prompt,
            partial(self._check_and_hash, model, asking.account.tenant.rules),
            max_chars=self._config.prompt_chars_limit(model.max_context_tokens),
        )
        if encoded is None:
            return None
        text, checked = encoded
        asking.account.use_prompt(len(checked.packed) // TOKEN_BYTES)
        sampling = self._complete_sampling(asking, model, checked, None)
        generation = self._generation(asking, model, text, checked, sampling, None)
        return generation, self._issue_later(generation, asking, model)

    def deadline_of(self, asking: Asking) -> float:
        """Return the loop's time by which a call must have ended, admitted or not."""
        timeout_s = self._config.request_timeout_s
        if asking.time_remaining_s is not None:
            timeout_s = min(timeout_s, asking.time_remaining_s)
        return asking.arrived_at + timeout_s

    async def admit(self, asking: Asking) -> tuple[Generation, IssueToken]:
        """Check a request and prepare it for dispatch; return it with what makes its resume token.

        Raises:
            InvalidRequest: A field is wrong.
            NoWorker: No worker has reported its model yet.
            Overloaded: The tenant has used too many tokens.
        """
        resumption = asking.resumption
        begun = self._resume_tokens.read(resumption.token) if resumption else None
        model = await self._model()
        check_model(asking.model_name, model)
        tenant = asking.account.tenant.rules
        check_and_hash = partial(self._check_and_hash, model, tenant)
        text, checked = await self._encode(asking.prompt, model, check_and_hash, tenant)
        # What its caller has received is computed again, too, whatever it is.
        num_bytes = len(checked.packed) + (resumption.num_bytes_to_compute if resumption else 0)
        asking.account.use_prompt(num_bytes // TOKEN_BYTES)
        sampling = self._complete_sampling(asking, model, checked, begun)
        await self._check_constraint(sampling, model, tenant)
        if begun:  # the first router may have known other workers
            sampling = replace(sampling, max_tokens=begun.max_tokens)
        generation = self._generation(asking, model, text, checked, sampling, begun)
        request = generation.request
        if resumption:
            self._resume_tokens.check(resumption.token, request, asking.asked, model.fingerprint)
            check_resumption(resumption, sampling, model)
            await self._resume(generation, resumption, tenant)
            asking.account.skip(generation.num_tokens)
        return generation, self._issue_later(generation, asking, model)

    def _issue_later(
        self, generation: Generation, asking: Asking, model: ServedModel
    ) -> IssueToken:
        # The first message needs it; until then it would only delay the requests of a burst.
        return partial(
            self._resume_tokens.issue, generation.request, asking.asked, model.fingerprint
        )

    def _check_and_hash(
        self, model: ServedModel, tenant: TenantRules, packed: bytes
    ) -> _CheckedPrompt:
        check_prompt(packed, model)
        hashes = page_hashes(
            packed,
            model.page_size,
            fingerprint=model.fingerprint,
            salt=tenant.cache_salt,
            key=self._config.page_hash_key,
        )
        return _CheckedPrompt(packed, tuple(hashes))

    def _complete_sampling(
        self, asking: Asking, model: ServedModel, checked: _CheckedPrompt, begun: Begun | None
    ) -> Sampling:
        return complete_sampling(
            asking.asked,
            defaults=self.sampling_defaults,
            model=model,
            prompt_len=len(checked.packed) // TOKEN_BYTES,
            has_tokenizer=self._folder.tokenizer is not None,
            # Half of an id is as random as another draw would be.
            draw_seed=lambda: begun.seed if begun else int(asking.request_id[:16], 16),
        )

    def _generation(
        self,
        asking: Asking,
        model: ServedModel,
        text: str,
        checked: _CheckedPrompt,
        sampling: Sampling,
        begun: Begun | None,
    ) -> Generation:
        request = GenerationRequest(
            request_id=asking.request_id,
            packed_token_ids=checked.packed,
            sampling=sampling,
            end_token_ids=end_token_ids(sampling, model),
            page_hashes=checked.page_hashes,
            page_size=model.page_size,
            arrived_at=asking.arrived_at,
            deadline_at=self.deadline_of(asking),
            # The constraint applies to the answer, from its first token on.
            begins_in_reasoning=sampling.constraint is None
            and isinstance(asking.prompt, Chat)
            and begins_in_reasoning(text),
            tenant=asking.account.tenant.rules,
            resumed_from=begun.request_id if begun else "",
        )
        return Generation(request, self._folder.tokenizer)

    async def _check_constraint(
        self, sampling: Sampling, model: ServedModel, tenant: TenantRules
    ) -> None:
        constraint = sampling.constraint
        if constraint is None or self._constraints is None:
            return
        field = f"sampling.constraint.{constraint.kind.value}"
        try:
            await self._constraints.check(constraint, model, tenant)
        except GrammarError as error:
            raise InvalidRequest(field, error.found, error.allowed) from None

    async def _resume(
        self, generation: Generation, resumption: Resumption, tenant: TenantRules
    ) -> None:
        num_bytes = sum(len(each.packed_token_ids) for each in resumption.choices)
        work = partial(generation.resume, resumption.choices)
        if num_bytes <= LARGE_PIECES_BYTES:
            work()
        else:
            await self._off_loop.run(work, num_bytes, tenant)

    async def _encode(
        self,
        prompt: Prompt,
        model: ServedModel,
        finish: Callable[[bytes], T],
        tenant: TenantRules,
    ) -> tuple[str, T]:
        max_chars = self._config.prompt_chars_limit(model.max_context_tokens)
        return await self._encoder.encode(prompt, finish, max_chars=max_chars, tenant=tenant)

    async def _model(self) -> ServedModel:
        until = asyncio.get_running_loop().time() + self._config.worker_wait_s
        while self._registry.model is None:
            if not await self._registry.wait_changed(until):
                raise NoWorker(
                    f"no worker for {self._config.worker_wait_s:g} s{self._registry.told_misfits()}"
                )
        return self._registry.model
