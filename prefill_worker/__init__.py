"""Prompt in, pages and the first token out."""
