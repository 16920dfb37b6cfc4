"""The command line: pagewire serve, demo, generate, chat, status, doctor, version.

Exit codes: 0 all went well; 1 something did not, and the text on standard error says what; 2 the
command line itself was wrong.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from cluster.config import ClusterConfig
from cluster.demo_model import demo_model_dir
from cluster.devices import count_gpus
from cluster.environment import prepare_local_ray
from cluster.errors import ClusterError, Interrupted
from cluster.flags import with_config_flags
from cluster.status import status_json, status_table
from cluster.stop_signals import StopSignals
from observability.logs import configure_logging
from pagewire import Client, Delta, Message, PagewireError, SamplingOptions

DEFAULT_ADDRESS = "localhost:50051"
STATUS_PERIOD_S = 0.5
LEVEL_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}

app = typer.Typer(
    help="Disaggregated LLM serving: a prefix is computed once, moved once, read once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
out = Console()

AddressFlag = Annotated[str, typer.Option("--address", help="Where the router is, host:port.")]
ModelFlag = Annotated[str, typer.Option("--model", help="Served model name; empty: the only one.")]
TimeoutFlag = Annotated[float, typer.Option("--timeout-s", help="Longest time for an answer.")]
TemperatureFlag = Annotated[
    float | None, typer.Option("--temperature", help="0 is greedy. Default: the model's.")
]
TopPFlag = Annotated[float | None, typer.Option("--top-p", help="In (0, 1]; 1 is off.")]
TopKFlag = Annotated[int | None, typer.Option("--top-k", help="0 is off.")]
SeedFlag = Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")]
MaxTokensFlag = Annotated[int, typer.Option("--max-tokens", help="Most tokens to generate.")]
StopFlag = Annotated[
    list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def serve(config: ClusterConfig) -> None:
    """Serve a checkpoint in the foreground until Ctrl-C or SIGTERM."""
    prepare_local_ray()
    configure_logging(config.log_level, config.log_format)
    with StopSignals() as signals:
        from cluster.foreground import running_cluster  # imports Ray

        with running_cluster(config, signals, shows_worker_logs=True, say=_say) as cluster:
            _say(f"ready: pagewire serves {config.model} on {cluster.address} ({cluster.device})")
            signals.stopped.wait()
            _say(f"stopping; running requests have {config.stop_grace_s:.0f} s")
        _say("stopped")


def demo_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return 2 + 2 workers, or as many as there are GPUs."""
    num_gpus = count_gpus() if given.get("device", "auto") != "cpu" else 0
    is_fitted = num_gpus >= 2 and not {"prefill", "decode"} & given.keys()
    num_workers = min(num_gpus, 4) if is_fitted else 4
    num_decode = num_workers // 2
    # All of a GPU's memory would be millions of the embedded model's pages.
    pages = {"num_pages": 4096} if num_gpus >= 2 else {}
    return {
        **pages,
        # One GPU is not enough for two pools.
        "device": "cuda" if num_gpus >= 2 else "cpu",
        "prefill": num_workers - num_decode,
        "decode": num_decode,
        "port": 0,
        "page_size": 16,
        "log_level": "warning",
        "stop_grace_s": 0.0,
        # The demo shows the transfer, so nothing is prefilled where it is decoded.
        "decode_worker.local_prefill_max_tokens": 0,
    }


def demo(config: ClusterConfig) -> None:
    """Start a cluster on this host, answer prompts that share a prefix, and account for them."""
    prepare_local_ray()
    configure_logging(config.log_level, config.log_format)
    is_embedded = config.model is None
    config = config.model_copy(update={"model": config.model or demo_model_dir()})
    name = "the embedded model (random weights)" if is_embedded else str(config.model)
    with StopSignals() as signals:
        from cluster.demo import run_demo
        from cluster.foreground import running_cluster  # imports Ray

        with running_cluster(config, signals, shows_worker_logs=False, say=_say) as cluster:
            _say(f"ready on {cluster.address} with {name}; workers compute on {cluster.device}")
            signals.run(run_demo(cluster.address, out))
        _say("stopped")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    address: AddressFlag = DEFAULT_ADDRESS,
    model: ModelFlag = "",
    max_tokens: MaxTokensFlag = 128,
    temperature: TemperatureFlag = None,
    top_p: TopPFlag = None,
    top_k: TopKFlag = None,
    seed: SeedFlag = None,
    stop: StopFlag = None,
    timeout_s: TimeoutFlag = 600.0,
    as_json: JsonFlag = False,
) -> None:
    """Continue a text, streaming; the account goes to standard error."""
    text = sys.stdin.read() if prompt == "-" else prompt
    options = _options(max_tokens, temperature, top_p, top_k, seed, stop)
    with Client(address) as client:
        stream = client.stream(text, model=model, timeout_s=timeout_s, **options)
        with stream:
            for delta in stream:
                if not as_json:
                    _write(delta)
    if as_json:
        out.print_json(data=asdict(stream.completion))
        return
    sys.stdout.write("\n")
    usage = stream.completion.usage
    if usage:
        sys.stderr.write(
            f"prompt_tokens={usage.prompt_tokens} cached_tokens={usage.cached_tokens} "
            f"completion_tokens={usage.completion_tokens} pages_moved={usage.pages_moved} "
            f"ttft_ms={usage.ttft_ms:.0f} tpot_ms={usage.tpot_ms:.1f}\n"
        )


@app.command()
def chat(
    address: AddressFlag = DEFAULT_ADDRESS,
    model: ModelFlag = "",
    system: Annotated[str, typer.Option("--system", help="System message.")] = "",
    max_tokens: MaxTokensFlag = 512,
    temperature: TemperatureFlag = None,
    top_p: TopPFlag = None,
    top_k: TopKFlag = None,
    seed: SeedFlag = None,
    timeout_s: TimeoutFlag = 600.0,
) -> None:
    """Chat on the terminal; an empty line or Ctrl-D ends it."""
    options = _options(max_tokens, temperature, top_p, top_k, seed, None)
    messages = [Message(role="system", content=system)] if system else []
    with Client(address) as client:
        while line := _ask():
            messages.append(Message(role="user", content=line))
            stream = client.stream_chat(messages, model=model, timeout_s=timeout_s, **options)
            with stream:
                for delta in stream:
                    _write(delta)
            sys.stdout.write("\n")
            messages.append(Message(role="assistant", content=stream.completion.text))


@app.command()
def status(
    address: AddressFlag = DEFAULT_ADDRESS,
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show workers, pages and hit rates, live until Ctrl-C."""
    with Client(address, default_timeout_s=5.0) as client:
        if as_json:
            sys.stdout.write(status_json(client.status()) + "\n")
            return
        if once:
            out.print(status_table(client.status()))
            return
        stopped = _stop_event()
        with Live(status_table(client.status()), console=out, auto_refresh=False) as live:
            while not stopped.wait(STATUS_PERIOD_S):
                live.update(status_table(client.status()), refresh=True)


@app.command()
def doctor(
    model: Annotated[Path | None, typer.Option("--model", help="Checkpoint folder.")] = None,
    host: Annotated[str, typer.Option("--host", help="Address for the router.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port for the router.")] = 50051,
    as_json: JsonFlag = False,
) -> None:
    """Check this host: Python, torch, CUDA, NCCL wheels, Triton, Ray, memory, port, model."""
    from cluster.doctor import collect_facts, examine

    findings = examine(collect_facts(), host=host, port=port, model_dir=model)
    if as_json:
        out.print_json(data=[asdict(each) for each in findings])
    else:
        table = Table(box=None, show_header=False)
        for each in findings:
            style = LEVEL_STYLES[each.level]
            remedy = f"\n→ {escape(each.remedy)}" if each.remedy else ""
            table.add_row(f"[{style}]{each.level}[/]", each.check, escape(each.found) + remedy)
        out.print(table)
    if any(each.level == "fail" for each in findings):
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the versions of Pagewire and of what it runs on."""
    for name in ("pagewire", "torch", "triton", "ray", "grpcio", "protobuf", "nccl4py"):
        try:
            sys.stdout.write(f"{name} {metadata.version(name)}\n")
        except metadata.PackageNotFoundError:
            sys.stdout.write(f"{name} not installed\n")


app.command("serve")(with_config_flags(serve))
app.command("demo")(with_config_flags(demo, demo_defaults))


def main() -> None:
    """Run; turn expected failures into one line and exit code 1."""
    try:
        app()
    except Interrupted as interruption:
        sys.stderr.write(f"{interruption}\n")
        sys.exit(interruption.exit_code)
    except (ClusterError, PagewireError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _options(
    max_tokens: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: Iterable[str] | None,
) -> SamplingOptions:
    options = SamplingOptions(max_tokens=max_tokens)
    if temperature is not None:
        options["temperature"] = temperature
    if top_p is not None:
        options["top_p"] = top_p
    if top_k is not None:
        options["top_k"] = top_k
    if seed is not None:
        options["seed"] = seed
    if stop:
        options["stop"] = tuple(stop)
    return options


def _say(line: str) -> None:
    """Print one line at once and unwrapped, so that scripts can wait for it."""
    print(line, flush=True)


def _write(delta: Delta) -> None:
    sys.stdout.write(delta.text)
    sys.stdout.flush()


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _stop_event() -> threading.Event:
    """Return an event that SIGINT and SIGTERM set, once they are waited for in this way."""
    stopped = threading.Event()
    handler: Callable[..., None] = lambda *_: stopped.set()  # noqa: E731 - typed and tiny
    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)
    return stopped


if __name__ == "__main__":
    main()
