"""Pages move between pools: protocol, digests, connections and transports."""
