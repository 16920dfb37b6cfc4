"""Constrains answers: which tokens may come next so that a text stays in a language."""
