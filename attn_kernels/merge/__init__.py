"""Joining attention states over disjoint keys."""
