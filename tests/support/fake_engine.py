"""A model without weights whose tokens prove that every page it read was the right one.

Slot i of a sequence holds h_i = H(h_{i-1}, token_i), where h_{i-1} is read from the pages, and a
drawn token is a hash of all slots of the sequence as the pages hold them. A page that is stale,
foreign, half written or out of order changes the tokens; `fake_tokens` says from the prompt alone
what they must be. One oracle thus checks pool, tree, transfer and resumption at once.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from grammars.bits import TokenBits
from kv_cache.layout import KVLayout, num_pages_for
from kv_cache.page_pool import PageState
from kv_cache.page_storage import PageBytes
from kv_cache.prefix_cache import PrefixCache
from kv_cache.radix_tree import TreePage
from llm_engine.engine_api import FULL_SHARE, GpuMemory
from llm_engine.engine_step import EngineStep, StepResult
from llm_engine.host_seats import HostSeats
from llm_engine.kv_reads import KVReads, flat_reads
from llm_engine.sampling import (
    Draw,
    Drawn,
    SampledToken,
    SamplingParams,
    SequenceSlice,
    choice_seed,
)
from tests.support.token_bits import token_ids

TILE_ROWS = 4  # a pass of a multiple of it is full
SLOT_BYTES = 16  # one layer, one head, K and V of two float32 each


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeModel:
    """Everything that the tokens depend on besides the request."""

    name: str = "fake"
    vocab_size: int = 1000
    eos_token_ids: tuple[int, ...] = (0,)

    @property
    def fingerprint(self) -> str:
        material = f"{self.name}/{self.vocab_size}/{self.eos_token_ids}".encode()
        return hashlib.blake2b(material, digest_size=16).hexdigest()

    @property
    def first_hash(self) -> bytes:
        """h_{-1}: what stands before the first slot."""
        return bytes.fromhex(self.fingerprint)

    def extend(self, previous: bytes, token_ids: Sequence[int]) -> list[bytes]:
        """Return the slots of tokens that follow the slot `previous`."""
        slots = []
        for token_id in token_ids:
            material = previous + int(token_id).to_bytes(8, "little")
            previous = hashlib.blake2b(material, digest_size=SLOT_BYTES).digest()
            slots.append(previous)
        return slots

    def draw(self, slots: bytes, draw: Draw) -> SampledToken:
        """Draw from the slots of a whole sequence, concatenated.

        Greedy draws do not depend on the seed, and penalties depend on the tokens that they are
        about, as with a real model.
        """
        params = draw.params
        state = hashlib.blake2b(slots, digest_size=16)
        state.update(draw.position.to_bytes(8, "little"))
        if params.temperature != 0:
            state.update(draw.seed.to_bytes(8, "little"))
        if params.has_penalties:
            state.update(repr((list(draw.prompt_token_ids), list(draw.output_token_ids))).encode())
        ranked: list[int] = []  # distinct drawable tokens, the drawn one first
        banned = set(draw.banned_token_ids)
        if draw.allowed is not None:
            banned |= set(range(self.vocab_size)) - set(token_ids(draw.allowed))
        num_drawable = self.vocab_size - len(banned)
        assert num_drawable > 0, "every token is banned"
        num_wanted = min(max(1, params.logprobs or 0), num_drawable)
        while len(ranked) < num_wanted:
            state.update(b"next")
            token_id = int.from_bytes(state.digest(), "little") % self.vocab_size
            if token_id not in banned and token_id not in ranked:
                ranked.append(token_id)
        if params.logprobs is None:
            return SampledToken(token_id=ranked[0])
        top = tuple((token_id, -0.5 - rank) for rank, token_id in enumerate(ranked))
        return SampledToken(
            token_id=ranked[0], logprob=top[0][1], top_logprobs=top[: params.logprobs]
        )


def fake_tokens(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    model: FakeModel,
    choice: int = 0,
    max_context_tokens: int | None = None,
    allowed_after: Callable[[Sequence[int]], TokenBits | None] = lambda output: None,
) -> list[int]:
    """Return all tokens that a request must get: the oracle, a pure function of tokens.

    The list ends with the end or stop token where there is one, or after `max_tokens`, or when
    prompt and output fill the context.

    Args:
        allowed_after: Returns the only tokens that may follow an output; None: any may.
    """
    end_tokens = params.stop_token_ids + (() if params.ignore_eos else model.eos_token_ids)
    seed = choice_seed(params.seed, choice)
    slots = model.extend(model.first_hash, prompt)
    tokens: list[int] = []
    limit = params.max_tokens
    if max_context_tokens is not None:
        limit = min(limit, max_context_tokens - len(prompt))
    while len(tokens) < limit:
        draw = Draw(
            params=params,
            seed=seed,
            position=len(slots),
            prompt_token_ids=prompt,
            output_token_ids=tokens,
            banned_token_ids=end_tokens if len(tokens) < params.min_tokens else (),
            allowed=allowed_after(tokens),
        )
        token_id = model.draw(b"".join(slots), draw).token_id
        tokens.append(token_id)
        if token_id in end_tokens:
            break
        slots += model.extend(slots[-1], [token_id])
    return tokens


class FakePageStorage:
    """Pages in one numpy array; implements kv_cache.page_storage.PageStorage."""

    def __init__(self, *, num_pages: int, page_size: int) -> None:
        self.slots: npt.NDArray[np.uint8] = np.zeros(
            (num_pages, page_size, SLOT_BYTES), dtype=np.uint8
        )

    @property
    def num_pages(self) -> int:
        return int(self.slots.shape[0])

    @property
    def page_bytes(self) -> int:
        return int(self.slots.shape[1]) * SLOT_BYTES

    def export_pages(self, page_ids: Sequence[int]) -> PageBytes:
        # Indexing with a list copies.
        return self.slots[self._index(page_ids)].reshape(-1, self.page_bytes)

    def import_pages(self, page_ids: Sequence[int], contents: PageBytes) -> None:
        self.slots[self._index(page_ids)] = contents.reshape(-1, *self.slots.shape[1:])

    def digest_pages(self, page_ids: Sequence[int]) -> list[bytes]:
        return [
            hashlib.blake2b(self.slots[page_id].tobytes(), digest_size=16).digest()
            for page_id in self._index(page_ids).tolist()
        ]

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        sources, targets = (self._index([copy[side] for copy in copies]) for side in (0, 1))
        assert len(set(targets.tolist())) == len(copies), "two copies to one page"
        assert not np.isin(sources, targets).any(), "a page is copied that is overwritten"
        self.slots[targets] = self.slots[sources]

    def _index(self, page_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        index = np.asarray(page_ids, dtype=np.int64)
        # A negative id would silently count from the end.
        assert ((index >= 0) & (index < self.num_pages)).all(), "page id out of range"
        return index


def check_cached_pages(cache: PrefixCache, storage: FakePageStorage, model: FakeModel) -> None:
    """Assert that each page that others may find holds the slots of its tokens, all of them."""
    slots_of: dict[int, bytes] = {}  # page id |-> what it must hold

    def expected(page: TreePage) -> bytes:
        if page.page_id not in slots_of:
            above = cache.tree.above(page)
            before = model.first_hash if above is None else expected(above)[-SLOT_BYTES:]
            tokens = np.frombuffer(page.tokens, dtype="<u4").tolist()
            slots_of[page.page_id] = b"".join(model.extend(before, tokens))
        return slots_of[page.page_id]

    for page in cache.tree:
        if page.is_ready:
            found = storage.slots[page.page_id].tobytes()
            assert found == expected(page), f"page {page.page_id} is cached, but not computed"


def overwrite_free_pages(cache: PrefixCache, storage: FakePageStorage) -> None:
    """Let whoever still reads a page that nobody holds get other tokens by it."""
    for page_id in range(storage.num_pages):
        if cache.pool.state(page_id) is PageState.FREE:
            storage.slots[page_id] = 0xFF


class FakeEngine:
    """Implements engine_api.EngineLike over a FakePageStorage.

    `num_computed_tokens` counts every token computed since the start; `num_passes` every pass. A
    step runs when it is read, so that pages which are given away or overwritten between its launch
    and its end change the tokens.

    Args:
        unit_len: Least tokens that its attention reads once for all rows that share them, as the
            planner of cascade attention tells where sharing costs nothing; 0: it is flat.
    """

    def __init__(
        self,
        model: FakeModel,
        *,
        num_pages: int,
        page_size: int,
        max_launched: int = 2,
        unit_len: int = 0,
    ) -> None:
        self.model = model
        self.max_launched = max_launched
        self._unit_len = unit_len
        self._seats = HostSeats()
        self.prompts: dict[int, tuple[int, ...]] = {}  # seat |-> prompt of who took it last
        self._launched: deque[EngineStep] = deque()
        self.num_computed_tokens = 0
        self.num_passes = 0
        self._storage = FakePageStorage(num_pages=num_pages, page_size=page_size)
        self._layout = KVLayout(
            num_layers=1,
            num_kv_heads=1,
            page_size=page_size,
            head_dim=2,
            dtype="float32",
            model_fingerprint=model.fingerprint,
        )

    @property
    def layout(self) -> KVLayout:
        return self._layout

    @property
    def storage(self) -> FakePageStorage:
        return self._storage

    @property
    def gpu_memory(self) -> GpuMemory:
        return GpuMemory()

    def full_pass(self, num_decodes: int, most: int) -> int:
        full = most - (num_decodes + most) % TILE_ROWS
        return full if full >= FULL_SHARE * most else most

    def launch(self, step: EngineStep) -> None:
        assert len(self._launched) < self.max_launched, "read comes before another launch"
        self._launched.append(step)

    def read(self) -> StepResult:
        step = self._launched.popleft()
        self._storage.copy_pages(step.copies)
        self._seats.change(step)
        self.prompts |= {each.seat: tuple(each.prompt_token_ids) for each in step.started}
        num_decodes = len(step.decodes)
        slices = [*self._seats.slices(step.decodes, step.allowed), *step.slices]
        drawn = self.forward(slices)
        decodes = [tokens[0] if tokens else None for tokens in drawn[:num_decodes]]
        self._seats.take(step.decodes, decodes)
        return StepResult(decodes=decodes, slices=drawn[num_decodes:], reads=self._reads(slices))

    def record_next(self) -> bool:
        return False

    def forward(self, slices: Sequence[SequenceSlice]) -> list[Drawn]:
        """Compute slices in one pass and draw."""
        for each in slices:
            each.check(self._layout.page_size)
        _assert_no_page_written_twice(slices, self._layout.page_size)
        for each in slices:
            self._compute(each)
        self.num_passes += 1
        return [self._draw(each) for each in slices]

    def _reads(self, slices: Sequence[SequenceSlice]) -> KVReads:
        rows = [
            (each.start + index + 1, each.page_ids)
            for each in slices
            for index in range(each.prompt_len, len(each.token_ids))
        ]
        kv_lens = [kv_len for kv_len, _ in rows]
        flat = flat_reads(sum(kv_lens), SLOT_BYTES)
        if not self._unit_len:
            return flat
        from tests.support.free_sharing import plan_free  # which imports torch

        tables = [page_ids for _, page_ids in rows]
        page_size = self._layout.page_size
        plan = plan_free(kv_lens, tables, page_size=page_size, unit_len=self._unit_len)
        return replace(
            flat,
            read_bytes=flat.read_bytes - plan.num_spared * SLOT_BYTES,
            groups=plan.num_groups,
            grouped_rows=plan.num_grouped,
        )

    def _compute(self, each: SequenceSlice) -> None:
        page_size = self._layout.page_size
        previous = self.model.first_hash
        if each.start:
            page_idx, offset = divmod(each.start - 1, page_size)
            previous = self._storage.slots[each.page_ids[page_idx], offset].tobytes()
        new_slots = b"".join(self.model.extend(previous, each.token_ids))
        positions = np.arange(each.start, each.start + len(each.token_ids))
        pages = np.asarray(each.page_ids, dtype=np.int64)[positions // page_size]
        self._storage.slots[pages, positions % page_size] = np.frombuffer(
            new_slots, dtype=np.uint8
        ).reshape(-1, SLOT_BYTES)
        self.num_computed_tokens += len(each.token_ids)

    def _draw(self, each: SequenceSlice) -> tuple[SampledToken, ...]:
        if not each.draws:
            return ()
        kv_len = each.start + len(each.token_ids)
        num_pages = num_pages_for(kv_len, self._layout.page_size)
        contents = self._storage.slots[np.asarray(each.page_ids[:num_pages], dtype=np.int64)]
        slots = contents.reshape(-1, SLOT_BYTES)[:kv_len].tobytes()
        return tuple(self.model.draw(slots, draw) for draw in each.draws)


def _assert_no_page_written_twice(slices: Sequence[SequenceSlice], page_size: int) -> None:
    written: set[int] = set()
    for each in slices:
        first = each.start // page_size
        last = num_pages_for(each.start + len(each.token_ids), page_size)
        pages = list(each.page_ids[first:last])
        assert written.isdisjoint(pages), "two slices of a batch write the same page"
        written.update(pages)
