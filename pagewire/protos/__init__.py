"""Shared by both ends of a connection: the modules generated from protos/*.proto, and a few others.

It imports nothing else of the project, so every package may import it.
"""
