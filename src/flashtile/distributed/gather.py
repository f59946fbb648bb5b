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
from . import parts, passes
from .group import Group, Transfer
from .layout import Placement
from .parts import Whole
from .passes import Saved, Sums
from .sums import RowResults, RowSum, sum_of_terms
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
    """The keys and values that a rank's rows see, by chunks of key heads, and the way home of their gradients.

    Keys travel as `[rows, B, heads, D + Dv]`, in which the rows of a rank are contiguous.
    """

    def __init__(self, tensors: Tensors, whole: Whole, group: Group):
        self.tensors, self.group, self.places = tensors, group, Places(whole)
        self.needed = self.places.needed
        self.chunks = chunks_of(tensors.q.shape[1], tensors.k.shape[1], whole.rows, whole.keys, self.needed)
        self.head_dim, self.head_dim_v = tensors.k.shape[3], tensors.v.shape[3]
        # Of gradients. Where a rank has one of each key, it is not rounded again.
        self.dtype = tensors.k.dtype if self.places.once else accumulation_dtype(tensors.k.dtype)

    def __iter__(self) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Each chunk's key heads with its keys and values, `[B, heads, rows, D]` and `[B, heads, rows, Dv]`."""
        arriving = self.begin(self.chunks[0])
        for n, heads in enumerate(self.chunks):
            transfer, gathered = arriving
            if n + 1 < len(self.chunks):
                arriving = self.begin(self.chunks[n + 1])
            transfer.wait()
            yield heads, dict(zip(("k", "v"), self.split(gathered), strict=True))

    def split(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the keys and values in a buffer."""
        k, v = buffer.permute(1, 2, 0, 3).split([self.head_dim, self.head_dim_v], dim=3)
        return k, v

    def packed(self, k: Tensor, v: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
        """Some rows of keys and values, or of their gradients, as they travel."""
        buffer = self.new(k, rows.stop - rows.start, dtype)
        self.pack(buffer, k, v, rows)
        return buffer

    def pack(self, buffer: Tensor, k: Tensor, v: Tensor, rows: slice) -> None:
        for view, x in zip(self.split(buffer), (k, v), strict=True):
            view.copy_(x[:, :, rows])

    def new(self, like: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        return like.new_empty(rows, *like.shape[:2], self.head_dim + self.head_dim_v, dtype=dtype)

    def sum_like(self, x: Tensor) -> RowSum:
        """A sum over parts of the gradients of gathered keys or values."""
        return RowSum(x.shape[2], partial(x.new_empty, x.shape, dtype=self.dtype))

    def begin(self, heads: slice) -> tuple[Transfer, Tensor]:
        """Begin to gather a chunk."""
        k, v, rank = self.tensors.k[:, heads], self.tensors.v[:, heads], self.group.rank
        gathered = self.new(k, self.needed.rows(rank), k.dtype)
        leaving = [(other, rows) for other, rows, _ in self.places.of_others(self.group, owner=rank)]
        first = min((rows.start for _, rows in leaving), default=0)
        sent = self.packed(k, v, slice(first, max((rows.stop for _, rows in leaving), default=0)), k.dtype)
        sends = [(sent[rows.start - first : rows.stop - first], other) for other, rows in leaving]
        receives = [(gathered[rows], other) for other, _, rows in self.places.of_others(self.group, rank=rank)]
        transfer = self.group.transfer(sends, receives)
        for here, there in self.places.shared(rank, rank):  # while the others travel
            self.pack(gathered[there], k, v, here)
        return transfer, gathered

    def return_gradients(self, heads: slice, dk: Tensor, dv: Tensor) -> "Returned":
        """Begin to send the gradients of a chunk's keys to their owners; those of this rank's keys arrive."""
        rank, receives = self.group.rank, []
        terms: list[tuple[slice, tuple[Tensor, Tensor]]] = []
        others = self.places.of_others(self.group, rank=rank)
        sends = [(self.packed(dk, dv, rows, self.dtype), other) for other, _, rows in others]
        for other in range(self.group.size):
            for here, there in self.places.shared(rank, other):
                if other == rank:
                    terms.append((here, (dk[:, :, there], dv[:, :, there])))
                else:
                    buffer = self.new(dk, here.stop - here.start, self.dtype)
                    receives.append((buffer, other))
                    terms.append((here, self.split(buffer)))
        transfer = self.group.transfer(sends, receives)
        return Returned(transfer, self.tensors.k[:, heads], self.tensors.v[:, heads], terms)


class Places:
    """Which keys travel from an owner to a rank, by their places in the tensors of both."""

    def __init__(self, whole: Whole):
        self.keys = whole.keys
        self.needed, self.once = needed_keys(whole.settings.window, whole.documents, whole.rows, whole.keys.length)

    def shared(self, owner: int, rank: int) -> list[tuple[slice, slice]]:
        """Rows in the owner's tensors, and among those that the rank gathers."""
        return self.keys.shared(owner, self.needed, rank)

    def of_others(
        self, group: Group, *, owner: int | None = None, rank: int | None = None
    ) -> Iterator[tuple[int, slice, slice]]:
        """The other ranks in the place of the one that is not given, with `shared`."""
        for other in range(group.size):
            if other != group.rank:
                for here, there in self.shared(other if owner is None else owner, other if rank is None else rank):
                    yield other, here, there


class Returned:
    """Gradients of a chunk of this rank's keys on their way home.

    Args:
        k, v: those keys and values.
        terms: rows, and what a rank has for their keys and values.
    """

    def __init__(self, transfer: Transfer, k: Tensor, v: Tensor, terms: list[tuple[slice, tuple[Tensor, Tensor]]]):
        self.transfer, self.k, self.v, self.terms = transfer, k, v, terms

    def wait(self) -> tuple[Tensor, Tensor]:
        """The gradients of keys and of values, in their dtype."""
        self.transfer.wait()
        dk = sum_of_terms(self.k.shape, [(rows, of_k) for rows, (of_k, _) in self.terms], self.k)
        dv = sum_of_terms(self.v.shape, [(rows, of_v) for rows, (_, of_v) in self.terms], self.v)
        return dk, dv


def of_heads(whole: Whole, gathered: Gathered, kv_heads: slice) -> tuple[Whole, slice]:
    """The call of some key heads in which this rank is the owner of all gathered keys, and its query heads."""
    t = gathered.tensors
    group_size = t.q.shape[1] // t.k.shape[1]
    heads = slice(kv_heads.start * group_size, kv_heads.stop * group_size)
    settings = parts.settings_of_heads(whole.settings, heads.start, t.q.shape[1])
    return whole._replace(settings=settings, keys=gathered.needed), heads


def forward(whole: Whole, tensors: Tensors, group: Group) -> tuple[Tensor, Tensor]:
    """`out` in q's dtype and `lse` of this rank's rows over all ranks' keys."""
    found: list[tuple[Tensor, Tensor]] = []
    gathered = Gathered(tensors, whole, group)
    for kv_heads, kv in gathered:
        chunk, heads = of_heads(whole, gathered, kv_heads)
        inputs = parts.heads_of(tensors, heads)._replace(**kv)
        results = RowResults(inputs.q, inputs.v.shape[3], once=True)
        passes.forward(chunk, inputs, (group.rank, group.rank), results)
        found.append(results.result())
    return join_heads([out for out, _ in found]), join_heads([lse for _, lse in found])


def backward(
    whole: Whole, tensors: Tensors, group: Group, saved: Saved, needs: list[bool], others: Tensors
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients of this rank's rows, keys and values; all others are added to `others`."""
    gathered = Gathered(tensors, whole, group)
    of_rows: list[Tensor] = []
    of_keys: list[tuple[Tensor, Tensor]] = []
    leaving: Returned | None = None
    for kv_heads, kv in gathered:
        chunk, heads = of_heads(whole, gathered, kv_heads)
        inputs = parts.heads_of(tensors, heads)._replace(**kv)
        of_q = RowSum(inputs.q.shape[2], partial(torch.empty_like, inputs.q)) if needs[0] else None
        of_k, of_v = (
            RowSum(x.shape[2], partial(x.new_empty, x.shape, dtype=gathered.dtype)) for x in (inputs.k, inputs.v)
        )
        sums = Sums(of_q, of_k, of_v, parts.heads_of(others, heads))
        passes.backward(chunk, inputs, (group.rank, group.rank), saved.heads(heads), sums)
        of_rows += [] if of_q is None else [of_q.result()]
        of_keys += [] if leaving is None else [leaving.wait()]
        leaving = gathered.return_gradients(kv_heads, of_k.result(), of_v.result())
    assert leaving is not None
    of_keys.append(leaving.wait())
    dq = join_heads(of_rows) if needs[0] else None
    return dq, join_heads([x for x, _ in of_keys]), join_heads([x for _, x in of_keys])


def join_heads(chunks: list[Tensor]) -> Tensor:
    return torch.cat(chunks, dim=1) if len(chunks) > 1 else chunks[0]
