"""The trained model: its file gives transformers' tokens and logits, also in half precision."""

import time
from dataclasses import replace
from functools import cache

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers

from benchmarks.nll import mean_nll, text_tokens
from cli.demo_text import DOCUMENT
from llm_engine.engine import Engine
from llm_engine.gguf_file import read_gguf_header
from llm_engine.load_engine import load_engine
from llm_engine.model_files import text_folder
from router.model_folder import read_model_folder
from tests.llm_engine.driver import GREEDY, chunked_logits, generate
from tests.support.adversarial_texts import adversarial_texts
from tests.support.checkpoints import reference_logits
from tests.support.gguf_reference import transformers_tokenizer
from tests.support.trained_model import GROUP, GreedyCheck, reference_model, trained_path
from tests.support.wall_clock import assert_within

pytestmark = [pytest.mark.xdist_group(GROUP), pytest.mark.timeout(300)]

NUM_TEXTS = 10_000


def ids_of(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]


def test_token_ids_of_10000_texts_equal_those_of_transformers() -> None:
    ours = Tokenizer.from_file(str(text_folder(trained_path()) / "tokenizer.json"))
    theirs = transformers_tokenizer(trained_path())
    texts = adversarial_texts(NUM_TEXTS, seed=135)

    # The model was trained with single digits. transformers cuts them so from the folder that was
    # published, and from a GGUF file does not; that shows only after several blanks.
    digits = pre_tokenizers.Digits(individual_digits=True)
    as_read = ids_of(theirs, texts)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([digits, theirs.pre_tokenizer])
    as_published = ids_of(theirs, texts)
    found = ids_of(ours, texts)

    assert found == as_published
    assert (
        0.8 < sum(one == other for one, other in zip(found, as_read, strict=True)) / NUM_TEXTS < 1
    )


@cache
def text_logits(num_tokens: int | None) -> tuple[list[int], torch.Tensor]:
    """Token ids of the demo's document, or of its beginning, and transformers' logits for them."""
    token_ids = text_tokens(trained_path(), DOCUMENT)[:num_tokens]
    return token_ids, reference_logits(reference_model(), token_ids)


def reference_nll(num_tokens: int | None) -> float:
    token_ids, logits = text_logits(num_tokens)
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(token_ids[1:])))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(trained_path(), page_size=16, num_pages=8, device="cpu")


def test_logits_and_likelihood_equal_those_of_transformers(engine: Engine) -> None:
    token_ids, expected = text_logits(50)

    found = chunked_logits(engine, token_ids, [32, 1, 17])
    as_prompt = mean_nll(engine, token_ids, num_prompt_tokens=50)
    as_drawn = mean_nll(engine, token_ids, num_prompt_tokens=46)

    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert as_prompt == pytest.approx(reference_nll(50), abs=1e-5)
    assert as_drawn == pytest.approx(reference_nll(50), abs=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_half_precision_costs_less_than_half_a_percent_of_the_likelihood(attention: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    token_ids, _ = text_logits(None)
    engine = load_engine(
        trained_path(),
        page_size=64,
        num_pages=32,
        device="cuda",
        dtype="bfloat16",
        attention=attention,
    )

    as_prompt = mean_nll(engine, token_ids, num_prompt_tokens=len(token_ids))
    as_drawn = mean_nll(engine, token_ids, num_prompt_tokens=len(token_ids) - 256)

    assert engine.layout.dtype == "bfloat16"
    assert as_prompt == pytest.approx(reference_nll(None), rel=0.005)
    assert as_drawn == pytest.approx(reference_nll(None), rel=0.005)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_a_prompt_of_4000_tokens_is_answered_as_in_transformers(attention: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    document = text_tokens(trained_path(), DOCUMENT)
    prompt = (document * 4)[:4000]
    engine = load_engine(
        trained_path(),
        page_size=64,
        num_pages=64,
        device="cuda",
        dtype="float32",
        attention=attention,
    )

    [answer] = generate(engine, [prompt], replace(GREEDY, max_tokens=16), chunk_size=512)

    assert GreedyCheck().greedy_after(prompt, answer)[:-1] == answer


def test_a_chat_is_answered(engine: Engine) -> None:
    folder = read_model_folder(text_folder(trained_path()), max_prompt_chars=10_000)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = folder.tokenizer.encode(
        folder.chat_template.render(messages), add_special_tokens=False
    )

    [answer] = generate(engine, [prompt], replace(GREEDY, max_tokens=12))
    end = next(index for index, token in enumerate(answer) if token in engine.config.eos_token_ids)

    assert folder.tokenizer.decode(answer[:end]) == "The capital of France is Paris."


def test_the_header_is_read_in_a_moment() -> None:
    started = time.process_time()
    header = read_gguf_header(trained_path())

    assert_within(time.process_time() - started, 2)
    assert len(header.tensors) == 272
