"""Seats of an engine that reads each token before the next step: sequences as lists on the host."""

from collections.abc import Mapping
from dataclasses import dataclass

from grammars.bits import TokenBits
from llm_engine.drawing import next_draw
from llm_engine.engine_step import EngineStep, SeatStart
from llm_engine.sampling import SampledToken, SequenceSlice


@dataclass(slots=True)
class _Sequence:
    start: SeatStart
    page_ids: list[int]
    output: list[int]


class HostSeats:
    """Turns the decodes of a step into slices."""

    def __init__(self) -> None:
        self._sequences: dict[int, _Sequence] = {}  # seat |-> its sequence

    def change(self, step: EngineStep) -> None:
        """Apply ended and started sequences and added pages."""
        for seat in step.ended:
            self._sequences.pop(seat, None)  # absent if the launch that should start it failed
        for start in step.started:
            self._sequences[start.seat] = _Sequence(
                start, list(start.page_ids), list(start.output_token_ids)
            )
        for more in step.extended:
            self._sequences[more.seat].page_ids += more.page_ids

    def slices(
        self, seats: tuple[int, ...], allowed: Mapping[int, TokenBits]
    ) -> list[SequenceSlice]:
        """Return the slices of the seats' sequences; see EngineStep for `allowed`."""
        return [_slice(self._sequences[seat], allowed.get(seat)) for seat in seats]

    def take(self, seats: tuple[int, ...], drawn: list[SampledToken | None]) -> None:
        """Append the drawn tokens; a sequence without one is about to end."""
        for seat, token in zip(seats, drawn, strict=True):
            self._sequences[seat].output.append(0 if token is None else token.token_id)


def _slice(sequence: _Sequence, allowed: TokenBits | None) -> SequenceSlice:
    start, output = sequence.start, sequence.output
    num_prompt_tokens = len(start.prompt_token_ids)
    draw = next_draw(
        start.params,
        choice=start.choice,
        prompt_token_ids=start.prompt_token_ids,
        output_token_ids=output,
        eos_token_ids=start.eos_token_ids,
        allowed=allowed,
    )
    return SequenceSlice(
        token_ids=output[-1:],
        start=num_prompt_tokens + len(output) - 1,
        page_ids=sequence.page_ids,
        num_prompt_tokens=num_prompt_tokens,
        draws=(draw,),
    )
