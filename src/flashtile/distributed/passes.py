"""Both passes of a rank's rows over an owner's keys: the parts' calls, and the sums of what they give."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ..call.call import Call, Tensors, differentiable_positions
from ..dispatch.operators import operators_of
from .packed import PackedParts, Run, packed_parts
from .parts import Part, Whole, parts
from .sums import RowResults, RowSum

Calls = PackedParts | tuple[Part, ...]  # calls of a rank's rows over an owner's keys


def calls_of(whole: Whole, rank: int, owner: int) -> Calls:
    """The calls of `rank`'s rows over `owner`'s keys."""
    return packed_parts(whole, rank, owner) or parts(whole, rank, owner)


def forward(calls: Calls, tensors: Tensors, results: RowResults) -> None:
    """Merge the attention of a rank's rows over an owner's keys, which `tensors` has, into `results`."""
    if isinstance(calls, PackedParts):
        call = calls.call(tensors)
        out, lse = operators_of(call).attend(call)
        for run in calls.rows:
            results.merge(run.here, dense(out, run), lse[None, :, run.there])
        return
    for part in calls:
        call = Call(part.of(tensors), part.settings)
        results.merge(part.rows, *operators_of(call).attend(call))


class Saved(NamedTuple):
    """Inputs of backward for a rank's rows; out and lse are those over all keys, from which delta follows."""

    out: Tensor
    lse: Tensor
    dout: Tensor | None
    dlse: Tensor | None

    def heads(self, heads: slice) -> "Saved":
        return Saved._make(None if x is None else x[:, heads] for x in self)  # type: ignore[arg-type]

    def rows(self, rows: slice) -> "Saved":
        return Saved._make(None if x is None else x[:, :, rows] for x in self)  # type: ignore[arg-type]


class Sums:
    """The gradients of a rank's rows and an owner's keys, and of what all ranks have, as far as they are requested.

    Args:
        q, k, v: sums over parts.
        others: of the other tensors, zeros in the accumulation dtype that parts are added to.
    """

    def __init__(self, q: RowSum | None, k: RowSum | None, v: RowSum | None, others: Tensors):
        self.rows, self.others = (q, k, v), others

    @property
    def requested(self) -> list[bool]:
        """Whether the gradients of q, k and v are."""
        return [total is not None for total in self.rows]

    @property
    def add(self) -> list[Callable[[slice, Tensor | None], None]]:
        """Add rows to the gradient of q, k or v, if it is requested."""
        return [partial(add_rows, total) for total in self.rows]


def add_rows(total: RowSum | None, rows: slice, gradient: Tensor | None) -> None:
    if total is not None:
        assert gradient is not None
        total.add(rows, gradient)


def backward(calls: Calls, tensors: Tensors, saved: Saved, sums: Sums) -> None:
    """Add the gradients of a rank's rows and an owner's keys to `sums`.

    `p = exp(s - lse)` and `ds = p * (dp - delta)` hold for any part of the keys, if lse and delta are those over all of
    them. So the backends' backward pass is right for a part as it stands.
    """
    if isinstance(calls, PackedParts):
        call = calls.call(tensors)
        of_others = len(differentiable_positions(len(call.tensors.flat()))) - 3
        needs = [*sums.requested, *[False] * of_others]
        out, lse, dout, dlse = (calls.rows_of(x) for x in saved)
        assert out is not None
        assert lse is not None
        gradients = operators_of(call).differentiate(needs, out, lse, dout, dlse, call)
        of_keys = calls.gathered_keys
        for total, runs, gradient in zip(sums.rows, (calls.rows, of_keys, of_keys), gradients[:3], strict=True):
            for run in runs if total is not None else ():
                add_rows(total, run.here, None if gradient is None else dense(gradient, run))
        return
    for part in calls:
        call, totals = Call(part.of(tensors), part.settings), part.without_rows(sums.others).flat()
        others = [totals[n] for n in differentiable_positions(len(totals))[3:]]
        needs = [*sums.requested, *(total is not None for total in others)]
        gradients = operators_of(call).differentiate(needs, *saved.rows(part.rows), call)
        for add, rows, gradient in zip(sums.add, (part.rows, part.keys, part.keys), gradients[:3], strict=True):
            add(rows, gradient)
        for other, gradient in zip(others, gradients[3:], strict=True):
            if other is not None:
                assert gradient is not None
                other.add_(gradient)


def dense(x: Tensor, run: Run) -> Tensor:
    """A run of the rows of a packed result, `[1, H, rows, D]`."""
    return x[run.there].transpose(0, 1)[None]
