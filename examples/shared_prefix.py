"""Asks several questions about one document; after the first, only the questions are computed.

Start a cluster first: `make serve MODEL=DIR`. Then: `python examples/shared_prefix.py README.md`.
"""

import argparse
import sys
from pathlib import Path

from pagewire import Client, PagewireError

QUESTIONS = ("What is it?", "How do I start it?", "What is missing?")


def main() -> None:
    """Ask all questions, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("document", type=Path)
    parser.add_argument("--address", default="localhost:50051")
    arguments = parser.parse_args()
    try:
        document = arguments.document.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"document {str(arguments.document)!r} cannot be read: {error}")
    try:
        with Client(arguments.address) as client:
            for question in QUESTIONS:
                ask(client, f"{document}\n\nQ: {question}\nA:")
    except PagewireError as error:
        sys.exit(f"error: {error}")


def ask(client: Client, prompt: str) -> None:
    """Print an answer as it comes, and then what it cost."""
    with client.stream(prompt, max_tokens=64) as stream:
        for delta in stream:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    usage = stream.completion.usage
    assert usage is not None  # the stream was read to its end
    sys.stdout.write(
        f"\n[{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached, "
        f"{usage.pages_moved} pages moved, first token after {usage.ttft_ms:.0f} ms]\n"
    )


if __name__ == "__main__":
    main()
