"""Composition root: configuration, Ray placement and supervision."""
