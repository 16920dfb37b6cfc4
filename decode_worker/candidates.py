"""Chooses the prefill worker that is asked for a group next."""

from collections.abc import Sequence

from decode_worker.request import PrefillGroup
from worker.identity import WorkerIdentity


class Candidates:
    """What is known of prefill workers besides what each request says."""

    def __init__(self) -> None:
        self._met: tuple[WorkerIdentity, ...] = ()  # as a router last named them
        self._num_arrivals_before_met = 0
        # Asked last, so that many groups waiting for one prefix learn together that it is gone.
        self._distrusted: set[WorkerIdentity] = set()

    def meet(self, prefill_workers: Sequence[WorkerIdentity], num_arrivals: int) -> None:
        """Take the prefill workers that a router can use now, instead of those named before.

        Args:
            prefill_workers: All of them.
            num_arrivals: How many requests arrived before.
        """
        self._met = tuple(prefill_workers)
        self._num_arrivals_before_met = num_arrivals

    def distrust(self, prefill_worker: WorkerIdentity) -> None:
        """Note that an attempt at a prefill worker failed."""
        self._distrusted.add(prefill_worker)

    def trust(self, prefill_worker: WorkerIdentity) -> None:
        """Forget that the last attempt at a prefill worker failed."""
        self._distrusted.discard(prefill_worker)

    def next_for(self, group: PrefillGroup) -> WorkerIdentity | None:
        """Return the prefill worker to ask for a group; None: all were asked.

        Those of its request come first, but all of them may have left while it waited. One has also
        left if a router has named another start of it since.
        """
        request = group.request
        own: Sequence[WorkerIdentity] = request.candidates
        if request.arrival < self._num_arrivals_before_met:
            named = {each.worker_id: each for each in self._met}
            own = [each for each in own if named.get(each.worker_id, each) == each]
        left = [each for each in (*own, *self._met) if each not in group.failed]
        trusted = [each for each in left if each not in self._distrusted]
        return next(iter(trusted or left), None)
