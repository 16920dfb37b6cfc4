"""Gives running choices their seats in the engine's batch; tells the engine what has changed."""

from collections.abc import Sequence

from decode_worker.request import Choice
from llm_engine.engine_step import SeatPages


class Seats:
    """The seats of an engine, each free or of one running choice.

    Attributes:
        ended: Seats that choices have left, until the engine is told.
    """

    def __init__(self, num_seats: int) -> None:
        self.ended: list[int] = []
        self._num_seats = num_seats
        self._free = list(range(num_seats))

    def take(self, choice: Choice) -> None:
        """Give a choice a seat, of which the engine knows nothing yet."""
        choice.seat = self._free.pop()

    def leave(self, choice: Choice) -> None:
        """Free the seat of a choice."""
        if choice.num_seated_pages:
            self.ended.append(choice.seat)
        self._free.append(choice.seat)
        choice.seat, choice.num_seated_pages = -1, 0

    def tell(self, decodes: Sequence[Choice]) -> tuple[tuple[Choice, ...], tuple[SeatPages, ...]]:
        """Return the choices that the engine does not know yet, and new pages of the rest.

        Args:
            decodes: Seated choices of the engine's next step, which is told the result.
        """
        started, extended = [], []
        for choice in decodes:
            assert choice.pages is not None
            page_ids, num_known = choice.pages.page_ids, choice.num_seated_pages
            if len(page_ids) == num_known:
                continue
            choice.num_seated_pages = len(page_ids)
            if num_known:
                extended.append(SeatPages(seat=choice.seat, page_ids=tuple(page_ids[num_known:])))
            else:
                started.append(choice)
        return tuple(started), tuple(extended)

    def check_integrity(self, running: Sequence[Choice]) -> None:
        """Assert that each seat is free or of one of the running choices."""
        taken = [choice.seat for choice in running]
        assert sorted(taken + self._free) == list(range(self._num_seats)), "a seat is lost"
