"""Causal attention of each request's last tokens over paged keys and values."""
