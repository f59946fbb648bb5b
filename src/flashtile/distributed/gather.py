"""Gather: each rank receives the keys that its rows see, and each of its rows is in one part.

Parts see their keys in their own order, so that results are rounded once. Where few keys are seen, as in a window, few
travel. Key heads go in chunks if all of them would outgrow what a rank holds otherwise; the next chunk travels while
one is computed with. Owners sum the gradients of their keys, in the order of ranks (Liu et al., "Llama 3", 2024,
section 3.3.2, gathers all keys of all heads).
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ..call.call import Tensors
from ..call.problem import accumulation_dtype
from . import parts
from .group import Group, Transfer
from .layout import Placement
from .parts import Saved, Sums, Whole
from .sums import RowResults, RowSum
from .visible import needed_keys


def chunks_of(heads: int, kv_heads: int, rows: Placement, keys: Placement, needed: Placement) -> list[slice]:
    """Key heads that are gathered together: as few chunks as have no more elements than a rank's q, k, v and out."""

    def most(x: Placement) -> int:
        return max(map(x.rows, range(len(x.by_rank))))

    held = heads * most(rows) + kv_heads * most(keys)
    counts = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
    count = next((n for n in counts if kv_heads // n * most(needed) <= held), kv_heads)
    each = kv_heads // count
    return [slice(n * each, (n + 1) * each) for n in range(count)]


class Gathered:
    """The keys and values that a rank's rows see, by chunks of key heads, and the way home of their gradients."""

    def __init__(self, tensors: Tensors, whole: Whole, group: Group):
        self.tensors, self.keys, self.group = tensors, whole.keys, group
        self.needed = needed_keys(whole.settings.window, whole.documents, whole.rows, whole.keys.length)
        self.chunks = chunks_of(tensors.q.shape[1], tensors.k.shape[1], whole.rows, self.keys, self.needed)
        self.head_dim, self.head_dim_v = tensors.k.shape[3], tensors.v.shape[3]

    def __iter__(self) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Each chunk's key heads with its keys and values."""
        arriving = self.begin(self.chunks[0])
        for n, heads in enumerate(self.chunks):
            transfer, gathered = arriving
            if n + 1 < len(self.chunks):
                arriving = self.begin(self.chunks[n + 1])
            transfer.wait()
            yield heads, dict(zip(("k", "v"), self.split(gathered), strict=True))

    def new(self, like: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized buffer of keys and values, `[rows, B, heads, D + Dv]`: rows of a rank are contiguous."""
        return like.new_empty(rows, *like.shape[:2], self.head_dim + self.head_dim_v, dtype=dtype)

    def split(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Views `[B, heads, rows, D]` and `[B, heads, rows, Dv]`."""
        k, v = buffer.permute(1, 2, 0, 3).split([self.head_dim, self.head_dim_v], dim=3)
        return k, v

    def places(self, owner: int, rank: int) -> list[tuple[slice, slice]]:
        """What a rank needs of an owner's keys: the places in the owner's tensors and among the gathered ones."""
        return self.keys.shared(owner, self.needed, rank)

    def others(self) -> list[int]:
        return [rank for rank in range(self.group.size) if rank != self.group.rank]

    def begin(self, heads: slice) -> tuple[Transfer, Tensor]:
        """Begin to gather a chunk."""
        k, v, rank = self.tensors.k[:, heads], self.tensors.v[:, heads], self.group.rank
        mine = self.new(k, k.shape[2], k.dtype)
        for view, x in zip(self.split(mine), (k, v), strict=True):
            view.copy_(x)
        gathered = self.new(k, self.needed.rows(rank), k.dtype)
        sends = [(mine[at], other) for other in self.others() for at, _ in self.places(rank, other)]
        receives = [(gathered[at], other) for other in self.others() for _, at in self.places(other, rank)]
        transfer = self.group.transfer(sends, receives)
        for here, there in self.places(rank, rank):
            gathered[there] = mine[here]
        return transfer, gathered

    def return_gradients(self, gradients: Tensor) -> "Returned":
        """Begin to send the gradients of gathered keys to their owners; those of this rank's keys arrive."""
        rank, sums = self.group.rank, []
        own = self.keys.rows(rank)
        sends = [(gradients[at], other) for other in self.others() for _, at in self.places(other, rank)]
        receives = []
        for other in range(self.group.size):
            for here, there in self.places(rank, other):
                if other == rank:
                    sums.append((here, gradients[there]))
                else:
                    buffer = self.new_like(gradients, here.stop - here.start)
                    receives.append((buffer, other))
                    sums.append((here, buffer))
        return Returned(self.group.transfer(sends, receives), sums, self.new_like(gradients, own))

    def new_like(self, buffer: Tensor, rows: int) -> Tensor:
        return buffer.new_empty(rows, *buffer.shape[1:])


class Returned:
    """Gradients of a chunk of this rank's keys on their way home."""

    def __init__(self, transfer: Transfer, terms: list[tuple[slice, Tensor]], total: Tensor):
        self.transfer, self.terms, self.total = transfer, terms, total

    def wait(self) -> Tensor:
        """Their sum, `[B, heads, rows, D + Dv]`."""
        self.transfer.wait()
        total = self.total.permute(1, 2, 0, 3)
        found = RowSum(total.shape[2], lambda: total)
        for rows, term in self.terms:
            found.add(rows, term.permute(1, 2, 0, 3))
        return found.result()


def of_heads(whole: Whole, gathered: Gathered, kv_heads: slice) -> tuple[Whole, slice]:
    """The call of some key heads in which this rank is the owner of all gathered keys, and its query heads."""
    t = gathered.tensors
    group_size = t.q.shape[1] // t.k.shape[1]
    heads = slice(kv_heads.start * group_size, kv_heads.stop * group_size)
    settings = parts.settings_of_heads(whole.settings, heads.start, t.q.shape[1])
    return whole._replace(settings=settings, keys=gathered.needed), heads


def forward(whole: Whole, tensors: Tensors, group: Group) -> tuple[Tensor, Tensor]:
    """`out` in q's dtype and `lse` of this rank's rows over all ranks' keys."""
    found = []
    gathered = Gathered(tensors, whole, group)
    for kv_heads, kv in gathered:
        chunk, heads = of_heads(whole, gathered, kv_heads)
        inputs = parts.heads_of(tensors, heads)._replace(**kv)
        results = RowResults(inputs.q, inputs.v.shape[3], once=True)
        parts.forward(chunk, inputs, (group.rank, group.rank), results)
        found.append(results.result())
    out, lse = (join_heads(x) for x in zip(*found, strict=True))
    return out, lse


def backward(
    whole: Whole, tensors: Tensors, group: Group, saved: Saved, needs: list[bool], others: Tensors
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients of this rank's rows, keys and values; all others are added to `others`."""
    dtype = accumulation_dtype(tensors.k.dtype)
    gathered = Gathered(tensors, whole, group)
    of_rows: list[Tensor] = []
    of_keys: list[Tensor] = []
    leaving: Returned | None = None
    for kv_heads, kv in gathered:
        chunk, heads = of_heads(whole, gathered, kv_heads)
        inputs = parts.heads_of(tensors, heads)._replace(**kv)
        both = gathered.new(inputs.k, inputs.k.shape[2], dtype)
        dq = RowSum(inputs.q.shape[2], partial(torch.empty_like, inputs.q)) if needs[0] else None
        dk, dv = (RowSum(inputs.k.shape[2], partial(Tensor.detach, x)) for x in gathered.split(both))
        sums = Sums(dq, dk, dv, parts.heads_of(others, heads))
        parts.backward(chunk, inputs, (group.rank, group.rank), saved.heads(heads), sums)
        of_rows += [] if dq is None else [dq.result()]
        dk.written()
        dv.written()
        of_keys += [] if leaving is None else [leaving.wait()]
        leaving = gathered.return_gradients(both)
    assert leaving is not None
    of_keys.append(leaving.wait())
    of_k, of_v = join_heads(of_keys).split([gathered.head_dim, gathered.head_dim_v], dim=3)
    return join_heads(of_rows) if needs[0] else None, of_k, of_v


def join_heads(chunks: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return torch.cat([*chunks], dim=1) if len(chunks) > 1 else chunks[0]
