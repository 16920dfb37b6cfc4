"""Attention of one query token per request over paged keys and values."""
