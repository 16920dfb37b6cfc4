"""Who is a member: the pure part of the controller."""

from router.membership import WorkerMember


class Membership:
    """The latest start of each worker. Everything here is rebuilt by the next announcements."""

    def __init__(self) -> None:
        self._members: dict[str, WorkerMember] = {}  # worker_id |-> its latest start

    @property
    def members(self) -> tuple[WorkerMember, ...]:
        """All members, by name."""
        return tuple(self._members[worker_id] for worker_id in sorted(self._members))

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._members

    def announce(self, member: WorkerMember) -> bool:
        """Enter a start of a worker; returns whether that changed anything.

        A worker announces itself only from its newest process: Ray starts another one only after
        the old one's death, so the latest announcement wins.
        """
        changed = self._members.get(member.worker_id) != member
        self._members[member.worker_id] = member
        return changed
