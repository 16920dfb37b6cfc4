"""The engine of a real model: slices in, tokens out, K and V left in the pages."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kv_cache.layout import KVLayout, num_pages_for
from kv_cache.torch_storage import TorchPageStorage
from llm_engine.errors import InvalidLogits
from llm_engine.forward_batch import build_forward_batch
from llm_engine.model_config import ModelConfig
from llm_engine.sampler import sample
from llm_engine.sampling import Draw, Drawn, SampledToken, SamplingParams, SequenceSlice
from llm_engine.transformer import Decoder


class Engine:
    """Implements engine_api.EngineLike. Made by load_engine; used by one thread at a time."""

    def __init__(
        self,
        config: ModelConfig,
        storage: TorchPageStorage,
        decoder: Decoder,
        draw_tokens: Callable[[Tensor, Sequence[Draw]], list[SampledToken | None]] = sample,
    ) -> None:
        self._config = config
        self._storage = storage
        self._decoder = decoder
        self._draw_tokens = draw_tokens
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

    def forward(self, slices: Sequence[SequenceSlice]) -> list[Drawn]:
        if not slices:
            return []
        for each in slices:
            self._check(each)
        with torch.inference_mode(), self._on_device():
            drawn = self._run(slices)
            self._synchronize()
        tokens = iter(drawn)
        return [_all_or_none([next(tokens) for _ in each.draws]) for each in slices]

    def warm_up(self) -> None:
        """Load every kernel of a pass, before traffic and before transfers; overwrites page 0.

        Raises:
            InvalidLogits: No token can be drawn, so that every request would fail.

        A kernel that is first loaded while a transfer waits for its peer can wait for it in turn.
        Kernels that only larger or sharing batches take, load_engine has launched before.
        """
        with torch.inference_mode(), self._on_device():
            self._decoder.warm_up(
                page_size=self.layout.page_size, max_tokens=self._max_context_tokens
            )
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
        self.forward([prompt])
        if self.forward([drawn]) == [None]:
            raise InvalidLogits(
                "no token can be drawn after tokens 0, 0, 0 of this model: the largest "
                "logit is NaN or infinite"
            )
        # Penalties edit logits in float32, whatever the model's type: other kernels.
        self.forward([replace(drawn, draws=draws)])
        self._storage.import_pages([0], self._storage.export_pages([0]))
        self._storage.digest_pages([0])
        self._storage.copy_page(0, 0)

    def _run(self, slices: Sequence[SequenceSlice]) -> list[SampledToken | None]:
        device = self._storage.device
        batch = build_forward_batch(slices, self.layout.page_size, device)
        hidden_TD = self._decoder.hidden_states(batch)
        draws = [draw for each in slices for draw in each.draws]
        if not draws:
            return []
        num_draws = np.array([len(each.draws) for each in slices])
        last_tokens = np.cumsum(batch.qo_lens) - 1
        rows = torch.from_numpy(last_tokens[num_draws > 0]).to(device, non_blocking=True)
        logits_RV = self._decoder.logits(hidden_TD[rows])
        if len(draws) > len(rows):
            repeated = np.repeat(np.arange(len(rows)), num_draws[num_draws > 0])
            logits_RV = logits_RV[torch.from_numpy(repeated).to(device, non_blocking=True)]
        return self._draw_tokens(logits_RV, draws)

    def _check(self, each: SequenceSlice) -> None:
        """Assert what a GPU would answer with an unusable device or with foreign pages."""
        end = each.start + len(each.token_ids)
        assert end <= self._max_context_tokens, "the sequence is longer than context or pool"
        assert min(each.token_ids) >= 0, "token id below 0"
        assert max(each.token_ids) < self._config.vocab_size, "token id outside the vocabulary"
        page_ids = each.page_ids[: num_pages_for(end, self.layout.page_size)]
        assert min(page_ids) >= 0, "page id below 0"
        assert max(page_ids) < self._storage.num_pages, "page id outside the pool"
        assert all(draw.position == end for draw in each.draws), "a draw is at another position"

    def _on_device(self) -> AbstractContextManager[object]:
        device = self._storage.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _synchronize(self) -> None:
        """Wait until the pages are final; the drawn tokens alone do not prove it."""
        if self._storage.device.type == "cuda":
            torch.cuda.current_stream(self._storage.device).synchronize()


def _all_or_none(tokens: Sequence[SampledToken | None]) -> Drawn:
    drawn = tuple(token for token in tokens if token is not None)
    return drawn if len(drawn) == len(tokens) else None
