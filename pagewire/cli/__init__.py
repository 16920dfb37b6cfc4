"""The terminal of a client: the commands that talk to a running cluster."""
