"""A generation of the router, and the tokens of texts."""

from pagewire.protos.token_ids import pack_token_ids
from router.generation import Generation
from router.request import AskedSampling, GenerationRequest, SamplingDefaults, ServedModel
from router.tokenizer import Tokenizer
from router.validation import complete_sampling
from tests.router.tokenizers_for_tests import byte_level

TOKENIZER = Tokenizer(byte_level().to_str())
EOS = 1  # <|end|>


def generation(
    *,
    n: int = 1,
    stop: tuple[str, ...] = (),
    end_ids: tuple[int, ...] = (EOS,),
    min_tokens: int | None = None,
    max_tokens: int | None = None,
) -> Generation:
    model = ServedModel(
        name="m", fingerprint="f", vocab_size=400, max_context_tokens=100, page_size=4
    )
    sampling = complete_sampling(
        AskedSampling(n=n, stop=stop, min_tokens=min_tokens, max_tokens=max_tokens),
        defaults=SamplingDefaults(),
        model=model,
        prompt_len=3,
        has_tokenizer=True,
        draw_seed=lambda: 0,
    )
    request = GenerationRequest(
        request_id="r",
        packed_token_ids=pack_token_ids([5, 6, 7]),
        sampling=sampling,
        end_token_ids=frozenset(end_ids),
        page_hashes=(),
        page_size=4,
        arrived_at=10.0,
        deadline_at=100.0,
    )
    made = Generation(request, TOKENIZER)
    made.begin_attempt("decode-0")
    return made


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)
