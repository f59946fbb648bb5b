"""Recorded passes of a call, for calls of the same layout. The dispatcher may call a `recording` directly: with tensors
in the order of the call's inputs, and behind them, in backward, out, lse, dout, dlse and what forward has kept. A
`checked_recording` returns `None` where the values of an index rule out a replay.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..call.call import Call, Needs, Tangents, Tensors

Results = Sequence[Tensor | None]
Recording = Callable[[Results], Any]


class ForwardReplay(NamedTuple):
    """A recorded forward pass of a call."""

    recording: Recording

    def __call__(self, call: Call) -> tuple[Tensor, Tensor]:
        return call.keep(self.recording(call.inputs))


class BackwardReplay(NamedTuple):
    """A recorded backward pass of a call, from out, lse, dout and dlse. Its gradients are flat."""

    recording: Recording

    def __call__(self, call: Call, *rows: Tensor | None) -> Results:
        return self.recording((*call.inputs, *rows, call.kept))


class TangentsReplay(NamedTuple):
    """A recorded pass of forward mode, from the tangents of the inputs that move."""

    recording: Recording

    def __call__(self, call: Call, tangents: Tangents) -> Results:
        return self.recording(inputs_of(call, tangents))  # type: ignore[no-any-return]


def inputs_of(call: Call, tangents: Tangents) -> list[Tensor | None]:
    """The inputs of a pass of forward mode: the call's, then the tangents of those that move."""
    return [*call.inputs, *(x for x in tangents.flat() if x is not None)]


def with_inputs(call: Call, moves: Needs, inputs: Results) -> tuple[Call, Tangents]:
    """The inverse of `inputs_of`: the call and its tangents, of inputs that may begin with theirs."""
    count = len(call.tensors.flat())
    given = iter(inputs[count:])
    tangents = Tangents.from_flat([next(given) if moving else None for moving in moves.flat()])
    return call._replace(tensors=Tensors.from_flat(inputs[:count])), tangents
