"""Continues each line of standard input, many at once, and tries again what the cluster refuses.

Start a cluster first: `make serve MODEL=DIR`. Then: `python examples/many_prompts.py < lines.txt`.
"""

import argparse
import asyncio
import sys

from pagewire import AsyncClient, OverloadedError, PagewireError, TransportError

NUM_ATTEMPTS = 5
DEFAULT_PAUSE_S = 1.0


async def answer(client: AsyncClient, prompt: str) -> str:
    """Return a continuation. The client repeats nothing by itself, so the patience is ours."""
    for _ in range(NUM_ATTEMPTS - 1):
        try:
            return (await client.generate(prompt, max_tokens=32, timeout_s=60)).text
        except OverloadedError as error:
            await asyncio.sleep(error.retry_after_s or DEFAULT_PAUSE_S)
        except TransportError:
            await asyncio.sleep(DEFAULT_PAUSE_S)
    return (await client.generate(prompt, max_tokens=32, timeout_s=60)).text


async def main() -> None:
    """Ask for all lines at once; print the answers in the order of the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="localhost:50051")
    arguments = parser.parse_args()
    prompts = [line.strip() for line in sys.stdin if line.strip()]
    async with AsyncClient(arguments.address) as client:
        try:
            answers = await asyncio.gather(*(answer(client, prompt) for prompt in prompts))
        except PagewireError as error:
            sys.exit(f"error: {error}")
    for prompt, text in zip(prompts, answers, strict=True):
        sys.stdout.write(f"{prompt} → {text}\n")


if __name__ == "__main__":
    asyncio.run(main())
