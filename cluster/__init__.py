"""Composition root: configuration, Ray placement, supervision and the command line."""
