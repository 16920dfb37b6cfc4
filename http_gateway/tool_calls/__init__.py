"""Reads calls of tools out of a model's text, in the formats that chat templates teach."""
