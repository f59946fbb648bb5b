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
from .group import Exchange, Group
from .layout import Placement
from .parts import Whole
from .passes import Saved, Sums
from .sums import RowResults, RowSum, sum_of_terms
from .visible import needed_keys


def chunks_of(heads: int, kv_heads: int, rows: Placement, keys: Placement, needed: Placement) -> list[slice]:
    """Key heads that are gathered together: as few chunks as have no more elements than a rank's q, k, v and out."""
    held = heads * rows.most + kv_heads * keys.most
    counts = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
    count = next((n for n in counts if kv_heads // n * needed.most <= held), kv_heads)
    each = kv_heads // count
    return [slice(n * each, (n + 1) * each) for n in range(count)]


class Gathered:
    """The keys and values that a rank's rows see, by chunks of key heads, and the way home of their gradients.

    What a rank sends to another one is a block of rows of keys and values, or of their gradients (`pack`).
    """

    def __init__(self, tensors: Tensors, whole: Whole, group: Group):
        self.k, self.v, self.group = tensors.k, tensors.v, group
        self.needed, once = needed_keys(whole.settings.window, whole.documents, whole.rows, whole.keys.length)
        self.chunks = chunks_of(tensors.q.shape[1], tensors.k.shape[1], whole.rows, whole.keys, self.needed)
        # Of gradients. Where a rank has one of each key, it is not rounded again.
        self.dtype = tensors.k.dtype if once else accumulation_dtype(tensors.k.dtype)
        rank, others = group.rank, [other for other in range(group.size) if other != group.rank]
        self.own = whole.keys.shared(rank, self.needed, rank)  # rows of this rank's tensors, and gathered ones
        # By ranks: the rows of this rank's tensors that they gather, and the gathered ones that are theirs.
        self.lent: list[list[slice]] = [[] for _ in range(group.size)]
        self.borrowed: list[list[slice]] = [[] for _ in range(group.size)]
        for other in others:
            self.lent[other] = [here for here, _ in whole.keys.shared(rank, self.needed, other)]
            self.borrowed[other] = [there for _, there in whole.keys.shared(other, self.needed, rank)]

    def __iter__(self) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Each chunk's key heads with its keys and values, `[B, heads, rows, D]` and `[B, heads, rows, Dv]`."""
        arriving = self.begin(self.chunks[0])
        for n, heads in enumerate(self.chunks):
            present = arriving
            if n + 1 < len(self.chunks):
                arriving = self.begin(self.chunks[n + 1])
            yield heads, self.end(heads, present)

    def begin(self, heads: slice) -> Exchange:
        """Begin to gather a chunk."""
        k, v = self.k[:, heads], self.v[:, heads]
        return self.exchange(k, v, self.lent, self.borrowed, k.dtype)

    def exchange(
        self, k: Tensor, v: Tensor, leaving: list[list[slice]], arriving: list[list[slice]], dtype: torch.dtype
    ) -> Exchange:
        """Begin to exchange rows of keys and values, or of their gradients, by ranks; of those that arrive, only the
        number counts.
        """
        blocks = [pack(k, v, rows, dtype) for rows in leaving]
        return self.group.exchange(blocks, [(size_of_block(k, v, rows),) for rows in arriving])

    def end(self, heads: slice, exchange: Exchange) -> dict[str, Tensor]:
        """All keys and values of a chunk, in their order."""
        k, v = self.k[:, heads], self.v[:, heads]
        found = [(there.start, k[:, :, here], v[:, :, here]) for here, there in self.own]
        for block, places in zip(exchange.wait(), self.borrowed, strict=True):
            pieces = unpack(block, k, v, places)
            found += [(there.start, *piece) for there, piece in zip(places, pieces, strict=True)]
        found.sort(key=lambda piece: piece[0])
        if not found:
            return {"k": k[:, :, :0], "v": v[:, :, :0]}
        return {"k": join_rows([k for _, k, _ in found]), "v": join_rows([v for _, _, v in found])}

    def sum_like(self, x: Tensor) -> RowSum:
        """A sum over parts of the gradients of gathered keys or values."""
        return RowSum(x.shape[2], partial(torch.empty_like, x, dtype=self.dtype))

    def return_gradients(self, heads: slice, dk: Tensor, dv: Tensor) -> "Returned":
        """Begin to send the gradients of a chunk's keys to their owners; those of this rank's keys arrive."""
        exchange = self.exchange(dk, dv, self.borrowed, self.lent, self.dtype)
        own = [(here, dk[:, :, there], dv[:, :, there]) for here, there in self.own]
        return Returned(self, heads, exchange, own)


class Returned:
    """Gradients of a chunk of this rank's keys on their way home.

    Args:
        gathered: the call's keys.
        heads: those of the chunk.
        exchange: what the other ranks have.
        own: this rank's gradients, and their rows.
    """

    def __init__(self, gathered: Gathered, heads: slice, exchange: Exchange, own: list[tuple[slice, Tensor, Tensor]]):
        self.gathered, self.heads, self.exchange, self.own = gathered, heads, exchange, own

    def wait(self) -> tuple[Tensor, Tensor]:
        """The gradients of keys and of values, in their dtype: sums in the order of ranks."""
        k, v = self.gathered.k[:, self.heads], self.gathered.v[:, self.heads]
        terms: list[tuple[slice, Tensor, Tensor]] = []
        for other, (block, rows) in enumerate(zip(self.exchange.wait(), self.gathered.lent, strict=True)):
            terms += self.own if other == self.gathered.group.rank else []
            terms += [(here, *piece) for here, piece in zip(rows, unpack(block, k, v, rows), strict=True)]
        dk = sum_of_terms([(rows, of_k) for rows, of_k, _ in terms], k)
        dv = sum_of_terms([(rows, of_v) for rows, _, of_v in terms], v)
        return dk, dv


def pack(k: Tensor, v: Tensor, rows: list[slice], dtype: torch.dtype) -> Tensor:
    """Rows of keys and then of values, or of their gradients, each range as `[B, rows, heads, D]`, in a flat block."""
    found = [x[:, :, r].transpose(1, 2).reshape(-1).to(dtype) for x in (k, v) for r in rows]
    return torch.cat(found) if found else k.new_empty(0, dtype=dtype)


def size_of_block(k: Tensor, v: Tensor, rows: list[slice]) -> int:
    return sum(r.stop - r.start for r in rows) * k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3])


def unpack(block: Tensor, k: Tensor, v: Tensor, rows: list[slice]) -> list[tuple[Tensor, Tensor]]:
    """The ranges of a block, as views `[B, heads, rows, D]`; `k` and `v` have the other sizes."""
    shapes = [(k.shape[0], r.stop - r.start, k.shape[1], x.shape[3]) for x in (k, v) for r in rows]
    pieces = block.split([torch.Size(shape).numel() for shape in shapes]) if shapes else ()
    views = [piece.view(shape).transpose(1, 2) for piece, shape in zip(pieces, shapes, strict=True)]
    return list(zip(views[: len(rows)], views[len(rows) :], strict=True))


def join_rows(pieces: list[Tensor]) -> Tensor:
    """Pieces one after another along the rows, which are contiguous then, as they arrive."""
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([x.transpose(1, 2) for x in pieces], dim=1).transpose(1, 2)


def of_heads(whole: Whole, tensors: Tensors, gathered: Gathered, kv_heads: slice) -> tuple[Whole, slice]:
    """The call of some key heads in which this rank is the owner of all gathered keys, and its query heads."""
    group_size = tensors.q.shape[1] // tensors.k.shape[1]
    heads = slice(kv_heads.start * group_size, kv_heads.stop * group_size)
    settings = parts.settings_of_heads(whole.settings, heads.start, tensors.q.shape[1])
    return whole._replace(settings=settings, keys=gathered.needed), heads


def forward(whole: Whole, tensors: Tensors, group: Group) -> tuple[Tensor, Tensor]:
    """`out` in q's dtype and `lse` of this rank's rows over all ranks' keys."""
    found: list[tuple[Tensor, Tensor]] = []
    gathered = Gathered(tensors, whole, group)
    for kv_heads, kv in gathered:
        chunk, heads = of_heads(whole, tensors, gathered, kv_heads)
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
        chunk, heads = of_heads(whole, tensors, gathered, kv_heads)
        inputs = parts.heads_of(tensors, heads)._replace(**kv)
        of_q = RowSum(inputs.q.shape[2], partial(torch.empty_like, inputs.q)) if needs[0] else None
        of_k, of_v = gathered.sum_like(inputs.k), gathered.sum_like(inputs.v)
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
