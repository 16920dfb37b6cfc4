"""Overwrites what a step has used up, so that a later step which reads it draws other tokens."""

import pytest
import torch

from attn_kernels.cascade.launch import CascadeAttention
from attn_kernels.tiles import PlanBuffer
from llm_engine.device_runner import DeviceRunner
from llm_engine.engine import ReadResult
from llm_engine.engine_step import EngineStep

SOME = 7  # token, position, page and slot: what is recorded looks it up, though nothing is computed


def overwrite_what_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where copies and steps have ended when their launch returns, as they do without a GPU."""
    send, launch = PlanBuffer.send, DeviceRunner.launch

    def send_and_overwrite(self: PlanBuffer, used: int) -> None:
        send(self, used)
        self._host_buffers[1 - self._turn].fill_(-1)  # the one that was sent

    def launch_and_overwrite(self: DeviceRunner, step: EngineStep) -> ReadResult:
        read = launch(self, step)
        _overwrite(self, step)
        return read

    monkeypatch.setattr(PlanBuffer, "send", send_and_overwrite)
    monkeypatch.setattr(DeviceRunner, "launch", launch_and_overwrite)


def _overwrite(runner: DeviceRunner, step: EngineStep) -> None:
    """Leave only seats that are taken, which rows have which, plans and pages."""
    if runner._prompts is not None:
        runner._prompts._buffer.device_buffer.fill_(-1)
    batch, decode = runner._batch, runner._decode
    if batch is None or decode is None:
        return
    seats = batch.seats
    for each in (seats.inputs, seats._params, decode._inputs):
        each.fill_(SOME)
    seats.masks.zero_()  # no token may be drawn
    for seat in set(step.ended) - {each.seat for each in step.started}:
        seats.state[seat] = -1
        seats.page_table[seat] = -1
        batch.page_table[seat] = -1
    for attention in decode._attention._decode._attentions:
        own = attention.decode if isinstance(attention, CascadeAttention) else attention
        own.partial_acc.fill_(torch.nan)
        own.partial_stats.fill_(torch.nan)
