"""The ring: keys and values travel from rank to rank, and their gradients with them.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023.
"""

from functools import partial

import torch
from torch import Tensor

from ..call.call import Tensors
from ..call.problem import accumulation_dtype
from . import parts, passes
from .copies import flat_copy
from .group import Group
from .parts import Whole
from .passes import Saved, Sums
from .sums import RowResults, RowSum


class Travelers:
    """The shapes of each owner's keys and values, and both in one flat buffer."""

    def __init__(self, k: Tensor, v: Tensor, whole: Whole, group: Group):
        self.k, self.v, self.keys, self.group = k, v, whole.keys, group

    def owner(self, step: int) -> int:
        """The rank whose keys are here at a step."""
        return (self.group.rank - step) % self.group.size

    def buffer(self, step: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized buffer for what is here at a step."""
        return self.k.new_empty(self.size(step), dtype=dtype)

    def size(self, step: int) -> int:
        """The elements of what is here at a step."""
        batch, heads = self.k.shape[:2]
        return batch * heads * self.keys.rows(self.owner(step)) * (self.k.shape[3] + self.v.shape[3])

    def split(self, buffer: Tensor, step: int) -> dict[str, Tensor]:
        """Keys and values in a buffer, as views."""
        rows = self.keys.rows(self.owner(step))
        shapes = [(*x.shape[:2], rows, x.shape[3]) for x in (self.k, self.v)]
        sizes = [batch * heads * n * width for batch, heads, n, width in shapes]
        k, v = buffer.split(sizes)
        return {"k": k.view(shapes[0]), "v": v.view(shapes[1])}


def forward(whole: Whole, tensors: Tensors, group: Group) -> tuple[Tensor, Tensor]:
    """`out` in the accumulation dtype, or in q's after one part, and `lse`: this rank's rows over all ranks' keys."""
    k, v, steps = tensors.k, tensors.v, parts.steps_of(whole, group.size)
    results = RowResults(tensors.q, v.shape[3], once=group.size == 1)
    if steps == 1:
        passes.forward(passes.calls_of(whole, group.rank, group.rank), tensors, results)
        return results.result()
    travelers, here = Travelers(k, v, whole, group), flat_copy([k, v])
    for step in range(steps):
        last = step == steps - 1
        transfer = None if last else group.pass_on(here, travelers.size(step + 1))
        kv = travelers.split(here, step)
        calls = passes.calls_of(whole, group.rank, travelers.owner(step))
        passes.forward(calls, tensors._replace(**kv), results)
        if transfer is not None:
            here = transfer.wait()
    return results.result()


def backward(
    whole: Whole, tensors: Tensors, group: Group, saved: Saved, needs: list[bool], others: Tensors
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients of this rank's rows, keys and values; all others are added to `others`."""
    k, v, steps = tensors.k, tensors.v, parts.steps_of(whole, group.size)
    dtype = accumulation_dtype(k.dtype)
    dq = RowSum(tensors.q.shape[2], partial(torch.empty_like, tensors.q, dtype=dtype)) if needs[0] else None
    if steps == 1:
        dk, dv = (RowSum(x.shape[2], partial(torch.empty_like, x, dtype=dtype)) for x in (k, v))
        passes.backward(passes.calls_of(whole, group.rank, group.rank), tensors, saved, Sums(dq, dk, dv, others))
        return None if dq is None else dq.result(), dk.result(), dv.result()
    travelers, here, arriving = Travelers(k, v, whole, group), flat_copy([k, v]), None
    mine = here
    for step in range(steps):
        last = step == steps - 1
        transfer = None if last else group.pass_on(here, travelers.size(step + 1))
        mine = travelers.buffer(step, dtype)
        kv, totals = travelers.split(here, step), travelers.split(mine, step)
        dk, dv = (RowSum(x.shape[2], partial(Tensor.detach, x)) for x in totals.values())
        calls = passes.calls_of(whole, group.rank, travelers.owner(step))
        passes.backward(calls, tensors._replace(**kv), saved, Sums(dq, dk, dv, others))
        dk.written()
        dv.written()
        if transfer is not None:
            here = transfer.wait()
        if arriving is not None:  # the ranks before have added theirs
            mine += arriving.wait()
        if not last:
            arriving = group.pass_on(mine, travelers.size(step + 1))
    mine = group.pass_on(mine, travelers.size(0), 1 - steps).wait()  # home, to the owner of these keys
    dkv = travelers.split(mine, 0)
    return None if dq is None else dq.result(), dkv["k"], dkv["v"]
