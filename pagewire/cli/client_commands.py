"""The commands that talk to a running cluster: pagewire generate, chat, status, top.

A function finds the router of a command, and its parameters are flags of the command: a client's
function takes an address, a whole installation's looks for a cluster.
"""

import inspect
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from pagewire import (
    Client,
    ClusterStatus,
    Completion,
    Message,
    PagewireError,
    SamplingOptions,
    Stream,
    Tls,
    TransportError,
    Usage,
)
from pagewire.arguments import check_sampling, check_timeout_s, refused
from pagewire.cli.controller_view import RouterSilent
from pagewire.cli.early_interrupts import interrupts_end_at_once
from pagewire.cli.stopped import Stopped
from pagewire.cli.strict_command import StrictCommand, told_by_flags
from pagewire.cli.token import TokenFileFlag, token_of
from pagewire.cli.units import invalid_byte

if TYPE_CHECKING:
    from rich.console import Console  # slow

DEFAULT_ADDRESS = "localhost:50051"
ANSWER_TIMEOUT_S = 5.0
START_TIMEOUT_S = 30.0  # for a router that may be starting again
STATUS_PERIOD_S = 0.5
ONCE_S = 1.0  # between the two looks of a single table
WIDE_COLUMNS = 165  # width of the wide table of workers
LONG_WAIT_S = 2.0  # for a first token; only longer waits are shown
INTERRUPTED = 128 + signal.SIGINT  # exit code, by the convention of shells
INCOMPLETE = 3  # exit code: shown, but not everything has answered

# Given the longest time to find the router, and for a call without a time of its own, in seconds.
Connect = Callable[[float], AbstractContextManager[Client]]

AddressFlag = Annotated[str, typer.Option("--address", help="Address of the router, host:port.")]
TlsFlag = Annotated[
    bool, typer.Option("--tls", help="Connect over TLS; implied by the flags below.")
]
AuthorityFlag = Annotated[
    Path | None,
    typer.Option(
        "--authority-file", help="Authority of routers, PEM. Default: public authorities."
    ),
]
CertificateFlag = Annotated[
    Path | None, typer.Option("--certificate-file", help="Certificate to show to routers, PEM.")
]
KeyFlag = Annotated[Path | None, typer.Option("--key-file", help="Its private key, PEM.")]
ServerNameFlag = Annotated[
    str,
    typer.Option(
        "--server-name", help="Name in the routers' certificate; empty: the address's host."
    ),
]
ModelFlag = Annotated[str, typer.Option("--model", help="Served model name; empty: the only one.")]
TimeoutFlag = Annotated[float, typer.Option("--timeout-s", help="Longest time for an answer.")]
TemperatureFlag = Annotated[
    float | None,
    typer.Option("--temperature", help="0 for greedy, or 0.001 to 1000. Default: the model's."),
]
TopPFlag = Annotated[
    float | None, typer.Option("--top-p", help="Above 0, up to 1; 1 is off. Default: the model's.")
]
TopKFlag = Annotated[int | None, typer.Option("--top-k", help="0 is off. Default: the model's.")]
MinPFlag = Annotated[
    float | None, typer.Option("--min-p", help="0 to 1; 0 is off. Default: the model's.")
]
RepetitionFlag = Annotated[
    float | None,
    typer.Option("--repetition-penalty", help="0.001 to 1000; 1 is off. Default: the model's."),
]
PresenceFlag = Annotated[
    float | None, typer.Option("--presence-penalty", help="-2 to 2; 0 is off. Default: 0.")
]
FrequencyFlag = Annotated[
    float | None, typer.Option("--frequency-penalty", help="-2 to 2; 0 is off. Default: 0.")
]
SeedFlag = Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")]
MaxTokensFlag = Annotated[int, typer.Option("--max-tokens", help="Most tokens to generate.")]
MinTokensFlag = Annotated[
    int | None, typer.Option("--min-tokens", help="Fewest tokens to generate. Default: 0.")
]
StopFlag = Annotated[
    list[str] | None, typer.Option("--stop", help="Stop before this text; may be repeated.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_client_commands(
    app: typer.Typer, find: Callable[..., AbstractContextManager[Client]]
) -> None:
    """Add generate, chat, status and top to a command line.

    Args:
        app: The command line.
        find: Opens a client of the router, given the longest time for that and its calls, in
            seconds. Its other parameters become flags of each command.
    """
    for each in (generate, chat, status, top):
        app.command(each.__name__, cls=StrictCommand)(_with_flags_of(find, each))


@contextmanager
def named_router(
    timeout_s: float,
    address: AddressFlag = DEFAULT_ADDRESS,
    tls: TlsFlag = False,
    authority_file: AuthorityFlag = None,
    certificate_file: CertificateFlag = None,
    key_file: KeyFlag = None,
    server_name: ServerNameFlag = "",
    token_file: TokenFileFlag = None,
) -> Iterator[Client]:
    """Open a client of the router at an address."""
    files = tls_of(tls, authority_file, certificate_file, key_file, server_name)
    token = token_of(token_file)
    with Client(
        address,
        token=token,
        default_timeout_s=timeout_s,
        on_router_lost=tell_router_lost,
        tls=files,
    ) as client:
        yield client


def tls_of(
    is_asked: bool,
    authority_file: Path | None,
    certificate_file: Path | None,
    key_file: Path | None,
    server_name: str,
) -> Tls | None:
    """Return the TLS settings of the flags; any flag enables TLS."""
    if not (is_asked or authority_file or certificate_file or key_file or server_name):
        return None
    return Tls(
        authority_file=authority_file or "",
        certificate_file=certificate_file or "",
        key_file=key_file or "",
        server_name=server_name,
    )


def tell_router_lost(address: str, patience_s: float) -> None:
    """Say why an answer pauses, on a line of its own where a terminal shows the answer, too."""
    if sys.stderr is None:  # it is closed
        return
    begin = "\n" if sys.stdout.isatty() and sys.stderr.isatty() else ""
    sys.stderr.write(
        f"{begin}router at {address} lost, trying again for up to {patience_s:.0f} s\n"
    )
    sys.stderr.flush()


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    connect: Connect,
    model: ModelFlag = "",
    max_tokens: MaxTokensFlag = 128,
    temperature: TemperatureFlag = None,
    top_p: TopPFlag = None,
    top_k: TopKFlag = None,
    min_p: MinPFlag = None,
    repetition_penalty: RepetitionFlag = None,
    presence_penalty: PresenceFlag = None,
    frequency_penalty: FrequencyFlag = None,
    seed: SeedFlag = None,
    min_tokens: MinTokensFlag = None,
    stop: StopFlag = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue past the model's end tokens.")
    ] = False,
    timeout_s: TimeoutFlag = 600.0,
    as_json: JsonFlag = False,
) -> None:
    """Continue a text, streaming; usage goes to standard error."""
    text = _decoded(_standard_input().read(), 0) if prompt == "-" else prompt
    options = SamplingOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        min_tokens=min_tokens,
        stop=stop,
        ignore_eos=ignore_eos,
    )
    with connect(START_TIMEOUT_S) as client:
        if as_json:
            from rich.console import Console  # slow, and not needed for text

            completion = client.generate(text, model=model, timeout_s=timeout_s, **options)
            Console().print_json(data=_completion_fields(completion))
            return
        answer = _show(client.stream(text, model=model, timeout_s=timeout_s, **options))
    if usage := answer.usage:
        _tell_usage(usage)
        # The router cuts max_tokens to the room in the context.
        if answer.finish_reason == "length" and usage.completion_tokens < max_tokens:
            context_tokens = usage.prompt_tokens + usage.completion_tokens
            sys.stderr.write(
                f"note: the context of {context_tokens} tokens, prompt included, was full before "
                f"--max-tokens {max_tokens}\n"
            )


def _tell_usage(usage: Usage) -> None:
    faults = {
        "preemptions": usage.preemptions,
        "prefill_retries": usage.prefill_retries,
        "resumptions": usage.resumptions,
    }
    sys.stderr.write(
        f"prompt_tokens={usage.prompt_tokens} cached_tokens={usage.cached_tokens} "
        f"completion_tokens={usage.completion_tokens} pages_moved={usage.pages_moved} "
        f"ttft_ms={usage.ttft_ms:.0f} tpot_ms={usage.tpot_ms:.1f}"
        f"{''.join(f' {name}={count}' for name, count in faults.items() if count)}\n"
    )


def chat(
    context: typer.Context,
    connect: Connect,
    model: ModelFlag = "",
    system: Annotated[str, typer.Option("--system", help="System message.")] = "",
    max_tokens: MaxTokensFlag = 512,
    temperature: TemperatureFlag = None,
    top_p: TopPFlag = None,
    top_k: TopKFlag = None,
    seed: SeedFlag = None,
    timeout_s: TimeoutFlag = 600.0,
) -> None:
    """Chat with the model on the terminal.

    An empty line, Ctrl-D or Ctrl-C ends the chat. From a pipe, each non-empty line is a question.
    """
    options = SamplingOptions(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
    )
    check_sampling(options)  # before the first question
    check_timeout_s("timeout_s", timeout_s)
    messages = [Message(role="system", content=system)] if system else []
    try:
        with connect(START_TIMEOUT_S) as client:
            # Before the first question: is there a router with this model and a chat template?
            probe = [*messages, Message(role="user", content="?")]
            client.tokenize_chat(probe, model=model, timeout_s=ANSWER_TIMEOUT_S)
            for question in _questions():
                messages.append(Message(role="user", content=question))
                try:
                    answer = _show(
                        client.stream_chat(messages, model=model, timeout_s=timeout_s, **options)
                    )
                except PagewireError as error:
                    if not sys.stdin.isatty():
                        raise
                    messages.pop()  # the conversation continues without the question
                    sys.stderr.write(f"error: {told_by_flags(error, context.command.params)}\n")
                    continue
                messages.append(Message(role="assistant", content=answer.text))
    except KeyboardInterrupt:  # the client has already cancelled the answer
        raise typer.Exit(INTERRUPTED) from None


def status(
    connect: Connect,
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit.")] = False,
    wide: Annotated[
        bool, typer.Option("--wide", help=f"All columns; takes {WIDE_COLUMNS} characters a line.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show workers, pages, hit rates and totals.

    With rates. On a terminal, show them live until Ctrl-C, also while the router does not answer.
    Otherwise print one table with the rates of one second. Lines below it name what does not answer
    and say why; the exit code is then 3. If no router answers, show what the controller knows.
    """
    with interrupts_end_at_once():
        from rich.console import Console

        from pagewire.cli.status import view_json, view_table

    out = Console()
    try:
        with connect(ANSWER_TIMEOUT_S) as client:
            if once or as_json or not out.is_terminal:
                _show_once(client, out, is_wide=wide, as_json=as_json)
            else:
                _show_live(client, out, is_wide=wide)
    except RouterSilent as silent:
        if as_json:
            sys.stdout.write(view_json(silent) + "\n")
        else:
            out.print(view_table(silent))
        raise typer.Exit(INCOMPLETE) from None


def top(
    connect: Connect,
    interval_s: Annotated[
        float, typer.Option("--interval", help="Seconds between two updates, 0.1 to 3600.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print the rates of one interval and exit.")
    ] = False,
) -> None:
    """Watch rates and loads on the whole terminal.

    q or Ctrl-C ends it. It requests only the cluster's status. If the output is not a terminal, it
    acts as with --once, whose exit code is 3 if not everything answers.
    """
    if not 0.1 <= interval_s <= 3600:  # also catches NaN
        raise refused("interval_s", f"{interval_s:g}", "0.1 to 3600 seconds")
    with interrupts_end_at_once():
        from pagewire.cli.top import print_once, watch
    with connect(ANSWER_TIMEOUT_S) as client:
        if once or not sys.stdout.isatty():
            _end_if_incomplete(print_once(client, interval_s))
        else:
            watch(client, interval_s)


def _show_once(client: Client, out: "Console", *, is_wide: bool, as_json: bool) -> None:
    from pagewire.cli.rates import look_twice
    from pagewire.cli.status import status_json, status_table

    if as_json:
        found = client.status()
        sys.stdout.write(status_json(found) + "\n")
    else:
        if is_wide and out.width < WIDE_COLUMNS:  # whole lines, even in a pipe
            out.width = WIDE_COLUMNS
        found, rates = look_twice(client, ONCE_S)
        out.print(status_table(found, rates, is_wide=is_wide))
    _end_if_incomplete(found)


def _show_live(client: Client, out: "Console", *, is_wide: bool) -> None:
    from rich.console import Group, RenderableType
    from rich.live import Live
    from rich.text import Text

    from pagewire.cli.rates import Answer, RateWindow
    from pagewire.cli.status import router_silence, status_table

    stopped = _stop_event()
    window = RateWindow()

    def ask() -> RenderableType:
        found = client.status()
        rates = window.add(Answer(time.monotonic(), found))
        return status_table(found, rates, is_wide=is_wide)

    table = ask()
    with Live(table, console=out, auto_refresh=False) as live:
        answered_at = time.monotonic()
        while not stopped.wait(STATUS_PERIOD_S):
            try:
                table = ask()
            except TransportError:  # a dead router is back in seconds
                silence = router_silence(time.monotonic() - answered_at)
                live.update(Group(table, Text(silence)), refresh=True)
            else:
                answered_at = time.monotonic()
                live.update(table, refresh=True)


def _end_if_incomplete(found: ClusterStatus) -> None:
    """Tell a script that not everything in a status has answered."""
    from pagewire.cli.status import silences

    if silences(found):
        raise typer.Exit(INCOMPLETE)


def _with_flags_of(
    find: Callable[..., AbstractContextManager[Client]], command: Callable[..., None]
) -> Callable[..., None]:
    """Return a function for typer with the parameters of `find` in place of `connect`."""
    _, *own = inspect.signature(find).parameters.values()  # without the time
    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(command).parameters.values():
        parameters.extend(own if each.name == "connect" else [each])

    def run(**given: Any) -> None:
        found = {each.name: given.pop(each.name) for each in own}
        command(connect=partial(find, **found), **given)

    # typer reads a command's options from its signature.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__doc__ = command.__doc__
    return run


def _standard_input() -> BinaryIO:
    if sys.stdin is None:
        raise refused("standard input", "none, as it is closed", "text in UTF-8")
    return sys.stdin.buffer


def _decoded(content: bytes, offset: int) -> str:
    """Decode bytes that standard input has at an offset."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        found = invalid_byte(error, offset)
        raise refused("standard input", found, "text in UTF-8") from None


def _completion_fields(completion: Completion) -> dict[str, Any]:
    """Return an answer's fields, and by the same names what the client derives from them."""
    derived = {"text": completion.text, "finish_reason": completion.finish_reason}
    return asdict(completion) | derived


def _show(stream: Stream) -> Completion:
    """Write an answer as it comes, and end its line also where it breaks off."""
    with stream:
        try:
            with _long_wait_shown():
                first = list(islice(stream, 1))
            for delta in chain(first, stream):
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        except (PagewireError, KeyboardInterrupt):
            if stream.completion.text:  # what follows has a line of its own
                sys.stdout.write("\n")
            raise
    sys.stdout.write("\n")
    return stream.completion


@contextmanager
def _long_wait_shown() -> Iterator[None]:
    """Tell a terminal how long the first token is waited for, and clear the line when it comes."""
    # None: it is closed. A Console would take FORCE_COLOR for a terminal.
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    started_at = time.monotonic()
    shown = ExitStack()

    def show() -> None:
        from rich.console import Console  # not earlier: few waits are long
        from rich.live import Live
        from rich.text import Text

        out = Console(stderr=True)
        line = Live(
            get_renderable=lambda: Text(
                f"waiting for the first token, {time.monotonic() - started_at:.0f} s"
            ),
            console=out,
            refresh_per_second=2,
            transient=True,
        )
        shown.callback(line.stop)
        line.start(refresh=True)
        out.show_cursor()  # Live hides it, and Ctrl-Z would leave it hidden

    timer = threading.Timer(LONG_WAIT_S, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        shown.close()


def _questions() -> Iterator[str]:
    lines = _standard_input()
    if lines.isatty():
        try:
            while question := input("> ").strip():
                yield question
        except EOFError:
            sys.stdout.write("\n")
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            raise
        return
    offset = 0
    for line in lines:
        if question := _decoded(line, offset).strip():
            yield question
        offset += len(line)


def _stop_event() -> Stopped:
    """Return an event that SIGINT, SIGTERM and SIGHUP set."""
    stopped = Stopped()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stopped.set())
    return stopped
