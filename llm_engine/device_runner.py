"""Runs steps asynchronously, on Triton kernels: launched ahead, read one step later.

State that a step passes to the next, its tokens and pages, stays on the device and on one stream.
The host waits only for the event after the oldest unread step.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_kernels.sampling.launch import TokenSampler
from attn_kernels.seats.launch import DeviceSeats
from kv_cache.layout import num_pages_for
from kv_cache.torch_storage import TorchPageStorage
from llm_engine.attention import AttentionBackend
from llm_engine.attention_triton import TritonAttention
from llm_engine.decode_graphs import NUM_ROWS, GraphedDecode
from llm_engine.device_batch import DeviceBatch
from llm_engine.engine import ReadResult
from llm_engine.engine_api import FULL_SHARE
from llm_engine.engine_step import EngineStep, StepResult
from llm_engine.forward_batch import HostBatch, build_host_batch, send_batch
from llm_engine.limits import MAX_RECORDED_TOKENS
from llm_engine.model_config import ModelConfig
from llm_engine.prompt_graphs import GraphedPrompts, SentPrompts
from llm_engine.sampler import ReadTokens, Sampler, read_later
from llm_engine.sampling import SequenceSlice
from llm_engine.slice_pass import drawn_after, draws_of, logits_of_draws
from llm_engine.transformer import Decoder
from observability.logs import fields

logger = logging.getLogger(__name__)


class DeviceRunner:
    """Implements engine.Runner.

    Args:
        storage: The pages.
        decoder: The decoder, for slices.
        batch: The seats; None: slices only.
        decode: Steps of the seats; None: slices only.
        prompts: Recorded passes of prompt tokens; None: all are launched kernel by kernel.
    """

    max_launched = 2

    def __init__(
        self,
        storage: TorchPageStorage,
        decoder: Decoder,
        batch: DeviceBatch | None,
        decode: GraphedDecode | None,
        prompts: GraphedPrompts | None,
    ) -> None:
        self._storage = storage
        self._decoder = decoder
        self._batch = batch
        self._decode = decode
        self._prompts = prompts
        self._page_size = storage.layout.page_size
        self._sampler = Sampler(TokenSampler)
        self._num_recorded = 0  # passes, before they were needed
        self._record_s = 0.0  # that this took

    def warm_up(self, *, max_tokens: int) -> None:
        """Load the kernels of decode steps and passes of prompt tokens; overwrites page 0."""
        if self._decode is not None:
            self._decode.warm_up(max_tokens=max_tokens)
        if self._prompts is not None:
            self._prompts.warm_up(max_tokens)

    def record_next(self) -> bool:
        """Record a pass that `warm_up` has loaded; computes none, and changes no seat or page."""
        began_at = time.monotonic()
        if any(each.record_next() for each in (self._prompts, self._decode) if each is not None):
            self._num_recorded += 1
            self._record_s += time.monotonic() - began_at
            return True
        if self._num_recorded:
            logger.info(
                "passes_recorded",
                extra=fields(passes=self._num_recorded, seconds=round(self._record_s, 2)),
            )
            self._num_recorded = 0
        return False

    def full_pass(self, num_decodes: int, most: int) -> int:
        """Do what EngineLike.full_pass does."""
        if self._prompts is None:
            return most
        rows = self._rows_beside(num_decodes)
        beside = self._prompts.sizes_behind(rows) if rows else ()
        alone = [each for each in self._prompts.sizes if each > max(beside, default=0)]
        for sizes in (beside, alone):  # one pass rather than two, which read the weights twice
            full = max((each for each in sizes if each <= most), default=0)
            if full >= FULL_SHARE * most:
                return full
        return most

    def launch(self, step: EngineStep) -> ReadResult:
        batch = build_host_batch(step.slices, self._page_size) if step.slices else None
        # Decodes go first: as a recording they launch at once, and keep the device busy while the
        # host launches the slices. Up to about a thousand tokens of slices go with them.
        beside = self._send_beside(step, batch)
        read_decodes, hidden_TD = self._launch_decodes(step, beside)
        if batch is not None and beside is None:
            hidden_TD = self._launch_slices(batch)
        read_slices = self._launch_draws(step.slices, hidden_TD)
        event = self._record_event()

        def read() -> StepResult:
            if event is not None:
                event.synchronize()
            return StepResult(
                decodes=read_decodes(), slices=drawn_after(step.slices, read_slices())
            )

        return read

    def _send_beside(self, step: EngineStep, batch: HostBatch | None) -> SentPrompts | None:
        """Send slices that are computed in the pass of a step's decodes; None: these are not."""
        rows = self._rows_beside(len(step.decodes))
        if batch is None or self._prompts is None or not rows:
            return None
        return self._prompts.send_behind(rows, batch)

    def _rows_beside(self, num_decodes: int) -> int:
        return 0 if self._decode is None else self._decode.rows_beside(num_decodes)

    def _launch_decodes(
        self, step: EngineStep, beside: SentPrompts | None
    ) -> tuple[ReadTokens, Tensor | None]:
        """Launch the decodes of a step, and slices beside; return [T, D] of the latter, too."""
        if self._batch is None or self._decode is None:
            assert not step.started, "this engine has no seats"
            return list, None
        self._batch.change(step)
        if not step.decodes:
            return list, None
        drawn = self._decode.launch(
            step.decodes, has_new=bool(step.started), allowed=step.allowed, prompts=beside
        )
        counts = self._batch.num_logprobs
        wanted = {
            row: int(counts[seat]) for row, seat in enumerate(step.decodes) if counts[seat] >= 0
        }
        num_rows = len(step.decodes)
        read = read_later(drawn.tokens_R[:num_rows], drawn.logprobs, wanted, has_all_logprobs=True)
        return read, drawn.hidden_TD

    def _launch_slices(self, batch: HostBatch) -> Tensor:
        if self._prompts is not None and self._prompts.takes(batch):
            return self._prompts.hidden_states(batch)
        return self._decoder.hidden_states(send_batch(batch, self._storage.device))

    def _launch_draws(
        self, slices: Sequence[SequenceSlice], hidden_TD: Tensor | None
    ) -> ReadTokens:
        if not slices or hidden_TD is None:
            return list
        logits_RV = logits_of_draws(self._decoder, slices, hidden_TD)
        if logits_RV is None:
            return list
        return self._sampler.launch(logits_RV, draws_of(slices))

    def _record_event(self) -> Any:
        if self._storage.device.type != "cuda":
            return None
        # A blocking event lets the thread sleep; other threads may need the interpreter meanwhile.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def make_device_runner(
    config: ModelConfig,
    storage: TorchPageStorage,
    decoder: Decoder,
    attention: AttentionBackend,
    *,
    num_seats: int,
    max_step_tokens: int = MAX_RECORDED_TOKENS,
    records_prompts: bool = True,
) -> DeviceRunner:
    """Make the runner of a decoder whose attention uses Triton kernels.

    Args:
        num_seats: Most sequences that decode at once; 0: slices only.
        max_step_tokens: Most tokens of a step.
        records_prompts: Whether to record passes of prompt tokens, too.
    """
    assert isinstance(attention, TritonAttention), "recorded steps need its plans"
    page_size = storage.layout.page_size
    prompts = None
    if records_prompts:
        prompts = GraphedPrompts(
            decoder,
            attention,
            page_size=page_size,
            device=storage.device,
            max_step_tokens=max_step_tokens,
        )
    if num_seats == 0:
        return DeviceRunner(storage, decoder, None, None, prompts)
    max_tokens = min(config.max_context_tokens, storage.num_pages * page_size)
    max_rows = next(size for size in NUM_ROWS if size >= num_seats)
    seats = DeviceSeats(
        num_seats=num_seats,
        pages_per_seat=num_pages_for(max_tokens, page_size),
        page_size=page_size,
        vocab_size=config.vocab_size,
        max_rows=max_rows,
        device=storage.device,
    )
    sampler = TokenSampler(vocab_size=config.vocab_size, max_rows=max_rows, device=storage.device)
    batch = DeviceBatch(seats, config.vocab_size)
    decode = GraphedDecode(decoder, attention, batch, sampler, prompts)
    return DeviceRunner(storage, decoder, batch, decode, prompts)
