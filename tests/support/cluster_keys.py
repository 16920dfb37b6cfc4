"""One secret for all clusters of the tests, and the credentials derived from it."""

from typing import Any

from credentials.channel import ProvenChannel
from credentials.cluster import ClusterCredentials
from credentials.party import Party, Role
from credentials.secret import ClusterSecret
from router.membership import WorkerMember
from worker.identity import WorkerIdentity

SECRET = ClusterSecret(bytes(range(32)))


def role_of(worker_id: str) -> Role:
    return "prefill" if worker_id.startswith("prefill") else "decode"


def credentials_of(role: Role, name: str, incarnation: int = 1) -> ClusterCredentials:
    return ClusterCredentials(SECRET.keys_of(role, name), incarnation)


def worker_credentials(worker: WorkerIdentity) -> ClusterCredentials:
    """Credentials of a worker, whose name gives its role. They number calls: make them once."""
    return credentials_of(role_of(worker.worker_id), worker.worker_id, worker.incarnation)


def proven(
    channel: Any, worker: WorkerIdentity | WorkerMember, caller: ClusterCredentials
) -> ProvenChannel:
    """Make a caller's channel of one to a worker's address."""
    callee = Party(
        role=role_of(worker.worker_id), name=worker.worker_id, incarnation=worker.incarnation
    )
    return ProvenChannel(channel, caller.callee(callee))
