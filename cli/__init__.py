"""The command line of a whole installation: commands that run clusters, and those of a client."""
