"""Who serves a request: validation, prefix index, policy, worker registry, streaming. No torch."""
