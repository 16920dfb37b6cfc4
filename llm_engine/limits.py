"""Limits for configurations; imports nothing."""

MAX_SEATS = 1024  # sequences that decode at once: rows of the largest recorded step
MAX_RECORDED_TOKENS = 2048  # of a pass of prompt tokens
