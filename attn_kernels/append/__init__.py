"""Rotate queries and keys, and write keys and values to their slots of the page pool."""
