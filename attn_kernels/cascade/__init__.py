"""Decode attention that reads shared prefixes once."""
