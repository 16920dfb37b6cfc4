"""Limits that configurations are checked against; imports nothing."""

MAX_SEATS = 1024  # sequences that decode at once: rows of the largest recorded step
