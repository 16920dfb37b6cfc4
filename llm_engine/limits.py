"""Limits of the engine; imports nothing."""

MAX_SEATS = 1024  # sequences that decode at once: rows of the largest recorded step
MAX_RECORDED_TOKENS = 2048  # of a pass of prompt tokens
MAX_LOGPROBS = 20  # in recorded steps: each row gets as many if any row needs some
