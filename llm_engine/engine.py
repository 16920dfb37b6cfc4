"""The engine of a real model: steps in, tokens out, K and V left in the pages.

Life of a step:
1. launch   send changes to the device, then the work: page copies, one token for each seat, slices
            of sequences without a seat, and copies of the drawn tokens to the host
2. read     wait until all of it has run; return the tokens to Python

On a GPU, the next step may be launched before this one is read: it takes its tokens from the seats.
Elsewhere, a step has run when `launch` returns.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from grammars.bits import ALL_BITS
from kv_cache.layout import KVLayout, num_pages_for
from kv_cache.torch_storage import TorchPageStorage
from llm_engine.engine_api import GpuMemory
from llm_engine.engine_step import EngineStep, StepResult
from llm_engine.errors import InvalidLogits
from llm_engine.kv_reads import KVReads
from llm_engine.model_config import ModelConfig
from llm_engine.sampling import Draw, Drawn, SamplingParams, SequenceSlice
from llm_engine.transformer import Decoder

ReadResult = Callable[[], StepResult]  # waits for the step


class Runner(Protocol):
    """How steps run: asynchronously, or while the host waits."""

    max_launched: int

    def full_pass(self, num_decodes: int, most: int) -> int:
        """Do what EngineLike.full_pass does."""
        ...

    def launch(self, step: EngineStep) -> ReadResult:
        """Begin a checked step."""
        ...

    def warm_up(self, *, max_tokens: int) -> None:
        """Load the kernels that `launch` needs; may overwrite page 0."""
        ...

    def record_next(self) -> bool:
        """Do what EngineLike.record_next does."""
        ...


class Engine:
    """Implements engine_api.EngineLike. Made by load_engine; used by one thread at a time."""

    def __init__(
        self, config: ModelConfig, storage: TorchPageStorage, decoder: Decoder, runner: Runner
    ) -> None:
        self._config = config
        self._storage = storage
        self._decoder = decoder
        self._runner = runner
        self._launched: deque[tuple[ReadResult, KVReads]] = deque()
        self._max_context_tokens = min(
            config.max_context_tokens, storage.num_pages * storage.layout.page_size
        )

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def decoder(self) -> Decoder:
        return self._decoder

    @property
    def layout(self) -> KVLayout:
        return self._storage.layout

    @property
    def storage(self) -> TorchPageStorage:
        return self._storage

    @property
    def max_launched(self) -> int:
        return self._runner.max_launched

    @property
    def gpu_memory(self) -> GpuMemory:
        device = self._storage.device
        if device.type != "cuda":
            return GpuMemory()
        return GpuMemory(
            allocated_bytes=torch.cuda.memory_allocated(device),
            reserved_bytes=torch.cuda.memory_reserved(device),
        )

    def full_pass(self, num_decodes: int, most: int) -> int:
        return self._runner.full_pass(num_decodes, most)

    def launch(self, step: EngineStep) -> None:
        assert len(self._launched) < self.max_launched, "read comes before another launch"
        self._check(step)
        with torch.inference_mode(), self._on_device():
            self._decoder.take_reads()  # of a launch that failed
            try:
                self._storage.copy_pages(step.copies)
                read = self._runner.launch(step)
            except BaseException:
                # What was launched until then writes pages. A transfer may get them next, which
                # does not come behind it.
                self._storage.synchronize()
                raise
        self._launched.append((read, self._decoder.take_reads()))

    def read(self) -> StepResult:
        read, reads = self._launched.popleft()
        return replace(read(), reads=reads)

    def forward(self, slices: Sequence[SequenceSlice]) -> list[Drawn]:
        """Run a step of only slices; return the tokens drawn after each."""
        self.launch(EngineStep(slices=tuple(slices)))
        return list(self.read().slices)

    def record_next(self) -> bool:
        assert not self._launched, "read comes before a recording"
        with torch.inference_mode(), self._on_device():
            return self._runner.record_next()

    def warm_up(self) -> None:
        """Load every kernel of a pass, before traffic and before transfers; overwrites page 0.

        Raises:
            InvalidLogits: No token can be drawn, so that every request would fail.

        Loading a kernel while a transfer waits for its peer can block until that transfer ends.
        load_engine has already launched the kernels of larger or sharing batches.
        """
        if self.launch_kernels() == [None]:
            raise InvalidLogits(
                "no token can be drawn after tokens 0, 0, 0 of this model: the largest "
                "logit is NaN or infinite"
            )

    def launch_kernels(self) -> list[Drawn]:
        """Launch every kernel of `warm_up`; return tokens, or [None] if none can be drawn.

        Inside `compiling_ahead` results are arbitrary.
        """
        # First those that take longest to compile. A pass of a kind that the runner has loaded
        # would be recorded.
        tokens = self._warm_up_draws()
        with torch.inference_mode(), self._on_device():
            self._runner.warm_up(max_tokens=self._max_context_tokens)
        self.forward([])  # waits until all of it has run
        return tokens

    def _warm_up_draws(self) -> list[Drawn]:
        """Draw in all ways, and move page 0; return tokens, or [None] if none can be drawn."""
        random = SamplingParams(top_k=2, top_p=0.9, logprobs=1)
        penalized = replace(random, repetition_penalty=1.1)
        draws = tuple(
            Draw(params=params, seed=0, position=3, prompt_token_ids=[0], output_token_ids=[0])
            for params in (SamplingParams(temperature=0), SamplingParams(), random, penalized)
        )
        page_ids = list(range(num_pages_for(3, self.layout.page_size)))
        prompt = SequenceSlice(token_ids=[0, 0], start=0, page_ids=page_ids, num_prompt_tokens=2)
        drawn = SequenceSlice(
            token_ids=[0], start=2, page_ids=page_ids, num_prompt_tokens=2, draws=draws[:3]
        )
        # The second is in no recording, and attends to prompt and drawn tokens.
        self.forward([prompt])
        self.forward([replace(drawn, token_ids=[0, 0, 0], start=0)])
        tokens = self.forward([drawn])
        # Penalties and masks edit logits in float32, whatever the model's dtype: other kernels.
        self.forward([replace(drawn, draws=draws)])
        num_words = -(-self._config.vocab_size // 32)
        allowed = np.full(num_words, ALL_BITS, dtype=np.int32)
        masked = tuple(replace(draw, allowed=allowed) for draw in draws)
        self.forward([replace(drawn, draws=masked[:3])])
        self.forward([replace(drawn, draws=masked)])
        self._storage.import_pages([0], self._storage.export_pages([0]))
        self._storage.digest_pages([0])
        self._storage.copy_pages([(0, 0)])
        return tokens

    def _check(self, step: EngineStep) -> None:
        """Assert conditions whose violation would break a GPU or touch other requests' pages."""
        sources, targets = ({copy[side] for copy in step.copies} for side in (0, 1))
        assert len(targets) == len(step.copies), "two copies to one page"
        assert not sources & targets, "a page is copied that is overwritten"
        for started in step.started:
            self._check_pages(started.page_ids)
            self._check_tokens(started.prompt_token_ids)
            self._check_tokens(started.output_token_ids)
        for extended in step.extended:
            self._check_pages(extended.page_ids)
        for each in step.slices:
            end = each.start + len(each.token_ids)
            assert end <= self._max_context_tokens, "the sequence is longer than context or pool"
            self._check_tokens(each.token_ids)
            self._check_pages(each.page_ids[: num_pages_for(end, self.layout.page_size)])
            assert all(draw.position == end for draw in each.draws), "a draw is elsewhere"

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        ids = np.asarray(token_ids)
        # Of an array, min and max go through Python.
        assert np.minimum.reduce(ids, initial=0) >= 0, "token id below 0"
        most = np.maximum.reduce(ids, initial=0)
        assert most < self._config.vocab_size, "token id outside the vocabulary"

    def _check_pages(self, page_ids: Sequence[int]) -> None:
        assert min(page_ids) >= 0, "page id below 0"
        assert max(page_ids) < self._storage.num_pages, "page id outside the pool"

    def _on_device(self) -> AbstractContextManager[object]:
        device = self._storage.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
