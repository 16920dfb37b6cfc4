"""Whole pages: gather, scatter, copy, digest."""
