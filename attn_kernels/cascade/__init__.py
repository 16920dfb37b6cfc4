"""Decode attention that reads what requests share once."""
