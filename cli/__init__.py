"""The terminal of a whole installation: the commands that run clusters, and those of a client."""
