"""Serving of requests: validation, prefix index, policy, worker registry, streaming. No torch."""
