import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llm_engine import load_progress
from llm_engine.device_runner import DeviceRunner
from llm_engine.engine import Engine
from llm_engine.engine_step import EngineStep, StepResult
from llm_engine.errors import InvalidLogits, NotEnoughMemory
from llm_engine.load_engine import AttentionName, load_engine
from llm_engine.load_progress import LoadProgress
from llm_engine.memory_plan import MemoryPlan
from llm_engine.sampling import Draw, SamplingParams, SequenceSlice
from tests.llm_engine.driver import chunked_logits, generate, make_sequences, run
from tests.support.checkpoints import write_checkpoint
from worker.executor import ThreadExecutor

VOCAB_SIZE = 211
PARAMS = SamplingParams(max_tokens=24, seed=5, temperature=0.8, top_p=0.95, logprobs=1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, "qwen2", seed=2)
    return folder


@pytest.fixture
def engine(model_dir: Path) -> Engine:
    return load_engine(model_dir, page_size=8, num_pages=160, device="cpu")


def make_prompts(count: int = 9, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 60))] for _ in range(count)]


def prompt_slice(token_ids: list[int], page_ids: Sequence[int]) -> SequenceSlice:
    """A whole prompt in one slice."""
    return SequenceSlice(
        token_ids=token_ids, start=0, page_ids=page_ids, num_prompt_tokens=len(token_ids)
    )


@pytest.mark.parametrize("params", [PARAMS, SamplingParams(temperature=0, max_tokens=24)], ids=str)
def test_tokens_do_not_depend_on_batch_mates_or_chunks(
    engine: Engine, params: SamplingParams
) -> None:
    prompts = make_prompts()

    together = generate(engine, prompts, params)
    alone = [generate(engine, [prompt], params)[0] for prompt in prompts]
    reversed_in_chunks = generate(engine, prompts[::-1], params, chunk_size=5)

    assert alone == together
    assert reversed_in_chunks[::-1] == together


def test_unused_pages_and_slots_never_reach_the_result(engine: Engine) -> None:
    prompts = make_prompts(3)
    expected = generate(engine, prompts)

    engine.storage.pages.fill_(torch.nan)

    assert generate(engine, prompts) == expected


def test_a_resumed_sequence_continues_with_the_same_tokens(engine: Engine) -> None:
    sequences = make_sequences(engine, make_prompts(4), PARAMS)
    run(engine, sequences)
    for each in sequences:
        expected = list(each.tokens)
        del each.tokens[10:]
        each.num_computed = 0

        run(engine, [each])

        assert each.tokens == expected


def test_slices_can_share_pages_that_one_of_them_fills(engine: Engine) -> None:
    prefix, *_ = make_prompts(1, seed=3)
    prefix = (prefix * 16)[:16]
    first, second = make_sequences(engine, [[*prefix, 5], [*prefix, 9]])
    second.page_ids[:2] = first.page_ids[:2]
    engine.forward([prompt_slice(prefix, first.page_ids)])
    first.num_computed = second.num_computed = 16

    run(engine, [first, second])

    assert [first.tokens, second.tokens] == generate(engine, [[*prefix, 5], [*prefix, 9]])


def test_a_sequence_without_finite_logits_draws_nothing_and_others_draw_theirs(
    engine: Engine,
) -> None:
    sequences = make_sequences(engine, make_prompts(3), PARAMS)
    slices = [each.next_slice(1000) for each in sequences]
    engine.forward(slices)
    decodes = [
        replace(each, token_ids=each.token_ids[-1:], start=each.start + len(each.token_ids) - 1)
        for each in slices
    ]
    first, _, last = engine.forward(decodes)

    engine.storage.pages[slices[1].page_ids[0]] = torch.nan

    assert engine.forward(decodes) == [first, None, last]


def test_a_model_without_finite_logits_is_refused_before_it_serves(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_of = engine.decoder.logits
    monkeypatch.setattr(engine.decoder, "logits", lambda hidden: logits_of(hidden) * torch.nan)

    with pytest.raises(InvalidLogits, match="no token can be drawn after tokens 0, 0, 0 of this"):
        engine.warm_up()


def test_several_draws_of_one_slice_equal_single_ones(engine: Engine) -> None:
    prompt = make_prompts(1)[0]
    params = [SamplingParams(seed=seed, logprobs=2) for seed in range(5)]
    page_ids = list(range(10))

    def draw(choices: list[SamplingParams]) -> SequenceSlice:
        sequences = make_sequences(engine, [prompt] * len(choices), SamplingParams())
        draws = []
        for sequence, each in zip(sequences, choices, strict=True):
            sequence.params = each
            draws += sequence.next_slice(1000).draws
        return replace(prompt_slice(prompt, page_ids), draws=tuple(draws))

    undrawn = prompt_slice(prompt[:3], [20])
    nothing, several = engine.forward([undrawn, draw(params)])
    single = [engine.forward([draw([each])])[0][0] for each in params]

    assert nothing == ()
    assert [each.token_id for each in several] == [each.token_id for each in single]
    assert len({each.token_id for each in several}) > 1


def test_pages_moved_to_another_engine_continue_there(engine: Engine, model_dir: Path) -> None:
    other = load_engine(model_dir, page_size=8, num_pages=64, device="cpu")
    prompt = make_prompts(1)[0]
    (here,) = make_sequences(engine, [prompt], PARAMS)
    run(engine, [here])
    expected = list(here.tokens)
    (there,) = make_sequences(other, [prompt], PARAMS)
    there.tokens, there.num_computed = expected[:6], len(prompt) + 5

    other.storage.import_pages(there.page_ids, engine.storage.export_pages(here.page_ids))
    run(other, [there])

    assert other.layout == engine.layout
    assert there.tokens == expected


def test_impossible_slices_are_refused_before_anything_is_written(engine: Engine) -> None:
    def page(token_id: int = 1, start: int = 0, page_ids: tuple[int, ...] = (0,)) -> SequenceSlice:
        return SequenceSlice(
            token_ids=[token_id], start=start, page_ids=page_ids, num_prompt_tokens=1
        )

    before = engine.storage.pages.clone()
    for bad, words in (
        (page(token_id=VOCAB_SIZE), "vocabulary"),
        (page(token_id=-1), "below 0"),
        (page(page_ids=(160,)), "outside the pool"),
        (page(start=512, page_ids=tuple(range(70))), "context"),
        (page(start=8), "too few pages"),
    ):
        with pytest.raises(AssertionError, match=words):
            engine.forward([page(), bad])

    for copies, words in (
        (((0, 1), (2, 1)), "two copies"),
        (((0, 1), (1, 2)), "is overwritten"),
    ):
        with pytest.raises(AssertionError, match=words):
            engine.launch(EngineStep(copies=copies))

    assert torch.equal(engine.storage.pages, before)
    assert engine.forward([]) == []


def test_a_launch_that_fails_waits_for_what_it_has_launched(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages may then be given to a transfer, which does not come behind the launch."""
    happened = []

    def launch(step: EngineStep) -> None:
        happened.append("launched")
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(engine._runner, "launch", launch)
    monkeypatch.setattr(engine.storage, "synchronize", lambda: happened.append("waited"))

    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        engine.launch(EngineStep(slices=(prompt_slice([1, 2, 3], [0]),)))

    assert happened == ["launched", "waited"]


def test_a_step_that_only_copies_pages_has_ended_once_it_is_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = []
    monkeypatch.setattr(engine.storage, "copy_pages", lambda copies: happened.append("copied"))
    monkeypatch.setattr(engine.storage, "synchronize", lambda: happened.append("waited"))

    engine.launch(EngineStep(copies=((0, 1),)))
    engine.read()

    assert happened == ["copied", "waited"]


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["triton", "torch"])
def test_nothing_runs_on_a_gpu_after_a_step_that_failed_or_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: AttentionName
) -> None:
    write_checkpoint(tmp_path, "llama", head_dim=64)
    engine = load_engine(tmp_path, page_size=16, num_pages=16, device="cuda", attention=attention)
    prompt = EngineStep(slices=(prompt_slice([1, 2, 3], [0]),))
    engine.launch(prompt)
    engine.read()
    stream = torch.cuda.current_stream()

    torch.cuda._sleep(500_000_000)  # cycles: a quarter of a second
    engine.launch(EngineStep(copies=((0, 1),)))
    engine.read()
    assert stream.query(), "a copy still runs"

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(engine.decoder, "logits", fail)
    torch.cuda._sleep(500_000_000)
    draw = Draw(params=PARAMS, seed=0, position=3, prompt_token_ids=[1, 2, 3], output_token_ids=[])
    drawn = replace(prompt.slices[0], draws=(draw,))
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        engine.launch(EngineStep(slices=(drawn,)))
    assert stream.query(), "the pass still writes its pages"


def test_the_engine_runs_in_its_thread_after_a_warm_up(engine: Engine) -> None:
    engine.warm_up()
    (sequence,) = make_sequences(engine, make_prompts(1))
    executor = ThreadExecutor(engine, max_call_s=60.0)

    async def step() -> StepResult:
        await executor.launch(EngineStep(slices=(sequence.next_slice(1000),)))
        return await executor.read()

    [[token]] = asyncio.run(step()).slices
    executor.close()

    assert 0 <= token.token_id < VOCAB_SIZE


def test_half_precision_is_a_choice_and_float32_the_default_on_a_cpu(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)

    default = load_engine(tmp_path, page_size=8, num_pages=40, device="cpu")
    chosen = load_engine(tmp_path, page_size=8, num_pages=40, device="cpu", dtype="bfloat16")

    assert default.config.dtype == "bfloat16"
    assert default.layout.dtype == "float32"
    assert chosen.storage.pages.dtype == torch.bfloat16
    assert len(generate(chosen, [[5, 6, 7]])[0]) == 64


def test_bad_arguments_are_named(model_dir: Path) -> None:
    def load(**changes: object) -> None:
        arguments = {"page_size": 8, "num_pages": 4, "device": "cpu"} | changes
        load_engine(model_dir, **arguments)  # type: ignore[arg-type]

    for changes in (
        {"dtype": "int8"},
        {"attention": "magic"},
        {"device": "mps"},
        {"device": "cuda:99"},
        {"num_pages": 0},
        {"page_size": 0},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(changes))} is"):
            load(**changes)


def test_a_small_pool_bounds_the_sequences_it_serves(model_dir: Path) -> None:
    engine = load_engine(model_dir, page_size=8, num_pages=2, device="cpu")

    engine.forward([prompt_slice([1] * 16, [0, 1])])

    with pytest.raises(AssertionError, match="pool"):
        engine.forward([prompt_slice([1] * 17, [0, 1, 1])])


def test_auto_takes_as_many_pages_as_the_budget_holds(model_dir: Path) -> None:
    memory = MemoryPlan(cpu_pool_bytes=100_000)

    engine = load_engine(model_dir, page_size=8, num_pages="auto", device="cpu", memory=memory)

    assert engine.storage.num_pages == 100_000 // engine.layout.page_bytes


def test_the_memory_plan_leaves_room_and_says_when_there_is_none() -> None:
    plan = MemoryPlan(cuda_free_fraction=0.5, activation_reserve_bytes=1000, cpu_pool_bytes=10)

    assert plan.num_pages_on_cuda(free_bytes=10_000, page_bytes=100) == 40
    with pytest.raises(NotEnoughMemory, match="one page"):
        plan.num_pages_on_cuda(free_bytes=2_100, page_bytes=100)
    with pytest.raises(NotEnoughMemory, match="cpu_pool_bytes is 10"):
        plan.num_pages_on_cpu(page_bytes=11)
    with pytest.raises(ValueError, match="cuda_free_fraction"):
        MemoryPlan(cuda_free_fraction=0)
    with pytest.raises(ValueError, match="workers_per_gpu is 0"):
        MemoryPlan(workers_per_gpu=0)


def test_loading_reports_now_and_then_and_at_the_end() -> None:
    reports = []
    now = [0.0]
    progress = LoadProgress(10, lambda *loaded: reports.append(loaded), clock=lambda: now[0])

    for at in (0.1, 0.4, 0.6, 0.7, 1.0, 1.2, 1.3, 1.4):
        now[0] = at
        progress.advance(1)
    progress.advance(2)

    assert reports == [(3, 10), (6, 10), (10, 10)]


def test_what_loads_at_once_reports_nothing() -> None:
    progress = LoadProgress(1, lambda *_: pytest.fail("it is loaded"), clock=lambda: 0.0)

    progress.advance(1)


def test_an_engine_reports_how_far_all_its_weights_are(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_progress, "REPORT_PERIOD_S", 0.0)
    reports: list[tuple[int, int]] = []

    load_engine(
        model_dir,
        page_size=8,
        num_pages=2,
        device="cpu",
        report_loaded=lambda *loaded: reports.append(loaded),
    )

    [total_bytes] = {total for _, total in reports}
    loaded = [done for done, _ in reports]
    assert loaded == sorted(set(loaded))
    assert 0 < loaded[0] < loaded[-1] == total_bytes


@pytest.mark.parametrize("window", [None, 13])
def test_the_triton_path_computes_the_same_logits_and_digests(
    tmp_path: Path, window: int | None
) -> None:
    # Kernels that are first imported inside the context would stay interpreted.
    from llm_engine import attention_triton, operations_triton  # noqa: F401
    from tests.support.triton_interpreter import interpreted

    write_checkpoint(tmp_path, "mistral", head_dim=16, sliding_window=window, num_hidden_layers=2)
    prompt = make_prompts(1)[0] * 4
    torch_engine = load_engine(tmp_path, page_size=16, num_pages=8, device="cpu")
    expected = chunked_logits(torch_engine, prompt, [5, 1, 30])

    with interpreted():
        engine = load_engine(tmp_path, page_size=16, num_pages=8, device="cpu", attention="triton")
        logits = chunked_logits(engine, prompt, [5, 1, 30])
        engine.storage.pages.copy_(torch_engine.storage.pages)
        engine.storage.copy_pages([(7, 2), (0, 5)])
        digests = engine.storage.digest_pages([7, 0, 2, 5])

    assert (logits - expected).abs().max() < 1e-4
    assert digests == 2 * torch_engine.storage.digest_pages([7, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"head_dim": 64}),
        ("mistral", {"head_dim": 64, "sliding_window": 13}),
        ("qwen2", {"hidden_size": 320, "num_attention_heads": 5, "num_key_value_heads": 1}),
        ("qwen3", {"head_dim": 128}),
    ],
    ids=["llama", "mistral-window", "qwen2", "qwen3"],
)
def test_triton_and_torch_attention_agree_on_cuda(
    tmp_path: Path, family: str, changes: dict[str, int], dtype: str
) -> None:
    write_checkpoint(tmp_path, family, **changes)
    prompt = make_prompts(1)[0] * 3
    logits = []
    tokens = []
    for attention in ("triton", "torch"):
        engine = load_engine(
            tmp_path,
            page_size=16,
            num_pages=160,
            device="cuda",
            dtype=dtype,
            attention=attention,  # type: ignore[arg-type]
        )
        logits.append(chunked_logits(engine, prompt, [17, 1, 30, 5]))
        tokens.append(generate(engine, make_prompts(), chunk_size=7))
    reference = load_engine(tmp_path, page_size=16, num_pages=160, device="cpu")
    exact = chunked_logits(reference, prompt, [1000])

    # Half precision keeps 8 bits, and a few layers add up; float32 is all but equal.
    tolerance = 5e-4 if dtype == "float32" else 0.1
    assert (logits[0] - logits[1]).std() < tolerance * exact.std()
    assert (logits[0] - exact).std() < tolerance * exact.std()
    if dtype == "float32":
        assert tokens[0] == tokens[1] == generate(reference, make_prompts(), chunk_size=7)


def test_a_thread_sleeps_while_it_waits_for_a_step_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[dict[str, bool]] = []

    class Event:
        def __init__(self, **options: bool) -> None:
            made.append(options)

        def record(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    runner = object.__new__(DeviceRunner)
    runner._storage = SimpleNamespace(device=torch.device("cuda"))  # type: ignore[assignment]

    assert isinstance(runner._record_event(), Event)

    assert made == [{"blocking": True}]


@pytest.mark.gpu
def test_gpu_memory_tells_tensors_from_what_the_allocator_keeps(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", head_dim=64)
    engine = load_engine(tmp_path, page_size=16, num_pages=16, device="cuda")
    before = engine.gpu_memory
    tensor = torch.empty(96 * 2**20, dtype=torch.uint8, device="cuda")
    held = engine.gpu_memory
    del tensor
    after = engine.gpu_memory

    assert before.allocated_bytes >= engine.storage.pages.nbytes
    assert held.allocated_bytes - before.allocated_bytes == 96 * 2**20
    assert after.allocated_bytes == before.allocated_bytes
    assert after.reserved_bytes == held.reserved_bytes >= held.allocated_bytes
