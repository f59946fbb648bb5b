"""The ring: keys and values travel from rank to rank, and their gradients with them.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..call.call import Tensors
from ..call.problem import accumulation_dtype
from . import parts
from .group import Group
from .parts import Backward, Results, Whole


class Transfer:
    """Pass a buffer on to the next rank while another one arrives from the rank before."""

    def __init__(self, group: Group, send: Tensor, receive: Tensor):
        self.sent, self.received = send, receive  # alive until the transfer ends
        ops = []
        if send.numel() > 0:
            ops.append(dist.P2POp(dist.isend, send, group.global_rank(group.rank + 1), group.handle))
        if receive.numel() > 0:
            ops.append(dist.P2POp(dist.irecv, receive, group.global_rank(group.rank - 1), group.handle))
        self.work = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> Tensor:
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

    def split(self, buffer: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Keys and values in a buffer, as views."""
        rows = self.keys.rows(self.owner(step))
        shapes = [(*x.shape[:2], rows, x.shape[3]) for x in (self.k, self.v)]
        sizes = [batch * heads * n * width for batch, heads, n, width in shapes]
        k, v = buffer.split(sizes)
        return k.view(shapes[0]), v.view(shapes[1])


def joined(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


class Ring(torch.autograd.Function):
    """Attention of this rank's rows over all ranks' keys."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rest: Tensors, whole: Whole, group: Group
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        tensors, results = rest._replace(q=q), Results.empty(q, v)
        travelers, here = Travelers(k, v, whole, group), joined(k, v)
        for step in range(group.size):
            last = step == group.size - 1
            transfer = None if last else Transfer(group, here, travelers.buffer(step + 1, k.dtype))
            kv = travelers.split(here, step)
            parts.forward(whole, tensors, *kv, (group.rank, travelers.owner(step)), results)
            here = here if transfer is None else transfer.wait()
        out = results.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, results.lse)
        ctx.rest, ctx.whole, ctx.group = rest, whole, group
        return out, results.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        whole, group, tensors = ctx.whole, ctx.group, ctx.rest._replace(q=q)
        saved, dtype = Backward(out, lse, dout, dlse), accumulation_dtype(q.dtype)
        travelers, here = Travelers(k, v, whole, group), joined(k, v)
        dq, gradients = q.new_zeros(q.shape, dtype=dtype), None
        for step in range(group.size):
            last = step == group.size - 1
            transfer = None if last else Transfer(group, here, travelers.buffer(step + 1, k.dtype))
            mine = torch.zeros_like(travelers.buffer(step, dtype))
            sums = (dq, *travelers.split(mine, step))
            kv = travelers.split(here, step)
            parts.backward(whole, tensors, kv, (group.rank, travelers.owner(step)), saved, sums)
            here = here if transfer is None else transfer.wait()
            if gradients is not None:  # the ranks before have added theirs
                mine += gradients.wait()
            # A step on, these gradients are with the next rank; after the last, with the rank that owns their keys.
            gradients = Transfer(group, mine, travelers.buffer(step + 1, dtype)) if group.size > 1 else None
        final = mine if gradients is None else gradients.wait()
        dk, dv = travelers.split(final, 0)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None
