"""Runs a step while the host waits: all seats and slices in one pass, tokens known at once."""

from collections.abc import Sequence

from kv_cache.torch_storage import TorchPageStorage
from llm_engine.engine import ReadResult
from llm_engine.engine_step import EngineStep, StepResult
from llm_engine.host_seats import HostSeats
from llm_engine.sampler import Sampler
from llm_engine.sampling import Drawn, SequenceSlice
from llm_engine.slice_pass import drawn_after, draws_of, run_slices
from llm_engine.transformer import Decoder


class HostRunner:
    """Implements engine.Runner on any device, with any attention back end."""

    max_launched = 1

    def __init__(self, storage: TorchPageStorage, decoder: Decoder) -> None:
        self._storage = storage
        self._decoder = decoder
        self._sampler = Sampler()
        self._seats = HostSeats()

    def warm_up(self, *, max_tokens: int) -> None:
        """Nothing is recorded."""

    def record_next(self) -> bool:
        return False

    def full_pass(self, num_decodes: int, most: int) -> int:
        return most  # no pass is padded

    def launch(self, step: EngineStep) -> ReadResult:
        self._seats.change(step)
        slices = [*self._seats.slices(step.decodes, step.allowed), *step.slices]
        drawn = self._run(slices)
        num_decodes = len(step.decodes)
        decodes = [tokens[0] if tokens else None for tokens in drawn[:num_decodes]]
        self._seats.take(step.decodes, decodes)
        result = StepResult(decodes=decodes, slices=drawn[num_decodes:])
        return lambda: result

    def _run(self, slices: Sequence[SequenceSlice]) -> list[Drawn]:
        logits_RV = run_slices(self._storage, self._decoder, slices) if slices else None
        read = list if logits_RV is None else self._sampler.launch(logits_RV, draws_of(slices))
        # Then the tokens are on the host, and the pages are final, those too that were only copied.
        self._storage.synchronize()
        return drawn_after(slices, read())
