"""Real clusters on this host: Ray actors, gRPC, pages over TCP or NCCL, SIGKILL.

On the CPU in float32; where there are GPUs also on them, in float32 and in bfloat16.
"""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import replace

import grpc
import jsonschema
import psutil
import pytest

import pagewire
from cluster.config_file import load_config
from cluster.demo_model import write_demo_model
from cluster.devices import count_gpus
from cluster.environment import prepare_ray
from cluster.preflight import check_start
from credentials.key_file import write_router_keys
from pagewire import AsyncClient
from pagewire.protos import inference_pb2, inference_pb2_grpc
from pagewire.protos.token_ids import pack_token_ids
from tests.cluster.in_process import generate_all
from tests.support.free_ports import free_port, free_range
from tests.support.local_ray import forget_token
from tests.support.scrapes import samples, scrape
from tests.support.wall_clock import assert_within, on_this_host

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

PAGE_SIZE = 16
VOCAB_SIZE = 512  # of the demo model
OPTIONS = {
    "page_size": PAGE_SIZE,
    "num_pages": 4096,
    "log_level": "warning",
    "decode_worker.local_prefill_max_tokens": 0,
    "decode_worker.heartbeat_s": 0.1,
    "prefill_worker.heartbeat_s": 0.1,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_demo_model(folder)
    return folder


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("cpu", "float32"), id="cpu"),
        pytest.param(("cuda", "float32"), id="cuda-float32", marks=pytest.mark.gpu),
        pytest.param(("cuda", "bfloat16"), id="cuda-bfloat16", marks=pytest.mark.gpu),
    ],
)
def placement(request):
    """Device and dtype."""
    device, dtype = request.param
    return device, dtype


@pytest.fixture(scope="module")
def metrics_ports():
    """The first port of the workers' metrics, and their range."""
    return free_range(4)


@pytest.fixture(scope="module")
def cluster(model_dir, placement, metrics_ports):
    prepare_ray(is_local=True)
    forget_token()
    from cluster.launch import start_cluster

    device, dtype = placement
    options = OPTIONS | {"device": device, "dtype": dtype, "prefill": 2, "decode": 2}
    if device == "cuda" and count_gpus() < 4:
        options["workers_per_gpu"] = 2 if count_gpus() > 1 else 4
    # Not 0: a router that is started again must be found at the same address.
    ports = {
        "port": free_port(),
        "http_port": free_port(),
        "worker_metrics_ports": metrics_ports[1],
    }
    config = load_config(None, options | {"model": model_dir} | ports)
    running = start_cluster(config, check_start(config), shows_worker_logs=False)
    yield running
    running.stop(0.0)


@pytest.fixture(scope="module")
def oracle(model_dir, placement):
    from tests.cluster.oracle import EngineOracle, GreedyOracle

    device, dtype = placement
    # In bfloat16 no other implementation has the same bits; there the engine alone is the measure.
    return EngineOracle(model_dir, device) if dtype == "bfloat16" else GreedyOracle(model_dir)


def run(cluster, work):
    """Run `await work(client)`, with all workers ready before and after."""

    async def scenario():
        async with AsyncClient(cluster.address, default_timeout_s=60) as client:
            await until(client, lambda status: all_ready(status, cluster))
            result = await work(client)
            await until(client, lambda status: all_ready(status, cluster))
            return result

    return asyncio.run(scenario())


async def until(client, is_true, timeout_s=30.0):
    """Wait for a status that satisfies `is_true`; returns it and how long that took."""
    started = time.monotonic()
    status = None
    while time.monotonic() < started + timeout_s:
        with suppress(pagewire.TransportError):  # while a router is started again
            status = await client.status(timeout_s=2)
            if is_true(status):
                return status, time.monotonic() - started
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within {timeout_s} s: {status}")


def all_ready(status, cluster):
    ready = {each.worker_id for each in status.workers if each.state == "ready"}
    return ready == set(cluster.workers)


def is_idle(status):
    return all(
        each.pages.live + each.pages.leased + each.pages.incoming + each.pages.quarantine == 0
        and each.running + each.waiting == 0
        for each in status.workers
    )


def incarnations(status):
    return {each.worker_id: each.incarnation for each in status.workers if each.state == "ready"}


def prompt_of(seed, length):
    source = random.Random(str(seed))
    return [0, *(source.randrange(4, VOCAB_SIZE) for _ in range(length - 1))]


def test_workers_run_with_the_variables_of_their_device(cluster, placement):
    own = {"cpu": ("CUDA_VISIBLE_DEVICES", ""), "cuda": ("CUDA_MODULE_LOADING", "EAGER")}
    name, value = own[placement[0]]

    for each in cluster.workers:
        assert psutil.Process(cluster.pid(each)).environ()[name] == value


def test_greedy_tokens_equal_the_oracles(cluster, oracle):
    lengths = (1, 15, 16, 17, 33, 100, 250, 640)
    prompts = [prompt_of(length, length) for length in lengths]

    completions = run(cluster, lambda client: generate_all(client, prompts, max_tokens=64))

    for prompt, completion in zip(prompts, completions, strict=True):
        assert list(completion.token_ids) == oracle.tokens(prompt, 64)
        usage = completion.usage
        assert usage.prompt_tokens == len(prompt)
        assert usage.decode_computed_tokens == 0
        assert usage.prefill_computed_tokens == len(prompt)
        assert usage.pages_moved == -(-len(prompt) // PAGE_SIZE)
        assert usage.bytes_moved > 0


def test_a_second_request_moves_only_what_is_missing(cluster, oracle):
    prefix = prompt_of("delta", 320)
    longer = prefix + prompt_of("more", 40)

    async def work(client):
        first = await client.generate(prefix, temperature=0.0, max_tokens=4)
        await until(client, is_idle)  # the router weighs load against overlap
        second = await client.generate(longer, temperature=0.0, max_tokens=4)
        return first, second

    first, second = run(cluster, work)

    assert first.usage.pages_moved == 20
    assert 0 < second.usage.pages_moved <= 4
    assert first.usage.decode_computed_tokens == second.usage.decode_computed_tokens == 0
    assert second.usage.decode_cached_tokens >= 304
    assert list(second.token_ids) == oracle.tokens(longer, 4)


def test_choices_share_the_prompt(cluster):
    prompt = prompt_of("choices", 200)

    async def work(client):
        return await client.generate(prompt, n=3, seed=5, max_tokens=16, ignore_eos=True)

    completion = run(cluster, work)

    assert len({choice.token_ids for choice in completion.choices}) == 3
    assert all(len(choice.token_ids) == 16 for choice in completion.choices)
    assert completion.usage.prefill_computed_tokens == 200
    assert completion.usage.decode_computed_tokens == 0
    assert completion.usage.pages_moved == 13


def test_text_and_chat_are_tokenized_and_streamed(cluster):
    messages = [{"role": "user", "content": "Who reads the pages?"}]

    async def work(client):
        tokens = await client.tokenize_chat(messages)
        async with client.stream_chat(messages, max_tokens=12, temperature=0.0) as stream:
            texts = [delta.text async for delta in stream]
        direct = await client.generate(tokens.token_ids, max_tokens=12, temperature=0.0)
        return tokens, texts, stream.completion, direct

    tokens, texts, streamed, direct = run(cluster, work)

    assert "<|turn|>user\nWho reads the pages?<|turn_end|>" in tokens.text
    assert len(texts) > 1
    assert "".join(texts) == streamed.text == direct.text
    assert streamed.token_ids == direct.token_ids


BAD_REQUESTS = {
    "found 512; allowed": {"token_ids": pack_token_ids([VOCAB_SIZE])},
    "found -1": {"text": "x", "sampling": {"temperature": -1.0}},
    "regex": {"text": "x", "sampling": {"constraint": {"regex": "("}}},
}


def test_bad_requests_are_refused_within_a_second_and_disturb_no_stream(cluster, oracle):
    """All kinds of them: tests/http_gateway/test_bad_fields.py, without a GPU."""
    prompt = prompt_of("calm", 40)
    refusals, seconds = {}, []

    async def work(client):
        async with (
            grpc.aio.insecure_channel(client.address) as channel,
            client.stream(prompt, temperature=0.0, max_tokens=60, ignore_eos=True) as stream,
        ):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            deltas = aiter(stream)
            await anext(deltas)
            for words, request in BAD_REQUESTS.items():
                started = time.monotonic()
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await anext(aiter(stub.Generate(inference_pb2.GenerateRequest(**request))))
                seconds.append(time.monotonic() - started)
                refusals[words] = refused.value
            async for _ in deltas:
                pass
        return stream.completion

    undisturbed = run(cluster, work)

    for words, refusal in refusals.items():
        assert refusal.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert words in refusal.details()
    assert_within(max(seconds), on_this_host(1.0))
    assert list(undisturbed.token_ids) == oracle.tokens(prompt, 60)


def test_a_client_that_leaves_frees_all_pages_within_a_second(cluster):
    async def work(client):
        await until(client, is_idle)
        stream = client.stream(prompt_of("leaves", 700), max_tokens=2000, ignore_eos=True)
        async with stream:
            async for _ in stream:
                break
            await until(client, lambda status: not is_idle(status))
        _, decoding_s = await until(client, is_idle)
        # And once more before a token was taken: on a CPU while the prompts are computed or moved.
        # A GPU is done with those in no time, so the answers must last until a heartbeat shows it.
        async with AsyncExitStack() as streams:
            for index in range(4):
                prompt = prompt_of(("leaves early", index), 4000)
                stream = client.stream(prompt, max_tokens=4000, ignore_eos=True)
                await streams.enter_async_context(stream)
            await until(client, lambda status: not is_idle(status))
        _, prefilling_s = await until(client, is_idle)
        return decoding_s, prefilling_s

    decoding_s, prefilling_s = run(cluster, work)

    # A second, and the period of the heartbeats that show it.
    assert_within(decoding_s, on_this_host(1.3))
    assert_within(prefilling_s, on_this_host(1.3))


def test_a_killed_prefill_worker_costs_no_token(cluster, oracle):
    def end(victim):
        os.kill(cluster.pid(victim), signal.SIGKILL)

    answer_while_a_prefill_worker_ends(cluster, oracle, "killed", end)


def test_a_prefill_worker_that_loses_its_device_ends_comes_back_and_costs_no_token(
    cluster, oracle, tmp_path
):
    end = losing_its_device(cluster, tmp_path)
    answer_while_a_prefill_worker_ends(cluster, oracle, "lost", end)


def answer_while_a_prefill_worker_ends(cluster, oracle, seed, end):
    """Have new prompts of a seed computed while `end`, called with a worker's name, ends it."""
    # A GPU would be done with fewer before a heartbeat can show it at work.
    count, length = (6, 1200) if cluster.device == "cpu" else (48, 6000)
    prompts = [prompt_of((seed, index), length + index) for index in range(count)]

    async def work(client):
        before = incarnations(await client.status())
        answers = asyncio.create_task(generate_all(client, prompts, max_tokens=8))
        status, _ = await until(client, lambda status: busy(status, "prefill"))
        victim = busy(status, "prefill")[0]
        await asyncio.to_thread(end, victim)
        completions = await answers
        status, _ = await until(client, lambda status: is_restarted(status, victim, before))
        after = incarnations(status)
        return victim, before, after, completions

    victim, before, after, completions = run(cluster, work)

    for prompt, completion in list(zip(prompts, completions, strict=True))[
        :: 8 if count > 8 else 1
    ]:
        assert list(completion.token_ids) == oracle.tokens(prompt, 8)
    assert all(len(completion.token_ids) == 8 for completion in completions)
    assert all(completion.usage.bytes_moved > 0 for completion in completions)
    assert not any(completion.usage.decode_computed_tokens for completion in completions)
    assert sum(completion.usage.prefill_retries for completion in completions) > 0
    assert {name for name in before if before[name] != after[name]} == {victim}


def test_a_hung_prefill_worker_costs_no_token_and_a_few_seconds(cluster, oracle):
    if cluster.device != "cpu":
        pytest.skip("a GPU is done before a heartbeat can show it at work")
    prompts = [prompt_of(("hung", index), 1200 + index) for index in range(6)]

    async def work(client):
        before = incarnations(await client.status())
        answers = asyncio.create_task(generate_all(client, prompts, max_tokens=8))
        status, _ = await until(client, lambda status: busy(status, "prefill"))
        victim = busy(status, "prefill")[0]
        pid = cluster.pid(victim)
        os.kill(pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        try:
            completions = await answers
            seconds = time.monotonic() - stopped_at
            # What the hung worker might still write into is free again, too.
            await until(client, lambda status: is_idle(without(status, victim)))
        finally:
            os.kill(pid, signal.SIGKILL)
        await until(client, lambda status: is_restarted(status, victim, before))
        return completions, seconds

    completions, seconds = run(cluster, work)

    for prompt, completion in zip(prompts, completions, strict=True):
        assert list(completion.token_ids) == oracle.tokens(prompt, 8)
        assert completion.usage.bytes_moved > 0
        assert completion.usage.decode_computed_tokens == 0
    assert sum(completion.usage.prefill_retries for completion in completions) > 0
    assert_within(seconds, 12)


def without(status, worker_id):
    others = tuple(each for each in status.workers if each.worker_id != worker_id)
    return replace(status, workers=others)


def is_restarted(status, worker_id, before):
    now = incarnations(status)
    return now.keys() == before.keys() and now[worker_id] != before[worker_id]


def busy(status, pool):
    """Workers of a pool that compute now."""
    return [
        each.worker_id
        for each in status.workers
        if each.pool == pool and each.running + each.waiting > 0
    ]


def plain_requests(cluster):
    """Return eight requests (prompt, options), the first half greedy."""
    prompts = [prompt_of(("decode", index), 60 + index) for index in range(4)]
    num_tokens = 150 if cluster.device == "cpu" else 800
    greedy, seeded = {"temperature": 0.0}, {"temperature": 0.9, "seed": 11, "n": 2}
    return [
        (prompt, {"max_tokens": num_tokens, "ignore_eos": True} | options)
        for options in (greedy, seeded)
        for prompt in prompts
    ]


def constrained_requests(cluster):
    """Return eight requests (prompt, options), the first half greedy, and the judge of each."""
    forms = long_forms(60 if cluster.device == "cpu" else 400)
    # The second half is rotated by one, so that both workers get each form.
    held = [(form, {"temperature": 0.0}) for form in forms]
    held += [(form, {"temperature": 1.5, "seed": 7}) for form in forms[1:] + forms[:1]]
    requests = [
        (prompt_of(("form", index), 60 + index), {**sampling, "constraint": constraint})
        for index, ((constraint, _), sampling) in enumerate(held)
    ]
    return requests, [judge for (_, judge), _ in held]


@pytest.fixture(scope="module")
def through_a_kill(cluster):
    """The answers to both kinds of requests, calm and while one decode worker is killed."""
    return answer_through_an_end(
        cluster,
        plain_requests(cluster) + constrained_requests(cluster)[0],
        lambda victim: os.kill(cluster.pid(victim), signal.SIGKILL),
    )


def test_a_killed_decode_worker_costs_no_token(cluster, oracle, through_a_kill):
    undisturbed, interrupted = (each[:8] for each in through_a_kill)
    (prompt, options), *_ = plain_requests(cluster)
    num_tokens = options["max_tokens"]

    for calm, resumed in zip(undisturbed, interrupted, strict=True):
        assert [each.token_ids for each in calm.choices] == [
            each.token_ids for each in resumed.choices
        ]
        assert calm.text == resumed.text
        assert len(resumed.token_ids) == num_tokens
    assert list(interrupted[0].token_ids) == oracle.tokens(prompt, num_tokens)
    for resumed in (interrupted[:4], interrupted[4:]):
        assert sum(each.usage.resumptions for each in resumed) > 0


def test_a_decode_worker_that_loses_its_device_ends_comes_back_and_costs_no_token(
    cluster, tmp_path
):
    end = losing_its_device(cluster, tmp_path)
    longer = {} if cluster.device == "cpu" else {"max_tokens": 6000}
    # So many that each worker has some: a status may be as old as the calm run.
    requests = [(prompt, options | longer) for prompt, options in plain_requests(cluster)]
    undisturbed, interrupted = answer_through_an_end(cluster, requests, end)

    for calm, resumed in zip(undisturbed, interrupted, strict=True):
        assert resumed.choices == calm.choices
    assert sum(each.usage.resumptions for each in interrupted) > 0


def losing_its_device(cluster, tmp_path):
    """Return what takes its device from a named worker and waits until it has ended."""
    import ray

    def arm(actor):  # in the worker's process: answers may last for less than a call of Ray
        import threading
        import time

        import torch

        def lose_device():
            while not (tmp_path / actor._settings.worker_id).exists():
                time.sleep(0.01)
            if actor._settings.device == "cuda":
                torch._assert_async(torch.zeros(1, device="cuda"))
            else:
                actor._process._executor.engine.read = read

        def read():
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

        if actor._settings.device == "cuda":
            torch._assert_async(torch.ones(1, device="cuda"))  # loads the kernel
        threading.Thread(target=lose_device, daemon=True).start()

    def end(victim):
        process = psutil.Process(cluster.pid(victim))
        (tmp_path / victim).touch()
        process.wait(timeout=30)

    armed = [ray.get_actor(each).__ray_call__.remote(arm) for each in cluster.workers]
    ray.get(armed, timeout=30)
    return end


# As test_controller.py shows it without a Ray.
@pytest.mark.thorough
def test_a_worker_that_ray_has_given_up_comes_back(cluster):
    import ray

    async def until_whole(client):
        async with asyncio.timeout(60):
            while not all_ready(status := await client.status(), cluster):
                await asyncio.sleep(0.2)
        return incarnations(status)

    async def end_and_wait(client):
        before = await until_whole(client)
        ray.kill(ray.get_actor("decode-1"), no_restart=True)
        async with asyncio.timeout(60):
            while (after := await until_whole(client)) == before:
                await asyncio.sleep(0.2)
        return before, after

    before, after = run(cluster, end_and_wait)
    assert [name for name in before if before[name] != after[name]] == ["decode-1"]


def test_constrained_answers_keep_their_form_and_their_words_across_a_kill(cluster, through_a_kill):
    undisturbed, interrupted = (each[8:] for each in through_a_kill)
    _, judges = constrained_requests(cluster)

    for judge, calm, resumed in zip(judges, undisturbed, interrupted, strict=True):
        assert resumed.choices == calm.choices
        assert resumed.finish_reason == "stop"
        assert judge(resumed.text), resumed.text
        assert not judge(resumed.text[:-1]), "the judge accepts everything"
        assert resumed.usage.decode_computed_tokens == 0
        assert resumed.usage.pages_moved > 0
    for resumed in (interrupted[:4], interrupted[4:]):
        assert sum(each.usage.resumptions for each in resumed) > 0


def long_forms(length):
    """Return constraints on texts of about `length` tokens or more, each with a judge."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": f"^[a-z]{{{2 * length},{3 * length}}}$"},
            "likes": {"type": "array", "items": {"enum": ["sea", 7, True]}, "maxItems": 3},
        },
        "required": ["name", "likes"],
        "additionalProperties": False,
    }
    expression = f"([a-z]{{1,6}} ){{{length // 2},{length}}}end"
    choices = [f"{word} page, " * (length // 3) + "." for word in ("a", "the", "no")]
    rules = f'start: part ("+" part){{{length // 2}}}\npart: /[0-9]/ | "(" /[0-9]/ "*" /[0-9]/ ")"'
    part = r"([0-9]|\([0-9]\*[0-9]\))"

    def follows_schema(text):
        try:
            return jsonschema.validate(json.loads(text), schema) is None
        except ValueError:
            return False

    return [
        ({"json_schema": schema}, follows_schema),
        ({"regex": expression}, re.compile(expression).fullmatch),
        ({"choice": choices}, choices.__contains__),
        ({"grammar": rules}, re.compile(rf"{part}(\+{part}){{{length // 2}}}").fullmatch),
    ]


def answer_through_an_end(cluster, requests, end):
    """Answer requests (prompt, options) twice, the second time while a decode worker ends.

    `end` is called with its name. Returns the completions of both runs.
    """

    async def work(client):
        undisturbed = await asyncio.gather(
            *(client.generate(prompt, **options) for prompt, options in requests)
        )
        before = incarnations(await client.status())
        streams = [client.stream(prompt, **options) for prompt, options in requests]
        tasks = [asyncio.create_task(collect(stream)) for stream in streams]
        while min(len(stream.completion.token_ids) for stream in streams) < 10:
            await asyncio.sleep(0.01)
        status, _ = await until(client, lambda status: busy(status, "decode"))
        victim = busy(status, "decode")[0]
        await asyncio.to_thread(end, victim)
        interrupted = await asyncio.gather(*tasks)
        status, _ = await until(client, lambda status: is_restarted(status, victim, before))
        after = incarnations(status)
        assert {name for name in before if before[name] != after[name]} == {victim}
        return undisturbed, interrupted

    return run(cluster, work)


async def collect(stream):
    """Read a stream and check that its indices are contiguous."""
    next_index: dict[int, int] = {}
    async with stream:
        async for delta in stream:
            if delta.token_ids:
                assert delta.first_index == next_index.get(delta.choice, 0)
                next_index[delta.choice] = delta.first_index + len(delta.token_ids)
    return stream.completion


def test_the_controller_adds_up_how_far_the_weights_of_workers_are(cluster):
    import ray

    report = cluster.controller.report_loaded.remote
    ray.get([report(worker_id, 1, 4) for worker_id in cluster.workers], timeout=30)
    ray.get(report("prefill-0", 3, 4), timeout=30)

    assert ray.get(cluster.controller.loaded.remote(), timeout=30) == (6, 16)


def test_a_killed_controller_costs_no_stream_a_resumption(cluster):
    import ray

    from cluster.placement import CONTROLLER_NAME
    from worker.process import ANNOUNCE_PERIOD_S

    old_pid = cluster.pid(CONTROLLER_NAME)
    prompts = [prompt_of(("controller", index), 50) for index in range(4)]

    def wait_restarted():
        for _ in range(100):
            with suppress(ray.exceptions.RayError):  # while it is started again
                if cluster.pid(CONTROLLER_NAME) != old_pid:
                    return
            time.sleep(0.1)
        raise AssertionError("the controller did not come back")

    async def work(client):
        over = asyncio.Event()

        async def ask(prompt):
            # One after another, so that some are open whenever the new controller speaks.
            completions = []
            while not over.is_set():
                completions += await generate_all(client, [prompt], max_tokens=100)
            return completions

        tasks = [asyncio.create_task(ask(prompt)) for prompt in prompts]
        os.kill(old_pid, signal.SIGKILL)
        await asyncio.to_thread(wait_restarted)
        await asyncio.sleep(ANNOUNCE_PERIOD_S + 0.5)  # until it has heard of all
        over.set()
        return await asyncio.gather(*tasks), await client.status()

    asked, status = run(cluster, work)

    for completions in asked:
        assert len({each.token_ids for each in completions}) == 1
        assert [each.usage.resumptions for each in completions] == [0] * len(completions)
    assert all_ready(status, cluster)


def test_workers_tell_their_metrics_while_no_router_answers(cluster, metrics_ports):
    from cluster.placement import ROUTER_NAME

    first, _ = metrics_ports
    host, _, _ = cluster.address.rpartition(":")

    async def work(client):
        router = cluster.pid(ROUTER_NAME)
        os.kill(router, signal.SIGSTOP)  # a killed one would soon be back
        try:
            texts = [await asyncio.to_thread(scrape, f"{host}:{first + each}") for each in range(4)]
        finally:
            os.kill(router, signal.SIGCONT)
        return [samples(each) for each in texts]

    told = run(cluster, work)

    ready = {  # among samples
        name: ("pagewire_worker_state", *sorted((name.partition("-")[0], name, "ready")))
        for name in cluster.workers
    }
    names = [[name for name in ready if each.get(ready[name])] for each in told]
    assert sorted(names) == sorted([name] for name in cluster.workers)


def test_a_killed_router_comes_back_at_its_address_and_goes_on_with_its_streams(cluster):
    from cluster.placement import ROUTER_NAME

    prompt = prompt_of("router", 50)

    async def work(client):
        before = await client.generate(prompt, temperature=0.0, max_tokens=8)
        assert ask_http(cluster, prompt) == before.text
        long = {"temperature": 0.8, "seed": 5, "max_tokens": 400, "ignore_eos": True}
        calm = await client.generate(prompt, **long)
        stream = client.stream(prompt, **long)
        await anext(stream)
        old_pid = cluster.pid(ROUTER_NAME)
        os.kill(old_pid, signal.SIGKILL)
        async for _ in stream:
            pass
        assert stream.completion.token_ids == calm.token_ids
        assert stream.completion.text == calm.text
        assert stream.completion.usage.resumptions == 1
        await until(client, lambda status: all_ready(status, cluster))
        assert cluster.pid(ROUTER_NAME) != old_pid
        after = await client.generate(prompt, temperature=0.0, max_tokens=8)
        assert ask_http(cluster, prompt) == before.text, "the gateway has found the router again"
        return before, after

    before, after = run(cluster, work)

    assert before.token_ids == after.token_ids


# As tests/cli/test_router_command.py shows it with a scripted worker, and test_tls.py that such a
# router joins a real cluster.
@pytest.mark.thorough
def test_streams_of_a_killed_router_outside_ray_go_on_at_another_one(cluster, model_dir, tmp_path):
    options = {"max_tokens": 400, "ignore_eos": True}
    asked = [
        {"prompt": prompt_of(f"outside-{index}", 40 + index)} | sampling | options
        for sampling in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 3})
        for index in range(2)
    ]

    with routers_outside(cluster, model_dir, tmp_path, 2) as outside:
        (first, killed), (second, _) = outside

        async def work(client):
            calm = await asyncio.gather(*(client.generate(**each) for each in asked))
            async with AsyncClient([first, second]) as lost, AsyncClient(second) as other:
                await until(lost, lambda status: all_ready(status, cluster))
                await until(other, lambda status: all_ready(status, cluster))
                streams = [lost.stream(**each) for each in asked]
                await asyncio.gather(*(anext(each) for each in streams))
                killed.send_signal(signal.SIGKILL)
                for stream in streams:
                    async for _ in stream:
                        pass
                return calm, [each.completion for each in streams]

        calm, interrupted = run(cluster, work)

    for before, after in zip(calm, interrupted, strict=True):
        assert after.choices == before.choices
        assert (before.usage.resumptions, after.usage.resumptions) == (0, 1)


@contextmanager
def routers_outside(cluster, model_dir, tmp_path, count):
    """Processes of `pagewire router`; yields (address, process) of each."""
    import ray

    keys, controller = ray.get(
        [cluster.controller.router_keys.remote("routers"), cluster.controller.address.remote()]
    )
    write_router_keys(tmp_path / "keys", keys)
    flags = ["--controller", controller, "--keys", tmp_path / "keys", "--model", model_dir]
    flags += ["--port", "0", "--log-level", "warning"]
    command = [sys.executable, "-m", "cli", "router", *map(str, flags)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        ready = [next(line for line in each.stdout if "ready: " in line) for each in started]
        yield [(line.split()[3], each) for line, each in zip(ready, started, strict=True)]
    finally:
        for each in started:
            each.kill()
            each.communicate(timeout=10)


def test_a_restart_of_the_gateway_fails_no_request_and_a_killed_one_comes_back(cluster):
    import ray

    from cluster.placement import gateways
    from cluster.rolling import restart_cluster

    prompt = prompt_of("gateway", 50)
    before = ask_http(cluster, prompt)
    is_over = threading.Event()

    def keep_asking():
        """Ask every 50 ms, on another connection each time."""
        answers = [before]
        while not is_over.wait(0.05):
            answers.append(ask_http(cluster, prompt))
        return answers

    with ThreadPoolExecutor() as threads:
        asking = threads.submit(keep_asking)
        try:
            restart_cluster(cluster.controller, ["http-gateway"], 1.0, lambda line: None)
            while (names := gateways(ray.util.list_named_actors())) != ["http-gateway-1"]:
                assert "http-gateway-1" in names
                time.sleep(0.1)
        finally:
            is_over.set()
        assert set(asking.result()) == {before}

    old_pid = cluster.pid("http-gateway-1")
    os.kill(old_pid, signal.SIGKILL)

    deadline = time.monotonic() + 30
    while True:
        try:
            after = ask_http(cluster, prompt)
            break
        except OSError:  # while it is started again
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert after == before
    assert cluster.pid("http-gateway-1") != old_pid


def ask_http(cluster, prompt):
    """Return eight greedy tokens' text for a prompt of token ids, asked of the gateway."""
    body = {"prompt": list(prompt), "max_tokens": 8, "temperature": 0.0}
    request = urllib.request.Request(
        f"http://{cluster.http_address}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)["choices"][0]["text"]
