"""Which workers come and go, and what is refused: without any of them running."""

import pytest

from cluster.config_file import load_config
from cluster.deployment import check_same
from cluster.errors import ConfigError
from cluster.pool_config import pool_of, role_of
from cluster.scaling import (
    ClusterWorkers,
    ScalePlan,
    check_drain,
    find_pool,
    is_worker,
    plan_move,
    plan_scale,
    told_counts,
    worker_ids,
)


def workers(*staying, leaving=(), silent=()):
    return ClusterWorkers(
        staying=frozenset(staying),
        leaving=frozenset(leaving),
        answering=frozenset(staying) - set(silent),
    )


CONFIG = load_config(None, {"model": "/models/tiny"})
TWO_AND_TWO = workers(*worker_ids({"prefill": 2, "decode": 2}))


def test_new_workers_take_the_lowest_free_numbers_and_those_with_the_highest_leave():
    running = workers("prefill-0", "prefill-10", "prefill-9", "decode-1", leaving=["decode-0"])

    plan = plan_scale(running, CONFIG, "cpu", {"prefill": 1, "decode": 3})

    assert plan == ScalePlan(starts=("decode-2", "decode-3"), drains=("prefill-9", "prefill-10"))


def test_workers_that_do_not_answer_leave_before_those_with_the_highest_numbers():
    names = worker_ids({"prefill": 1, "decode": 5})
    running = workers(*names, silent=["decode-0", "decode-3"])

    def leaving(number):
        return plan_scale(running, CONFIG, "cpu", {"decode": number}).drains

    assert leaving(4) == ("decode-3",)
    assert leaving(3) == ("decode-0", "decode-3")
    assert leaving(1) == ("decode-2", "decode-4", "decode-0", "decode-3")


def test_a_pool_that_is_not_named_or_has_that_many_stays_as_it_is():
    assert plan_scale(TWO_AND_TWO, CONFIG, "cpu", {"decode": 2}) == ScalePlan(starts=(), drains=())


@pytest.mark.parametrize(
    ("wanted", "running", "words"),
    [
        (
            {"decode": 0},
            TWO_AND_TWO,
            "--decode: found 0; allowed: 1 to 1024, because the last decode worker ",
        ),
        (
            {"prefill": 0},
            TWO_AND_TWO,
            "--prefill: found 0; allowed: 1 to 1024, because the last prefill worker ",
        ),
        ({"decode": -1}, TWO_AND_TWO, "--decode: found -1; allowed: 1 to 1024"),
        (
            {"prefill": 1},
            workers("decode-0"),
            "--prefill: found 1; allowed: 0, because the cluster was started without prefill worke",
        ),
        (
            {"decode": 1},
            workers(*worker_ids({"prefill": 1, "decode": 2}), silent=["decode-0", "decode-1"]),
            "--decode: found 1; allowed: what leaves a decode worker that serves, because decode-0 "
            "would remain, and nothing has been heard from there lately",
        ),
    ],
)
def test_what_would_end_the_service_is_refused_with_what_was_found(wanted, running, words):
    with pytest.raises(ConfigError) as refusal:
        plan_scale(running, CONFIG, "cpu", wanted)

    assert str(refusal.value).startswith(words)


def test_too_many_workers_are_refused_without_the_reason_of_too_few():
    with pytest.raises(ConfigError) as refusal:
        plan_scale(TWO_AND_TWO, CONFIG, "cpu", {"decode": 9999})

    assert str(refusal.value) == "--decode: found 9999; allowed: 1 to 1024"


SMALL = load_config(None, {"model": "/models/tiny", "pools.small.role": "decode"})
WITH_SMALL = workers(*worker_ids({"prefill": 1, "decode": 2, "decode-small": 2}))


def test_a_further_pool_grows_shrinks_and_ends_while_its_role_has_others():
    def plan(number):
        return plan_scale(WITH_SMALL, SMALL, "cpu", {"decode-small": number})

    assert plan(3) == ScalePlan(starts=("decode-small-2",), drains=())
    assert plan(0) == ScalePlan(starts=(), drains=("decode-small-0", "decode-small-1"))
    assert plan_scale(WITH_SMALL, SMALL, "cpu", {"decode": 0}).drains == ("decode-0", "decode-1")
    with pytest.raises(ConfigError, match=r"--pool small: found -1; allowed: 0 to 1024"):
        plan(-1)
    last = "--decode, --pool small: found 0 and 0; allowed: what leaves a decode worker, because"
    with pytest.raises(ConfigError, match=last):
        plan_scale(WITH_SMALL, SMALL, "cpu", {"decode": 0, "decode-small": 0})


def test_the_name_of_a_worker_tells_its_pool_and_its_role():
    names = worker_ids({"prefill": 1, "decode": 1, "decode-small": 1, "prefill-decode": 1})

    assert [(pool_of(each), role_of(each)) for each in names] == [
        ("prefill", "prefill"),
        ("decode", "decode"),
        ("decode-small", "decode"),
        ("prefill-decode", "prefill"),
    ]
    assert all(map(is_worker, names))
    assert not any(
        map(
            is_worker,
            ["router-0", "decode", "decode-", "decode-small", "decode-a-b-0", "xdecode-0"],
        )
    )
    assert WITH_SMALL.names == [
        "prefill-0",
        "decode-0",
        "decode-1",
        "decode-small-0",
        "decode-small-1",
    ]
    assert WITH_SMALL.counts == {"prefill": 1, "decode": 2, "decode-small": 2}


def test_pools_are_named_as_in_the_configuration():
    assert [find_pool(SMALL, each, "--pool") for each in ("prefill", "small")] == [
        "prefill",
        "decode-small",
    ]
    with pytest.raises(ConfigError, match="--pool: found 'smal'; allowed: prefill, decode, s"):
        find_pool(SMALL, "smal", "--pool")


def test_workers_without_ports_are_not_added():
    narrow = load_config(None, {"port_range": "20000-20006"})  # enough for those that run

    with pytest.raises(ConfigError, match=r"which has 7 ports; allowed: 8 or more, because 3 pre"):
        plan_scale(TWO_AND_TWO, narrow, "cpu", {"prefill": 3})
    plan_scale(TWO_AND_TWO, narrow, "cpu", {"prefill": 1})


def test_workers_that_share_gpus_are_not_added():
    shared = load_config(None, {"model": "/models/tiny", "workers_per_gpu": 2})

    with pytest.raises(
        ConfigError, match=r"workers_per_gpu: found 2; allowed: 1 where workers join"
    ):
        plan_scale(TWO_AND_TWO, shared, "cuda", {"decode": 3})
    assert plan_scale(TWO_AND_TWO, shared, "cuda", {"decode": 1}).drains == ("decode-1",)


def test_a_worker_may_be_drained_while_another_one_answers_and_told_twice():
    check_drain(TWO_AND_TWO, "decode-0")
    check_drain(workers("prefill-0", "decode-0", leaving=["decode-1"]), "decode-1")


@pytest.mark.parametrize(
    ("worker_id", "running", "words"),
    [
        ("decode-7", TWO_AND_TWO, "WORKER: found 'decode-7'; allowed: prefill-0, prefill-1, "),
        ("router-0", TWO_AND_TWO, "WORKER: found 'router-0'; allowed: prefill-0, prefill-1, "),
        (
            "decode-0",
            workers("prefill-0", "decode-0", leaving=["decode-1"]),
            "WORKER: found 'decode-0'; allowed: what leaves a decode worker, because the last "
            "decode worker must stay, or nothing is served; add one first with "
            "`pagewire scale --decode 2`",
        ),
        (
            "prefill-0",
            workers("prefill-0", "decode-0"),
            "WORKER: found 'prefill-0'; allowed: what leaves a prefill worker, because the last "
            "prefill worker must stay; to do without it, ",
        ),
        (
            "decode-0",
            workers("decode-0", "decode-1", silent=["decode-1"]),
            "WORKER: found 'decode-0'; allowed: what leaves a decode worker that serves, because "
            "decode-1 would remain, and nothing has been heard from there lately",
        ),
    ],
)
def test_a_worker_that_is_unknown_or_needed_is_not_drained(worker_id, running, words):
    with pytest.raises(ConfigError) as refusal:
        check_drain(running, worker_id)

    assert str(refusal.value).startswith(words)


def test_a_worker_that_moves_gets_the_lowest_free_name_of_the_other_pool():
    assert plan_move(TWO_AND_TWO, CONFIG, "cpu", "prefill-1", "decode") == "decode-2"
    assert plan_move(TWO_AND_TWO, CONFIG, "cuda", "decode-0", "prefill") == "prefill-2"
    assert plan_move(WITH_SMALL, SMALL, "cpu", "decode-small-0", "decode") == "decode-2"
    assert plan_move(WITH_SMALL, SMALL, "cpu", "decode-1", "decode-small") == "decode-small-2"


@pytest.mark.parametrize(
    ("worker_id", "pool", "running", "words"),
    [
        ("decode-7", "prefill", TWO_AND_TWO, "WORKER: found 'decode-7'; allowed: prefill-0, "),
        (
            "decode-1",
            "prefill",
            workers("prefill-0", "decode-0", leaving=["decode-1"]),
            "WORKER: found 'decode-1', which is leaving; allowed: prefill-0, decode-0",
        ),
        (
            "decode-1",
            "decode",
            TWO_AND_TWO,
            "--to: found 'decode', where decode-1 is already; allowed: another pool; nothing has ",
        ),
        (
            "prefill-0",
            "decode",
            workers("prefill-0", "decode-0"),
            "WORKER: found 'prefill-0'; allowed: what leaves a prefill worker, because the last "
            "prefill worker must stay; to do without it, `pagewire down`, then `pagewire up "
            "--prefill 0`; add one first with `pagewire scale --prefill 2`",
        ),
        (
            "decode-0",
            "prefill",
            workers("prefill-0", "decode-0", leaving=["decode-1"]),
            "WORKER: found 'decode-0'; allowed: what leaves a decode worker, because the last",
        ),
        (
            "decode-0",
            "prefill",
            workers("prefill-0", "decode-0", "decode-1", silent=["decode-1"]),
            "WORKER: found 'decode-0'; allowed: what leaves a decode worker that serves, because ",
        ),
        (
            "decode-0",
            "prefill",
            workers("prefill-0", "decode-0", "decode-1", silent=["decode-0"]),
            "WORKER: found 'decode-0', which has not been heard from lately; allowed: a worker ",
        ),
        (
            "decode-0",
            "prefill",
            workers("decode-0", "decode-1"),
            "--to: found 'prefill'; allowed: a pool of decode workers, because the cluster was s",
        ),
        (
            "decode-0",
            "prefill",
            workers(*worker_ids({"prefill": 1024, "decode": 2})),
            "--to: found 'prefill', which has 1024 workers; allowed: a pool with fewer",
        ),
    ],
)
def test_a_worker_that_cannot_move_stays_with_what_was_found(worker_id, pool, running, words):
    with pytest.raises(ConfigError) as refusal:
        plan_move(running, CONFIG, "cpu", worker_id, pool)

    assert str(refusal.value).startswith(words)


def test_workers_that_share_gpus_do_not_move():
    shared = load_config(None, {"model": "/models/tiny", "workers_per_gpu": 2})

    with pytest.raises(
        ConfigError, match=r"workers_per_gpu: found 2; allowed: 1 where workers move"
    ):
        plan_move(TWO_AND_TWO, shared, "cuda", "decode-1", "prefill")


DOWN_ENDS_IT = "a running cluster keeps these options; `pagewire down` ends it"


def config(**options):
    return load_config(None, {"model": "/models/tiny", **options})


@pytest.mark.parametrize(
    "asked",
    [config(), config(decode=6), config(ray_address="auto", start_timeout_s=5.0)],
    ids=["as it was started", "as it was scaled", "asked from elsewhere"],
)
def test_the_configuration_of_the_running_cluster_is_known_again(asked):
    scaled = check_same(config(), {"prefill": 1, "decode": 6}, asked)

    told = (
        "decode: running 6; wanted 1; the cluster was scaled since its start; "
        "`pagewire scale --decode 1` changes that"
    )
    assert scaled == ([] if asked.decode == 6 else [told])
    assert check_same(config(), {"prefill": 1, "decode": 1}, config()) == []


def test_each_option_that_differs_from_the_running_clusters_is_named_with_both_values():
    asked = config(decode=2, page_size=32, **{"router.dead_after_s": 20.0})

    with pytest.raises(ConfigError) as refusal:
        check_same(config(), {"prefill": 1, "decode": 6}, asked)

    assert str(refusal.value).splitlines() == [
        "decode: running 6; wanted 2; `pagewire scale --decode 2` changes that",
        "page_size: running 64; wanted 32",
        "router.dead_after_s: running 15.0; wanted 20.0",
        DOWN_ENDS_IT,
    ]


def test_values_that_differ_are_told_as_a_file_has_them():
    paths = {f"10.0.0.{index}": f"/models/{'x' * 40}" for index in range(3)}
    asked = load_config(
        None,
        {
            "model": "/models/other",
            "model_paths": paths,
            "served_model_name": "a: b",
            "insecure": True,
            "tracing.endpoint": "",
            "ray_address": "auto",
        },
    )

    with pytest.raises(ConfigError) as refusal:
        check_same(config(**{"tracing.endpoint": "http://one"}), {"prefill": 1, "decode": 1}, asked)

    *told, last = str(refusal.value).splitlines()
    written = {name: each for name, _, each in (line.partition(": running ") for line in told)}
    assert written == {
        "model": "/models/tiny; wanted /models/other",
        "model_paths": "unset; wanted {" + ", ".join(f"{k}: {v}" for k, v in paths.items()) + "}",
        "served_model_name": "''; wanted 'a: b'",
        "insecure": "false; wanted true",
        "tracing.endpoint": "http://one; wanted ''",
    }
    assert last == DOWN_ENDS_IT


def test_pools_that_differ_from_the_running_clusters_are_named_too():
    running = config(**{"pools.small.role": "decode", "pools.small.num_pages": 8})
    counts = {"prefill": 1, "decode": 1, "decode-small": 2}
    same = {"pools.small.role": "decode", "pools.small.num_pages": 8}

    scaled = check_same(running, counts, config(**same))
    assert scaled == [
        "pools.small.workers: running 2; wanted 1; the cluster was scaled since its start; "
        "`pagewire scale --pool small=1` changes that"
    ]
    assert check_same(running, counts, config(**same, **{"pools.small.workers": 2})) == []
    with pytest.raises(ConfigError) as refusal:
        check_same(
            running,
            counts,
            config(
                **{
                    "pools.small.role": "decode",
                    "pools.small.workers": 3,
                    "pools.early.role": "prefill",
                }
            ),
        )

    assert sorted(str(refusal.value).splitlines()) == [
        DOWN_ENDS_IT,
        "pools.early.role: running ''; wanted prefill",
        "pools.early.workers: running unset; wanted 1",
        "pools.small.num_pages: running 8; wanted unset",
        "pools.small.workers: running 2; wanted 3; `pagewire scale --pool small=3` changes that",
    ]


def test_numbers_of_workers_are_told_as_people_do():
    told = [told_counts(*each) for each in ((1, 1), (2, 4), (0, 1))]

    assert told == [
        "1 prefill and 1 decode worker",
        "2 prefill and 4 decode workers",
        "1 decode worker",
    ]
