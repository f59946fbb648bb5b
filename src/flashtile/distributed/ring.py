"""The ring: keys and values travel from rank to rank, and their gradients with them.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ..call.call import Tensors
from ..call.problem import accumulation_dtype
from . import parts
from .group import Group
from .parts import Results, Saved, Whole

TRANSFERRED = "keys, values or their gradients from the rank before it"


class Transfer:
    """Pass a buffer on to a rank ahead while another one arrives from as far behind."""

    def __init__(self, group: Group, send: Tensor, receive: Tensor, distance: int = 1):
        self.group, self.sent, self.received = group, send, receive  # alive until the transfer ends
        ops = []
        if send.numel() > 0:
            ops.append(dist.P2POp(dist.isend, send, group.global_rank(group.rank + distance), group.handle))
        if receive.numel() > 0:
            ops.append(dist.P2POp(dist.irecv, receive, group.global_rank(group.rank - distance), group.handle))
        with group.exchanging(TRANSFERRED):
            self.work = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> Tensor:
        with self.group.exchanging(TRANSFERRED):
            for work in self.work:
                work.wait()
        return self.received


class Travelers:
    """The shapes of each owner's keys and values, and both in one flat buffer."""

    def __init__(self, k: Tensor, v: Tensor, whole: Whole, group: Group):
        self.k, self.v, self.keys, self.group = k, v, whole.keys, group

    def owner(self, step: int) -> int:
        """The rank whose keys are here at a step."""
        return (self.group.rank - step) % self.group.size

    def buffer(self, step: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized buffer for what is here at a step."""
        rows = self.keys.rows(self.owner(step))
        batch, heads = self.k.shape[:2]
        return self.k.new_empty(batch * heads * rows * (self.k.shape[3] + self.v.shape[3]), dtype=dtype)

    def split(self, buffer: Tensor, step: int) -> dict[str, Tensor]:
        """Keys and values in a buffer, as views."""
        rows = self.keys.rows(self.owner(step))
        shapes = [(*x.shape[:2], rows, x.shape[3]) for x in (self.k, self.v)]
        sizes = [batch * heads * n * width for batch, heads, n, width in shapes]
        k, v = buffer.split(sizes)
        return {"k": k.view(shapes[0]), "v": v.view(shapes[1])}


def flat(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def forward(whole: Whole, tensors: Tensors, group: Group, results: Results) -> None:
    """Merge the attention of this rank's rows over all ranks' keys into `results`."""
    k, v, steps = tensors.k, tensors.v, parts.steps_of(whole, group.size)
    travelers, here = Travelers(k, v, whole, group), flat(k, v)
    for step in range(steps):
        last = step == steps - 1
        transfer = None if last else Transfer(group, here, travelers.buffer(step + 1, k.dtype))
        kv = travelers.split(here, step)
        parts.forward(whole, tensors._replace(**kv), (group.rank, travelers.owner(step)), results)
        here = here if transfer is None else transfer.wait()


def backward(whole: Whole, tensors: Tensors, group: Group, saved: Saved, sums: Tensors) -> tuple[Tensor, Tensor]:
    """The gradients of this rank's keys and values; all others are added to `sums`."""
    k, v, steps = tensors.k, tensors.v, parts.steps_of(whole, group.size)
    dtype = accumulation_dtype(k.dtype)
    travelers, here, arriving = Travelers(k, v, whole, group), flat(k, v), None
    mine = here
    for step in range(steps):
        last = step == steps - 1
        transfer = None if last else Transfer(group, here, travelers.buffer(step + 1, k.dtype))
        mine = torch.zeros_like(travelers.buffer(step, dtype))
        kv, gradients = travelers.split(here, step), travelers.split(mine, step)
        ranks = group.rank, travelers.owner(step)
        parts.backward(whole, tensors._replace(**kv), ranks, saved, sums._replace(**gradients))
        here = here if transfer is None else transfer.wait()
        if arriving is not None:  # the ranks before have added theirs
            mine += arriving.wait()
        if not last:
            arriving = Transfer(group, mine, travelers.buffer(step + 1, dtype))
    if steps > 1:  # home, to the rank that owns these keys
        mine = Transfer(group, mine, travelers.buffer(0, dtype), 1 - steps).wait()
    return tuple(travelers.split(mine, 0).values())  # type: ignore[return-value]
