"""Runs an engine over whole requests, as a worker would: the smallest possible scheduler."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_kernels.sampling import reference
from grammars.bits import TokenBits
from grammars.matcher import Grammar
from kv_cache.layout import num_pages_for
from llm_engine.device_runner import DeviceRunner, make_device_runner
from llm_engine.engine import Engine
from llm_engine.engine_api import EngineLike
from llm_engine.engine_step import EngineStep, SeatPages, SeatStart
from llm_engine.forward_batch import build_forward_batch
from llm_engine.load_engine import load_engine
from llm_engine.sampler import Sampler, TokenSampler
from llm_engine.sampling import Draw, SampledToken, SamplingParams, SequenceSlice
from tests.support.checkpoints import write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=64)


def sample(
    logits: Tensor,
    draws: Sequence[Draw],
    kind: Callable[..., TokenSampler] = reference.TokenSampler,
) -> list[SampledToken | None]:
    """Draw one token per row, and wait for it."""
    read = Sampler(kind).launch(logits, draws)
    if logits.is_cuda:
        torch.cuda.synchronize()
    return read()


@dataclass(kw_only=True)
class DrivenSequence:
    prompt: list[int]
    page_ids: list[int]
    params: SamplingParams = field(default_factory=lambda: GREEDY)
    tokens: list[int] = field(default_factory=list)
    drawn: list[SampledToken] = field(default_factory=list)
    num_computed: int = 0
    grammar: Grammar | None = None  # what its text is held to
    end_token_ids: tuple[int, ...] = ()  # that end such a text
    resumed: list[int] = field(default_factory=list)  # tokens of an earlier call

    def restart(self, num_computed: int = 0) -> None:
        """Forget what was computed and drawn, but for what the pages hold before, if anything."""
        self.tokens = list(self.resumed)
        self.drawn = []
        self.num_computed = num_computed

    @property
    def is_ended(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.end_token_ids

    def allowed(self) -> TokenBits | None:
        """Return what may come next: the whole text is matched anew, as after a resumption."""
        if self.grammar is None:
            return None
        matcher = self.grammar.begin()
        matcher.accept(self.tokens)
        return matcher.allowed()

    def next_slice(self, chunk_size: int) -> SequenceSlice:
        known = self.prompt + self.tokens
        chunk = known[self.num_computed : self.num_computed + chunk_size]
        start = self.num_computed
        self.num_computed += len(chunk)
        is_last = self.num_computed == len(known)
        draw = Draw(
            params=self.params,
            seed=self.params.seed,
            position=len(known),
            prompt_token_ids=self.prompt,
            output_token_ids=list(self.tokens),
            allowed=self.allowed() if is_last else None,
        )
        return SequenceSlice(
            token_ids=chunk,
            start=start,
            page_ids=self.page_ids,
            num_prompt_tokens=len(self.prompt),
            draws=(draw,) if is_last else (),
        )

    def take(self, drawn: Sequence[SampledToken]) -> None:
        for token in drawn:
            self.tokens.append(token.token_id)
            self.drawn.append(token)


def make_sequences(
    engine: EngineLike, prompts: Sequence[list[int]], params: SamplingParams = GREEDY
) -> list[DrivenSequence]:
    """Give every sequence its pages, scattered over the pool."""
    page_size = engine.layout.page_size
    num_pages = [num_pages_for(len(prompt) + params.max_tokens, page_size) for prompt in prompts]
    pool = list(range(engine.storage.num_pages))
    scattered = pool[1::2][::-1] + pool[0::2]
    assert sum(num_pages) <= len(pool), "the test's pool is too small"
    sequences = []
    for prompt, count in zip(prompts, num_pages, strict=True):
        sequences.append(
            DrivenSequence(prompt=list(prompt), page_ids=scattered[:count], params=params)
        )
        scattered = scattered[count:]
    return sequences


def run(
    engine: EngineLike,
    sequences: Sequence[DrivenSequence],
    *,
    chunk_size: int = 10**6,
    grows: bool = False,
    is_prefilled: bool = False,
    num_seats: int | None = None,
) -> None:
    """Compute all sequences in common steps, as far ahead of their tokens as the engine allows.

    Known tokens come in chunks while other sequences decode in seats. With `grows` a sequence gets
    a page only when a token needs it; with `is_prefilled` it begins in its seat. `num_seats` lets
    sequences wait for the seats of others.
    """
    runs = [_Run(each, grows) for each in sequences]
    free = list(range(num_seats or len(runs)))
    ended: list[int] = []  # seats, of which the engine is to hear
    for each in runs:
        each.is_prefilled = is_prefilled
    launched: deque[tuple[list[_Run], list[_Run]]] = deque()
    while True:
        unread = [each for decoded, _ in launched for each in decoded]
        for each in runs:
            if each.may_decode and each.seat < 0 and free:
                each.seat = free.pop()  # as a worker does: rows and seats differ in order
        decoding = [
            each
            for each in runs
            if each.may_decode and each.seat >= 0 and not (each.sequence.grammar and each in unread)
        ]
        chunked = [each for each in runs if each.has_chunk]
        if decoding or chunked:
            started = tuple(each.start() for each in decoding if not each.is_seated)
            extended = [more for each in decoding for more in each.next_token(engine)]
            slices = tuple(each.next_chunk(chunk_size) for each in chunked)
            decodes = tuple(each.seat for each in decoding)
            held = [each for each in decoding if each.sequence.grammar]
            engine.launch(
                EngineStep(
                    ended=tuple(ended),
                    started=started,
                    extended=tuple(extended),
                    decodes=decodes,
                    allowed={each.seat: some(each.sequence.allowed()) for each in held},
                    slices=slices,
                )
            )
            ended.clear()
            launched.append((decoding, chunked))
        if not launched:
            break
        if len(launched) == engine.max_launched or not (decoding or chunked):
            result = engine.read()
            decoded, sliced = launched.popleft()
            for each, token in zip(decoded, result.decodes, strict=True):
                assert token is not None
                each.sequence.take((token,))
                if each.sequence.is_ended:
                    each.num_left = 0
                if each.num_left == 0 and not any(each in others for others, _ in launched):
                    ended.append(each.seat)
                    free.append(each.seat)
                    each.seat = -1
            for each, drawn in zip(sliced, result.slices, strict=True):
                assert drawn is not None
                each.sequence.take(drawn)
                each.num_left -= len(drawn)
                each.is_prefilled = bool(drawn)
                if each.sequence.is_ended:
                    each.num_left = 0
    engine.launch(EngineStep(ended=tuple(ended)))
    engine.read()


def some(bits: TokenBits | None) -> TokenBits:
    assert bits is not None
    return bits


class _Run:
    """How far a sequence is launched."""

    def __init__(self, sequence: DrivenSequence, grows: bool) -> None:
        self.seat = -1  # none
        self.sequence = sequence
        self.num_left = sequence.params.max_tokens - len(sequence.tokens)  # to be drawn
        self.is_prefilled = False  # its next token is drawn in a seat
        self.is_seated = False
        self._grows = grows
        self._num_pages = 0  # that the engine knows of

    @property
    def may_decode(self) -> bool:
        return self.is_prefilled and self.num_left > 0

    @property
    def has_chunk(self) -> bool:
        num_known = len(self.sequence.prompt) + len(self.sequence.tokens)
        is_computed = self.sequence.num_computed >= num_known
        return not (self.is_prefilled or is_computed) and self.num_left > 0

    def next_chunk(self, chunk_size: int) -> SequenceSlice:
        return self.sequence.next_slice(chunk_size)

    def start(self) -> SeatStart:
        sequence = self.sequence
        self.is_seated = True
        self._num_pages = len(sequence.page_ids)
        if self._grows:
            self._num_pages = num_pages_for(sequence.num_computed + 1, 16)
        return SeatStart(
            seat=self.seat,
            prompt_token_ids=sequence.prompt,
            output_token_ids=list(sequence.tokens),
            page_ids=sequence.page_ids[: self._num_pages],
            params=sequence.params,
            choice=0,
            eos_token_ids=(),
        )

    def next_token(self, engine: EngineLike) -> list[SeatPages]:
        """Count a token that is launched; return the page that it needs, if it needs one."""
        self.num_left -= 1
        self.sequence.num_computed += 1
        num_needed = num_pages_for(self.sequence.num_computed, engine.layout.page_size)
        if num_needed <= self._num_pages:
            return []
        more = tuple(self.sequence.page_ids[self._num_pages : num_needed])
        self._num_pages = num_needed
        return [SeatPages(seat=self.seat, page_ids=more)]


def small_engine(
    folder: Path, family: str = "llama", *, num_layers: int = 1, num_pages: int = 60, **config: Any
) -> Engine:
    """Return an engine of bfloat16 and pages of 16 tokens that launches kernel by kernel."""
    write_checkpoint(
        folder,
        family,
        num_hidden_layers=num_layers,
        hidden_size=32,
        dtype=torch.bfloat16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        **config,
    )
    return load_engine(
        folder,
        page_size=16,
        num_pages=num_pages,
        device="cpu",
        dtype="bfloat16",
        attention="triton",
    )


def recording(engine: Engine, *, num_seats: int, **options: Any) -> Engine:
    """Return an engine over the same pages that records passes and runs ahead of the host."""
    runner = make_device_runner(
        engine.config,
        engine.storage,
        engine.decoder,
        engine.decoder._attention,
        num_seats=num_seats,
        **options,
    )
    return Engine(engine.config, engine.storage, engine.decoder, runner)


def record_all(engine: Engine) -> int:
    """Record what is not, as a worker does while nothing is to be computed; return how much."""
    num_recorded = 0
    while engine.record_next():
        num_recorded += 1
    return num_recorded


def runner_of(engine: Engine) -> DeviceRunner:
    assert isinstance(engine._runner, DeviceRunner)
    return engine._runner


# Of each sequence: what was drawn, and the K and V of its computed positions.
Results = list[tuple[list[SampledToken], Tensor]]


def results_of(
    engine: Engine,
    sequences: Sequence[DrivenSequence],
    *,
    chunk_size: int = 10**6,
    shared_pages: Sequence[int] = (),
    grows: bool = False,
    num_seats: int | None = None,
) -> Results:
    """Run sequences from their prompts on, over pages full of NaN.

    All begin with `shared_pages`, of which each finds the same random contents.
    """
    pages = engine.storage.pages
    pages.fill_(torch.nan)
    found = (len(shared_pages), *pages.shape[1:])
    generator = torch.Generator().manual_seed(0)
    pages[list(shared_pages)] = torch.randn(found, generator=generator).to(pages.dtype)
    for each in sequences:
        each.restart(len(shared_pages) * engine.layout.page_size)
    run(engine, sequences, chunk_size=chunk_size, grows=grows, num_seats=num_seats)
    return [(each.drawn, computed_kv(engine, each)) for each in sequences]


def assert_equal(found: Results, expected: Results) -> None:
    """Of log probabilities only how many there are: their last bits may differ."""
    for (tokens, kv), (expected_tokens, expected_kv) in zip(found, expected, strict=True):
        assert [_outline(each) for each in tokens] == [_outline(each) for each in expected_tokens]
        assert torch.equal(kv, expected_kv)


def _outline(token: SampledToken) -> tuple[int, bool, int]:
    return token.token_id, token.logprob is None, len(token.top_logprobs)


def computed_kv(engine: Engine, sequence: DrivenSequence) -> Tensor:
    """Return copies of K and V of all computed positions, [layers, 2, heads, positions, head_dim].

    As integers of the elements' size: equality is of bits, and NaN equals itself.
    """
    contents = engine.storage.pages[sequence.page_ids]  # [P, layers, 2, K, page_size, H]
    kv = contents.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, : sequence.num_computed]
    bits = torch.int32 if kv.element_size() == 4 else torch.int16
    return kv.contiguous().view(bits)


def chunked_logits(engine: Engine, token_ids: list[int], chunk_sizes: list[int]) -> Tensor:
    """Return the logits after every token, the tokens computed chunk by chunk over the pages."""
    page_ids = list(range(engine.storage.num_pages))[::-1]
    logits: list[Tensor] = []
    start = 0
    while start < len(token_ids):
        size = chunk_sizes[len(logits) % len(chunk_sizes)]
        chunk = SequenceSlice(
            token_ids=token_ids[start : start + size],
            start=start,
            page_ids=page_ids,
            num_prompt_tokens=len(token_ids),
        )
        batch = build_forward_batch([chunk], engine.layout.page_size, engine.storage.device)
        with torch.inference_mode():
            logits.append(engine.decoder.logits(engine.decoder.hidden_states(batch)))
        start += size
    return torch.cat(logits).float().cpu()


def generate(
    engine: EngineLike,
    prompts: Sequence[list[int]],
    params: SamplingParams = GREEDY,
    *,
    chunk_size: int = 10**6,
) -> list[list[int]]:
    """Return the tokens of each prompt, computed together."""
    sequences = make_sequences(engine, prompts, params)
    run(engine, sequences, chunk_size=chunk_size)
    return [each.tokens for each in sequences]
