"""Families of faults in simulated clusters, and one run of a family by its seed."""

from dataclasses import replace

from decode_worker.config import DecodeConfig
from tests.support.scenario import make_scenario, with_crowd, with_toxin
from tests.support.simulator import RunResult, simulate

MAX_REQUEST_FAILURES = DecodeConfig().max_request_failures
# family |-> (fault kinds, seeds)
FAMILIES: dict[str, tuple[tuple[str, ...], int]] = {
    "healthy": ((), 150),
    "prefill_dies": (("kill_prefill", "lose_prefill"), 250),
    "decode_dies": (("kill_decode", "lose_decode"), 250),
    "pages_go_wrong": (("damage", "delay"), 350),
    "stalls": (("pause_prefill", "pause_decode", "slow_down"), 200),
    "network": (("cut_control", "cut_data", "reset_control", "reset_data"), 200),
    "router_dies": (("kill_router",), 100),
    "passes_fail": (("fail_pass",), 100),
    "engines_break": (("break_engine",), 50),
    "toxic": ((), 25),  # one request makes each pass fail that computes for it
    "deadly": ((), 50),  # ... and costs the worker its engine
    "crowds": (("kill_prefill", "damage", "delay"), 25),  # many share one prefix in flight
    "everything": (
        (
            "kill_prefill",
            "lose_prefill",
            "kill_decode",
            "damage",
            "delay",
            "pause_prefill",
            "pause_decode",
            "slow_down",
            "cut_data",
            "reset_control",
            "reset_data",
        ),
        400,
    ),
}
# What else than OK a request may end with; its tokens must be right up to there.
ALLOWED_ENDS = {
    "router_dies": ("OK", "UNAVAILABLE"),
    "passes_fail": ("OK", "INTERNAL"),
}


def run(family: str, seed: int) -> RunResult:
    """Run one seed of a family.

    Of every third seed the pools are too small for all at once; of every fourth no step runs ahead.
    """
    kinds, _ = FAMILIES[family]
    scenario = make_scenario(seed, kinds, tiny_pools=seed % 3 == 0)
    if seed % 4 == 1:
        scenario = replace(scenario, shape=replace(scenario.shape, max_launched=1))
    allowed_ends = ALLOWED_ENDS.get(family, ("OK",))
    if family == "passes_fail" and len(scenario.faults) < MAX_REQUEST_FAILURES:
        allowed_ends = ("OK",)
    if family == "crowds":
        scenario = with_crowd(scenario)
    if family in ("toxic", "deadly"):
        scenario = with_toxin(scenario, is_deadly=family == "deadly")
    result = simulate(replace(scenario, allowed_ends=allowed_ends))
    allowed_losses = {"toxic": 0, "deadly": MAX_REQUEST_FAILURES}
    if len(result.lost_engines) > allowed_losses.get(family, 1000):
        result.violations.append(f"it cost the engines of {result.lost_engines}")
    if family in ("healthy", "toxic"):  # a toxic request, which tells no totals, harms itself only
        result.violations += [
            f"{number} {name} in a {family} cluster"
            for name in ("prefill_retries", "resumptions")
            if (number := result.total(name))
        ]
    return result
