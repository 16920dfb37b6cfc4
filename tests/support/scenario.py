"""A simulated run as a value: cluster, requests and faults, all drawn from one seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from llm_engine.sampling import SamplingParams
from tests.support.oracle import RequestSpec

VOCAB_SIZE = 64
MAX_CONTEXT_TOKENS = 96
# What can happen to a copy of pages; names of tests.support.loopback.FaultKind.
DAMAGES = ("flip", "swap", "stale", "truncate", "hang", "drop", "late_write", "break")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterShape:
    """What runs, and how fast; times in virtual seconds."""

    num_prefill: int = 1
    num_decode: int = 1
    num_routers: int = 1
    page_size: int = 4
    prefill_pages: int = 256
    decode_pages: int = 256
    local_prefill_max_tokens: int = 0
    chunk_pages: int = 2
    max_chunk_pages: int = 1  # or chunk_pages, if they are more
    max_step_tokens: int = 64
    max_running_sequences: int = 32
    max_launched: int = 2  # passes of an engine at a time; 1: none runs ahead
    pass_s: float = 0.01
    token_s: float = 0.0005
    latency_s: float = 0.0005
    jitter_s: float = 0.0005
    window_bytes: int = 65536  # of unread messages, per call and direction
    page_transfer_s: float = 0.002  # one page over a connection
    blocking_s: float = 0.0  # work of workers beside the loop, such as the digests of a chunk
    hangs_on_peer_death: bool = True  # as NCCL; False: breaks, as TCP
    max_expected_wait_s: float = 30.0  # of the routers
    shared_unit_len: int = 0  # least tokens that attention reads once for all; 0: it is flat


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault. `kind` is a method of tests.support.nemesis.Nemesis."""

    at: float
    kind: str
    targets: tuple[str, ...]  # worker or router names
    lasts_s: float = 0.0  # until the healing: a restart, a resumption, a healed link


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Everything that a run depends on."""

    seed: int
    shape: ClusterShape = field(default_factory=ClusterShape)
    requests: tuple[RequestSpec, ...] = ()
    faults: tuple[Fault, ...] = ()
    allowed_ends: tuple[str, ...] = ("OK",)
    # A pass fails that computes for a prompt with this token; if deadly, so does each later one.
    toxin: int | None = None
    is_deadly: bool = False

    def allowed_ends_of(self, request: RequestSpec) -> tuple[str, ...]:
        """Return what a request may end with; one that makes passes fail must not end well."""
        return ("INTERNAL",) if self.toxin in request.prompt else self.allowed_ends


def make_scenario(
    seed: int, fault_kinds: Sequence[str] = (), *, tiny_pools: bool = False
) -> Scenario:
    """Draw a run: a small cluster, a handful of requests, up to four faults of the given kinds."""
    rng = random.Random(f"scenario/{seed}")
    # Of two workers one goes on.
    least = 2 if "break_engine" in fault_kinds else 1
    shape = ClusterShape(
        num_prefill=rng.randint(least, 3),
        num_decode=rng.choice((least, least, 2)) if tiny_pools else rng.randint(least, 3),
        num_routers=rng.choice((1, 1, 2)),
        prefill_pages=rng.randint(22, 28) if tiny_pools else 256,
        decode_pages=rng.randint(22, 28) if tiny_pools else 256,
        local_prefill_max_tokens=rng.choice((0, 0, 8)),
        chunk_pages=rng.randint(1, 4),
        max_step_tokens=rng.choice((40, 64, 256)),
        max_running_sequences=rng.choice((8, 32)),
        pass_s=rng.choice((0.01, 0.03)),
        jitter_s=rng.choice((0.0, 0.0005, 0.02)),
        window_bytes=rng.choice((64, 1024, 65536)),
        page_transfer_s=rng.choice((0.0005, 0.005, 0.05)),
        hangs_on_peer_death=rng.choice((True, False)),
    )
    more_pages = random.Random(f"chunks/{seed}").choice((0, 0, 1, 3, 20))
    blocking_s = random.Random(f"blocking/{seed}").choice((0.0, 0.0005, 0.005, 0.05))
    max_chunk_pages = shape.chunk_pages + more_pages
    shape = replace(shape, max_chunk_pages=max_chunk_pages, blocking_s=blocking_s)
    return Scenario(
        seed=seed,
        shape=shape,
        requests=_draw_requests(rng, shape, rng.randint(3, 7) if tiny_pools else rng.randint(2, 4)),
        faults=_draw_faults(rng, shape, fault_kinds),
    )


def with_crowd(scenario: Scenario) -> Scenario:
    """Add requests that share one prefix, and more of them than schedulers look at at once."""
    rng = random.Random(f"crowd/{scenario.seed}")
    prefix = _draw_tokens(rng, rng.randint(24, 60))
    crowd = tuple(
        RequestSpec(
            name=f"c{index}",
            prompt=prefix + _draw_tokens(rng, rng.randint(1, 4)),
            params=SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 4)),
            arrives_at=rng.choice((0.0, rng.uniform(0.0, 0.3))),
            cancels_after_s=rng.uniform(0.0, 0.6) if rng.random() < 0.15 else None,
            router=rng.randrange(scenario.shape.num_routers),
        )
        for index in range(34)
    )
    # They come before the routers can know how soon such short requests end.
    shape = replace(scenario.shape, max_expected_wait_s=1000.0)
    return replace(scenario, shape=shape, requests=scenario.requests + crowd)


def with_toxin(scenario: Scenario, *, is_deadly: bool) -> Scenario:
    """Give the first request, and no other, a token that makes each pass fail which meets it."""
    toxin = VOCAB_SIZE - 1
    requests = [
        replace(each, prompt=tuple(token % toxin for token in each.prompt))
        for each in scenario.requests
    ]
    prompt = requests[0].prompt
    requests[0] = replace(
        requests[0], prompt=(*prompt[:-1], toxin), cancels_after_s=None, arrives_at=0.1
    )
    return replace(scenario, requests=tuple(requests), toxin=toxin, is_deadly=is_deadly)


def _draw_requests(
    rng: random.Random, shape: ClusterShape, num_requests: int
) -> tuple[RequestSpec, ...]:
    prefixes = [_draw_tokens(rng, rng.randint(0, 40)) for _ in range(rng.randint(1, 3))]
    requests = []
    for index in range(num_requests):
        prompt = rng.choice(prefixes) + _draw_tokens(rng, rng.randint(1, 20))
        temperature = rng.choice((0.0, 0.8))
        params = SamplingParams(
            temperature=temperature,
            seed=rng.randrange(2**32),
            max_tokens=rng.randint(1, 28 if shape.decode_pages < 64 else 14),
            min_tokens=rng.choice((0, 0, 1)),
            frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
            stop_token_ids=rng.choice(((), (1, 2, 3))),
            ignore_eos=rng.choice((True, False)),
            logprobs=rng.choice((None, None, 2)),
        )
        cancels_after_s = rng.uniform(0.0, 0.6) if rng.random() < 0.15 else None
        requests.append(
            RequestSpec(
                name=f"r{index}",
                prompt=prompt,
                params=params,
                n=rng.choice((1, 1, 1, 2, 3)),
                arrives_at=rng.choice((0.0, rng.uniform(0.0, 1.0))),
                cancels_after_s=cancels_after_s,
                reads_slowly_s=rng.choice((0.0, 0.0, 0.0, 0.1)),
                router=rng.randrange(shape.num_routers),
            )
        )
    return tuple(requests)


def _draw_tokens(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_tokens))


def _draw_faults(
    rng: random.Random, shape: ClusterShape, kinds: Sequence[str]
) -> tuple[Fault, ...]:
    if not kinds:
        return ()
    prefills = [f"prefill-{index}" for index in range(shape.num_prefill)]
    decodes = [f"decode-{index}" for index in range(shape.num_decode)]
    routers = [f"router-{index}" for index in range(shape.num_routers)]
    # The pools that a fault may hit; those between two pools have two targets.
    pools: dict[str, tuple[list[str], ...]] = {
        "damage": (list(DAMAGES),),
        "delay": (prefills,),
        "kill_prefill": (prefills,),
        "kill_decode": (decodes,),
        "lose_prefill": (prefills,),
        "lose_decode": (decodes,),
        "kill_router": (routers,),
        "pause_prefill": (prefills,),
        "pause_decode": (decodes,),
        "slow_down": (prefills + decodes,),
        "fail_pass": (prefills + decodes,),
        "break_engine": (["prefill-0", "decode-0"],),
        "cut_data": (prefills, decodes),
        "cut_control": (routers, prefills + decodes),
        "reset_data": (prefills, decodes),
        "reset_control": (routers, decodes),
    }
    faults = []
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(kinds)
        targets = pools[kind]
        faults.append(
            Fault(
                at=rng.uniform(0.0, 0.9),
                kind=kind,
                targets=tuple(rng.choice(pool) for pool in targets),
                lasts_s=rng.choice((0.1, 0.5, 1.0, 3.0)),
            )
        )
    return tuple(sorted(faults, key=lambda fault: fault.at))
