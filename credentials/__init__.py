"""Who calls inside a cluster, and how each side proves it.

All processes of a cluster derive their keys from one secret, which only the process that starts
the cluster knows (`secret`). A caller proves with each call who it is and whom it means, and the
callee answers with a proof of its own (`cluster`, `channel`, `gate`). The contract in protos/ says
who may call what (`rules`).

`ServerGate` and `ProvenChannel` tell handlers and callers who the other side is, and nothing
outside this package knows how they found out. TLS comes before that: `config` has its options, and
through `door` each server listens and each process of the cluster connects. See docs/security.md
for what this does and does not protect from.
"""
