"""Shared state: page layout, page pool, radix tree, prefix cache and its events."""
