"""The members, and which of them are to leave: the pure part of the controller.

The next announcements rebuild everything here, with one exception: if a leaving worker's process
and the controller die together, the worker comes back as one that stays.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from cluster.places import Place
from router.membership import WorkerMember

HEARD_S = 6.0  # three announcements; a worker that is silent for longer may not be there
MAX_REPLACED = 8  # starts of a worker; more than one or two never live at once


class Membership:
    """The latest start of each worker."""

    def __init__(self) -> None:
        self._members: dict[str, WorkerMember] = {}  # worker_id |-> its latest start
        self._heard_at: dict[str, float] = {}  # worker_id |-> time of its last announcement
        self._places: dict[str, Place] = {}  # worker_id |-> its present or future place
        self._replaced: dict[str, deque[int]] = {}  # worker_id |-> starts that were replaced
        # worker_id |-> start that ends for a restart, and seconds for its running requests
        self._restarting: dict[str, tuple[int, float]] = {}
        self._leaving: dict[str, float] = {}  # worker_id |-> seconds for its running requests
        # worker_id |-> its starts, as far as they were known; none is placed or heard of since.
        self._gone: dict[str, frozenset[int]] = {}

    @property
    def members(self) -> tuple[WorkerMember, ...]:
        """All members, by name."""
        return tuple(
            replace(
                self._members[worker_id],
                is_draining=worker_id in self._leaving or worker_id in self._restarting,
            )
            for worker_id in sorted(self._members)
        )

    @property
    def leaving(self) -> frozenset[str]:
        """The names of workers that are to leave."""
        return frozenset(self._leaving)

    @property
    def restarting(self) -> frozenset[str]:
        """The names of workers that end for a restart, until their next start announces itself."""
        return frozenset(self._restarting)

    @property
    def gone(self) -> frozenset[str]:
        """The names of forgotten workers; Ray may still list them for a moment."""
        return frozenset(self._gone)

    @property
    def places(self) -> Mapping[str, Place]:
        """The place of each worker, as far as it is known."""
        return self._places

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._members

    def announce(self, member: WorkerMember, now: float) -> bool:
        """Enter a start of a worker; returns whether that changed anything.

        An unknown start replaces the one before it. The old one may live on for a while if Ray has
        given up its host, and counts only when the new one has fallen silent. What starts of a
        worker that is gone announce later is ignored.
        """
        if member.incarnation in self._gone.get(member.worker_id, ()):
            return False
        known = self._members.get(member.worker_id)
        if known is not None and known.incarnation != member.incarnation:
            replaced = self._replaced.setdefault(member.worker_id, deque(maxlen=MAX_REPLACED))
            is_silent = self._heard_at[member.worker_id] <= now - HEARD_S
            if member.incarnation in replaced and not is_silent:
                return False
            replaced.append(known.incarnation)
        ending = self._restarting.get(member.worker_id)
        if ending is not None and ending[0] != member.incarnation:
            del self._restarting[member.worker_id]  # this is the one that it was to become
        changed = known != member
        self._members[member.worker_id] = member
        self._gone.pop(member.worker_id, None)
        self._heard_at[member.worker_id] = now
        if member.is_draining and member.worker_id not in self._leaving:
            self._leaving[member.worker_id] = 0.0  # as an earlier controller told it
            changed = True
        return changed

    def settle(self, worker_id: str, incarnation: int, place: Place) -> None:
        """Note the place of a worker's latest start; ignore other starts."""
        member = self._members.get(worker_id)
        if member is not None and member.incarnation == incarnation:
            self._places[worker_id] = place

    def place(self, worker_id: str, place: Place) -> None:
        """Note that a worker is placed; forget an earlier one of its name."""
        self._places[worker_id] = place
        self._leaving.pop(worker_id, None)
        self._gone.pop(worker_id, None)

    def dismiss(self, worker_id: str, grace_s: float) -> None:
        """Note that a worker is to leave, whichever of its processes."""
        self._leaving[worker_id] = grace_s

    def restart(self, worker_id: str, grace_s: float) -> int:
        """Note that the latest start of a member drains, and ends for a restart; return it."""
        incarnation = self._members[worker_id].incarnation
        self._restarting[worker_id] = incarnation, grace_s
        return incarnation

    def grace_of(self, member: WorkerMember) -> float | None:
        """Return the grace of a start that does not know that it must leave; None: it stays."""
        return None if member.is_draining else self._leaving.get(member.worker_id)

    def restart_grace_of(self, member: WorkerMember) -> float | None:
        """Return the grace of a start that ends for a restart; None: it does not."""
        incarnation, grace_s = self._restarting.get(member.worker_id, (None, 0.0))
        return grace_s if incarnation == member.incarnation else None

    def left(self, worker_id: str, incarnation: int) -> bool:
        """Forget a worker if this is its latest start; returns whether that changed anything."""
        member = self._members.get(worker_id)
        if member is not None and member.incarnation != incarnation:
            return False
        self.forget(worker_id)
        self._gone[worker_id] |= {incarnation}
        return member is not None

    def forget(self, worker_id: str) -> None:
        """Forget a worker that is gone."""
        member = self._members.pop(worker_id, None)
        self._heard_at.pop(worker_id, None)
        self._places.pop(worker_id, None)
        replaced = self._replaced.pop(worker_id, ())
        self._restarting.pop(worker_id, None)
        self._leaving.pop(worker_id, None)
        last = (*replaced, member.incarnation) if member else ()
        self._gone[worker_id] = self._gone.get(worker_id, frozenset()).union(last)

    def heard_since(self, since: float) -> frozenset[str]:
        """Return the workers that have announced themselves since a time."""
        return frozenset(name for name, at in self._heard_at.items() if at >= since)
