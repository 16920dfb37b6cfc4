"""Lets requests in: bounds their number, turns prompts into tokens, completes their parameters."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kv_cache.page_hash import page_hashes
from router.config import RouterConfig
from router.errors import NoWorker, Overloaded
from router.generation import Generation
from router.model_folder import ModelFolder
from router.prompt import Prompt, tokenize
from router.request import AskedSampling, GenerationRequest, ServedModel
from router.validation import check_model, check_prompt, complete_sampling, end_token_ids
from router.worker_registry import WorkerRegistry


class Admission:
    """Owns the limit of active requests and knows the model."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        folder: ModelFolder,
        registry: WorkerRegistry,
        random_id: Callable[[], str],
    ) -> None:
        self.num_active = 0
        self.num_finished = 0  # calls that succeeded, since the start
        self.is_closed = False  # takes nothing new
        self._config = config
        self._folder = folder
        self._registry = registry
        self._random_id = random_id
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def has_chat_template(self) -> bool:
        return self._folder.chat_template is not None

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold a place among the active requests.

        Raises:
            Overloaded: There is none.
            NoWorker: The router is stopping.
        """
        if self.is_closed:
            raise NoWorker("the router is stopping")
        limit = self._config.max_active_requests
        if self.num_active >= limit:
            raise Overloaded(
                f"{limit} requests are active, the limit of this router",
                self._config.retry_delay_s,
            )
        self.num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_active -= 1
            if not self.num_active:
                self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is active; False when time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def tokenize(self, model_name: str, prompt: Prompt) -> tuple[str, list[int]]:
        """Return the text and the token ids that `admit` would use."""
        model = await self._model()
        check_model(model_name, model)
        return await self._tokenize(prompt, model)

    async def admit(
        self,
        *,
        request_id: str,
        model_name: str,
        prompt: Prompt,
        asked: AskedSampling,
        arrived_at: float,
        time_remaining_s: float | None,
    ) -> Generation:
        """Check a request and make it ready for dispatch.

        Raises:
            InvalidRequest: A field is wrong.
            NoWorker: No worker has told yet which model it serves.
        """
        model = await self._model()
        check_model(model_name, model)
        _, token_ids = await self._tokenize(prompt, model)
        check_prompt(token_ids, model)
        sampling = complete_sampling(
            asked,
            defaults=self._folder.defaults,
            model=model,
            prompt_len=len(token_ids),
            has_tokenizer=self._folder.tokenizer is not None,
            draw_seed=lambda: int(self._random_id()[:16], 16),
        )
        timeout_s = self._config.request_timeout_s
        if time_remaining_s is not None:
            timeout_s = min(timeout_s, time_remaining_s)
        request = GenerationRequest(
            request_id=request_id,
            token_ids=tuple(token_ids),
            sampling=sampling,
            end_token_ids=end_token_ids(sampling, model),
            page_hashes=self._page_hashes(token_ids, model),
            page_size=model.page_size,
            arrived_at=arrived_at,
            deadline_at=asyncio.get_running_loop().time() + timeout_s,
        )
        return Generation(request, self._folder.tokenizer)

    async def _tokenize(self, prompt: Prompt, model: ServedModel) -> tuple[str, list[int]]:
        max_chars = self._config.prompt_chars_limit(model.max_context_tokens)
        return await tokenize(prompt, self._folder, max_chars=max_chars)

    def _page_hashes(self, token_ids: list[int], model: ServedModel) -> tuple[bytes, ...]:
        return tuple(
            page_hashes(
                token_ids,
                model.page_size,
                fingerprint=model.fingerprint,
                salt=self._config.cache_salt,
                key=self._config.page_hash_key,
            )
        )

    async def _model(self) -> ServedModel:
        until = asyncio.get_running_loop().time() + self._config.worker_wait_s
        while self._registry.model is None:
            if not await self._registry.wait_changed(until):
                raise NoWorker(f"no worker for {self._config.worker_wait_s:g} s")
        return self._registry.model
