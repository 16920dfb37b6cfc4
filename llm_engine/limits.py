"""Limits for configurations; imports nothing."""

MAX_SEATS = 1024  # sequences that decode at once: rows of the largest recorded step
