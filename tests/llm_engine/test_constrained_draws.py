"""Under a constraint an engine draws what it would if all other logits were -inf, on each path."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_kernels.sampling import launch, reference
from grammars.bits import TokenBits
from grammars.constraint import Constraint
from grammars.matcher import Grammar, Vocabulary
from grammars.vocabulary import ModelTokens
from llm_engine import operations_triton  # noqa: F401  # else it stays interpreted
from llm_engine.engine import Engine
from llm_engine.load_engine import load_engine
from llm_engine.sampling import Draw, SamplingParams
from tests.llm_engine.driver import DrivenSequence, recording, run, sample
from tests.llm_engine.launch_recorder import LaunchRecorder
from tests.support.checkpoints import reference_logits, write_checkpoint
from tests.support.grammar_cases import (
    CONSTRAINTS,
    JSON_OBJECT,
    choice,
    follows,
    json_schema,
    regex,
)
from tests.support.token_bits import token_ids

END = 256
TOKENS = [*(bytes([byte]) for byte in range(256)), b"", b"", b'{"', b'": ', b"12", b"ab", b", "]
VOCAB_SIZE = 270  # padded
VOCABULARY = Vocabulary(ModelTokens([*TOKENS, *[b""] * (VOCAB_SIZE - len(TOKENS))], {}), [END])
MAX_TOKENS = 80
PAGE_SIZE = 16
PAGES_EACH = 7
PERSON = json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
        "required": ["age"],
        "additionalProperties": False,
    }
)


def text_of(tokens: list[int]) -> str | None:
    """Return the text of an ended answer; None: it was cut off."""
    if tokens[-1] != END:
        return None
    return b"".join(TOKENS[each] for each in tokens[:-1]).decode()


def sequence(place: int, constraint: Constraint | None, **params: Any) -> DrivenSequence:
    options = {"max_tokens": MAX_TOKENS, "seed": place} | params
    return DrivenSequence(
        prompt=[40 + place, 50, 60][: 1 + place % 3],
        page_ids=list(range(PAGES_EACH * place, PAGES_EACH * (place + 1))),
        params=SamplingParams(**options),
        grammar=Grammar(constraint, VOCABULARY) if constraint else None,
        end_token_ids=(END,) if constraint else (),
    )


def bits_of(tokens: set[int], vocab_size: int) -> TokenBits:
    flags = np.zeros(32 * -(-vocab_size // 32), dtype=np.bool_)
    flags[list(tokens)] = True
    return np.packbits(flags, bitorder="little").view(np.int32)


def masked_cases(vocab_size: int) -> tuple[torch.Tensor, list[Draw], list[set[int]]]:
    source, rng = torch.Generator().manual_seed(3), random.Random(3)
    kinds = [
        {"temperature": 0.0},
        {},
        {"temperature": 1.5, "top_k": 3},
        {"top_p": 0.5, "repetition_penalty": 1.7, "frequency_penalty": 1.0},
        {"min_p": 0.2, "logprobs": 2},
        {"temperature": 0.0, "presence_penalty": 2.0},
    ]
    draws, sets = [], []
    for index in range(4 * len(kinds)):
        size = rng.choice([1, 2, 30, vocab_size - 1])
        allowed = set(rng.sample(range(vocab_size), size))
        is_held = index % 3 > 0
        sets.append(allowed if is_held else set(range(vocab_size)))
        draws.append(
            Draw(
                params=SamplingParams(**kinds[index % len(kinds)]),
                seed=index,
                position=7,
                prompt_token_ids=[1, 2],
                output_token_ids=[3, 3, 4],
                allowed=bits_of(allowed, vocab_size) if is_held else None,
            )
        )
    return 3 * torch.randn(len(draws), vocab_size, generator=source), draws, sets


@pytest.mark.parametrize("sampling", [reference, launch], ids=["reference", "kernels"])
def test_masked_rows_draw_as_rows_of_which_nothing_else_is_there(
    sampling: Any, device: torch.device
) -> None:
    logits, draws, sets = masked_cases(VOCAB_SIZE + 3)

    found = sample(logits.to(device), draws, sampling.TokenSampler)

    for row, (draw, allowed, token) in enumerate(zip(draws, sets, found, strict=True)):
        assert token is not None
        assert token.token_id in allowed
        if draw.allowed is not None and not draw.params.has_penalties:
            others = [each for each in range(logits.shape[1]) if each not in allowed]
            alone = logits[row : row + 1].clone()
            alone[0, others] = -torch.inf
            plain = Draw(
                params=draw.params,
                seed=draw.seed,
                position=draw.position,
                prompt_token_ids=draw.prompt_token_ids,
                output_token_ids=draw.output_token_ids,
            )
            (expected,) = sample(alone, [plain])
            assert expected is not None
            assert token.token_id == expected.token_id
        if draw.params.logprobs is not None:  # of the model, as if nothing were masked
            whole = logits[row].log_softmax(-1)
            assert token.logprob == pytest.approx(float(whole[token.token_id]), abs=1e-4)
            assert token.top_logprobs[0][0] == int(whole.argmax())
    host = [token and token.token_id for token in sample(logits, draws)]
    assert [token and token.token_id for token in found] == host


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    return folder, write_checkpoint(folder, "llama", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def engine(model: Any) -> Engine:
    folder, _ = model
    return load_engine(folder, page_size=PAGE_SIZE, num_pages=64, device="cpu", dtype="float32")


def test_greedy_answers_are_the_most_probable_of_what_the_grammar_allows(
    engine: Engine, model: Any
) -> None:
    held = [sequence(0, JSON_OBJECT), sequence(1, PERSON), sequence(2, regex("(ab|12)*x?"))]
    for each in held:
        each.params = SamplingParams(temperature=0.0, max_tokens=40)

    run(engine, held)

    for each in held:
        logits = reference_logits(model[1], each.prompt + each.tokens)
        assert each.grammar is not None
        matcher = each.grammar.begin()
        for index, token_id in enumerate(each.tokens):
            allowed = list(token_ids(matcher.allowed()))
            after = logits[len(each.prompt) + index - 1]
            assert token_id == allowed[int(after[allowed].argmax())]
            if token_id != END:
                matcher.accept([token_id])
    assert sum(len(set(each.tokens)) > 3 for each in held) >= 2


@given(constraints=st.lists(CONSTRAINTS, min_size=8, max_size=8), seed=st.integers(0, 1000))
@settings(max_examples=6)
def test_hot_answers_of_a_random_model_follow_random_constraints(
    engine: Engine, constraints: list[Constraint], seed: int
) -> None:
    _check_hot_answers(engine, constraints, seed)


@pytest.mark.thorough
@given(constraints=st.lists(CONSTRAINTS, min_size=8, max_size=8), seed=st.integers(0, 1000))
@settings(max_examples=300)
def test_many_hot_answers_of_a_random_model_follow_random_constraints(
    engine: Engine, constraints: list[Constraint], seed: int
) -> None:
    _check_hot_answers(engine, constraints, seed)


def _check_hot_answers(engine: Engine, constraints: list[Constraint], seed: int) -> None:
    held = [
        sequence(place, constraint, temperature=1.5, seed=seed + place)
        for place, constraint in enumerate(constraints)
    ]
    run(engine, held)
    for each, constraint in zip(held, constraints, strict=True):
        text = text_of(each.tokens)
        assert text is None or follows(text, constraint)


MIXTURE: tuple[tuple[Constraint | None, dict[str, Any]], ...] = (
    (JSON_OBJECT, {"temperature": 1.5}),
    (None, {}),
    (choice("ab", "abab"), {"temperature": 0.0, "repetition_penalty": 1.3}),
    (PERSON, {"temperature": 1.5, "logprobs": 2}),
    (None, {"presence_penalty": 1.0}),
    (regex("[a-f]{2,5}"), {"top_k": 4}),
)


def mixture(max_tokens: int) -> list[DrivenSequence]:
    return [
        sequence(place, constraint, max_tokens=max_tokens, **params)
        for place, (constraint, params) in enumerate(MIXTURE)
    ]


def make_engines(folder: Path, device: str) -> tuple[Engine, Engine]:
    """Return an engine that takes one step at a time, and one that records and runs ahead."""
    write_checkpoint(
        folder,
        "llama",
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=1,
        hidden_size=32,
        dtype=torch.bfloat16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    plain = load_engine(
        folder, page_size=PAGE_SIZE, num_pages=64, device=device, dtype="bfloat16",
        attention="triton", num_seats=0,
    )  # fmt: skip
    return plain, recording(plain, num_seats=8, records_prompts=False)


def answers(engine: Engine, sequences: list[DrivenSequence]) -> list[list[int]]:
    run(engine, sequences)
    return [each.tokens for each in sequences]


def check_mixture(found: list[list[int]]) -> None:
    for (constraint, _), tokens in zip(MIXTURE, found, strict=True):
        text = text_of(tokens) if constraint else None
        assert text is None or (constraint is not None and follows(text, constraint))
    assert sum(tokens[-1] == END for tokens in found) >= 2


def test_recorded_steps_that_run_ahead_draw_the_same_beside_others(
    tmp_path: Path, recorders: list[LaunchRecorder]
) -> None:
    plain, ahead = make_engines(tmp_path, "cpu")
    from llm_engine.host_runner import HostRunner

    one_at_a_time = Engine(
        plain.config, plain.storage, plain.decoder, HostRunner(plain.storage, plain.decoder)
    )
    expected = answers(one_at_a_time, mixture(14))

    found = answers(ahead, mixture(14))

    assert found == expected
    check_mixture(found)
    (recorder,) = recorders
    assert recorder.num_repeated > 0
    alone = [answers(ahead, [each])[0] for each in mixture(14)[::2]]
    assert alone == expected[::2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_recorded_steps_draw_the_same_on_a_gpu(tmp_path: Path) -> None:
    plain, ahead = make_engines(tmp_path, "cuda")
    from llm_engine.host_runner import HostRunner

    one_at_a_time = Engine(
        plain.config, plain.storage, plain.decoder, HostRunner(plain.storage, plain.decoder)
    )
    ahead.warm_up()
    expected = answers(one_at_a_time, mixture(MAX_TOKENS))

    for _ in range(3):  # launched kernel by kernel, recorded, repeated
        assert answers(ahead, mixture(MAX_TOKENS)) == expected

    check_mixture(expected)
