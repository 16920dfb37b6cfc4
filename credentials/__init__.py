"""Identifies the callers inside a cluster, with proofs in both directions.

All processes of a cluster derive their keys from one secret, which only the process that starts
the cluster knows (`secret`). With each call, the caller proves its identity and names the callee,
and the callee answers with its own proof (`cluster`, `channel`, `gate`). The contract in protos/
lists the callers of each method (`rules`).

`ServerGate` and `ProvenChannel` tell handlers and callers the identity of the other side; nothing
outside this package knows how they determined it. TLS comes first: `config` has its options, and
every server listens, and every process of the cluster connects, through `door`. docs/security.md
says what this protects from, and what not.
"""
