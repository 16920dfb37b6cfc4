"""That a plan is not written over memory whose copy to the device still waits for its turn."""

import torch

from attn_kernels.tiles import PlanBuffer


class Copies:
    """A device that copies nothing before somebody waits for it."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.num_done = 0

    def event(self) -> "CopyEvent":
        return CopyEvent(self)


class CopyEvent:
    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._index = 0  # copies before its record; 0: never recorded

    def record(self) -> None:
        assert self._index <= self._copies.num_done, "recorded again while its copy is awaited"
        self._copies.num_sent += 1
        self._index = self._copies.num_sent

    def synchronize(self) -> None:
        self._copies.num_done = max(self._copies.num_done, self._index)


def test_the_host_waits_for_the_copy_before_the_last_one_and_for_no_other() -> None:
    copies = Copies()
    buffer = PlanBuffer(4, torch.device("cpu"))
    buffer._copied = [copies.event(), copies.event()]  # as on a GPU
    written = []

    for number in range(1, 6):
        host = buffer.host()
        assert copies.num_done == max(number - 2, 0), "it waits for too many copies, or too few"
        host[:] = number
        written.append(host.ctypes.data)
        buffer.send(4)
        assert buffer.device_buffer.tolist() == [number] * 4

    assert written[0] != written[1], "two plans in a row share memory"
    assert written[:2] == written[2:4]


def test_only_what_a_plan_uses_is_sent() -> None:
    buffer = PlanBuffer(4, torch.device("cpu"))
    buffer.host()[:] = 7

    buffer.send(3)

    assert buffer.device_buffer.tolist() == [7, 7, 7, 0]
