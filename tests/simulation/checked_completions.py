"""What a user's client gets from a simulated cluster, checked against the oracle."""

import asyncio

from pagewire import AsyncClient, Completion
from tests.support.fake_cluster import MODEL
from tests.support.oracle import RequestSpec, expected_choices
from tests.support.scenario import MAX_CONTEXT_TOKENS


async def complete(client: AsyncClient, spec: RequestSpec) -> Completion:
    params = spec.params
    await asyncio.sleep(spec.arrives_at)
    return await client.generate(
        spec.prompt,
        temperature=params.temperature,
        seed=params.seed,
        max_tokens=params.max_tokens,
        frequency_penalty=params.frequency_penalty,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        n=spec.n,
    )


def assert_right(spec: RequestSpec, completion: Completion) -> None:
    expected = expected_choices(spec, model=MODEL, max_context_tokens=MAX_CONTEXT_TOKENS)
    assert [each.token_ids for each in completion.choices] == [each.tokens for each in expected]
    assert all(each.finish_reason for each in completion.choices)
    if spec.params.logprobs is not None:
        for each in completion.choices:
            assert [one.token_id for one in each.logprobs] == list(each.token_ids)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == sum(len(each.tokens) for each in expected)
