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
from .gather_plan import Chunk, gather_plan
from .group import Exchange, Group
from .parts import Whole
from .passes import Saved, Sums
from .sums import RowResults, RowSum, sum_of_terms

Ranges = tuple[tuple[slice, ...], ...]  # of rows, by ranks


class Gathered:
    """The keys and values that a rank's rows see, by chunks of key heads, and the way home of their gradients.

    Ranks exchange blocks of rows of keys and values, or of their gradients (`pack`).
    """

    def __init__(self, tensors: Tensors, whole: Whole, group: Group):
        self.k, self.v, self.group = tensors.k, tensors.v, group
        self.plan = gather_plan(whole, group.rank, tensors.q.shape[1], tensors.k.shape[1])
        # Of gradients. Where a rank has one of each key, it is not rounded again.
        self.dtype = tensors.k.dtype if self.plan.once else accumulation_dtype(tensors.k.dtype)

    def __iter__(self) -> Iterator[tuple[Chunk, dict[str, Tensor]]]:
        """Each chunk with its keys and values in the order of its calls, `[B, heads, rows, D]` and
        `[B, heads, rows, Dv]`.
        """
        chunks = self.plan.chunks
        arriving = self.begin(chunks[0])
        for n, chunk in enumerate(chunks):
            present = arriving
            if n + 1 < len(chunks):
                arriving = self.begin(chunks[n + 1])
            yield chunk, self.end(chunk, present)

    def begin(self, chunk: Chunk) -> Exchange:
        """Begin to gather a chunk."""
        k, v = self.k[:, chunk.kv_heads], self.v[:, chunk.kv_heads]
        return self.exchange(k, v, self.plan.lent, self.plan.borrowed, k.dtype)

    def exchange(self, k: Tensor, v: Tensor, leaving: Ranges, arriving: Ranges, dtype: torch.dtype) -> Exchange:
        """Begin to exchange rows of keys and values, or of their gradients, by ranks; of those that arrive, only the
        number counts.
        """
        blocks = [pack(k, v, rows, dtype) for rows in leaving]
        return self.group.exchange(blocks, [(size_of_block(k, v, rows),) for rows in arriving])

    def end(self, chunk: Chunk, exchange: Exchange) -> dict[str, Tensor]:
        """All keys and values of a chunk."""
        k, v = self.k[:, chunk.kv_heads], self.v[:, chunk.kv_heads]
        tensors = {self.group.rank: (k.transpose(1, 2), v.transpose(1, 2))}
        for owner, (block, rows) in enumerate(zip(exchange.wait(), self.plan.borrowed, strict=True)):
            if rows:
                tensors[owner] = unpack(block, k, v, rows)
        if not self.plan.sources:
            return {"k": k[:, :, :0], "v": v[:, :, :0]}
        found = [[tensors[rank][n][:, rows] for rank, rows in self.plan.sources] for n in range(2)]
        return dict(zip("kv", map(join_rows, found), strict=True))

    def sum_like(self, x: Tensor) -> RowSum:
        """A sum over parts of the gradients of gathered keys or values."""
        shape = x.shape[0], self.plan.num_keys, x.shape[1], x.shape[3]
        return RowSum(self.plan.num_keys, lambda: x.new_empty(shape, dtype=self.dtype).transpose(1, 2))

    def return_gradients(self, chunk: Chunk, dk: Tensor, dv: Tensor) -> "Returned":
        """Begin to send the gradients of a chunk's keys to their owners; those of this rank's keys arrive."""
        exchange = self.exchange(dk, dv, self.plan.borrowed, self.plan.lent, self.dtype)
        own = [(here, dk[:, :, there], dv[:, :, there]) for here, there in self.plan.own]
        return Returned(self, chunk.kv_heads, exchange, own)


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
        for other, (block, rows) in enumerate(zip(self.exchange.wait(), self.gathered.plan.lent, strict=True)):
            terms += self.own if other == self.gathered.group.rank else []
            pieces = [
                x.transpose(1, 2).split([r.stop - r.start for r in rows], dim=2) for x in unpack(block, k, v, rows)
            ]
            terms += zip(rows, *pieces, strict=True)
        dk = sum_of_terms([(rows, of_k) for rows, of_k, _ in terms], k)
        dv = sum_of_terms([(rows, of_v) for rows, _, of_v in terms], v)
        return dk, dv


def pack(k: Tensor, v: Tensor, rows: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
    """Rows of keys and then of values, or of their gradients, as `[B, rows, heads, D]` in a flat block."""
    block = k.new_empty(size_of_block(k, v, rows), dtype=dtype)
    if rows:
        for x, place in zip((k.transpose(1, 2), v.transpose(1, 2)), unpack(block, k, v, rows), strict=True):
            torch.cat([x[:, r] for r in rows], dim=1, out=place)
    return block


def size_of_block(k: Tensor, v: Tensor, rows: tuple[slice, ...]) -> int:
    return sum(r.stop - r.start for r in rows) * k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3])


def unpack(block: Tensor, k: Tensor, v: Tensor, rows: tuple[slice, ...]) -> tuple[Tensor, Tensor]:
    """The keys and the values of a block, as views `[B, rows, heads, D]`; `k` and `v` have the other sizes."""
    num_rows = sum(r.stop - r.start for r in rows)
    shapes = [torch.Size((k.shape[0], num_rows, k.shape[1], x.shape[3])) for x in (k, v)]
    of_k, of_v = block.split([shape.numel() for shape in shapes])
    return of_k.view(shapes[0]), of_v.view(shapes[1])


def join_rows(pieces: list[Tensor]) -> Tensor:
    """`[B, heads, rows, D]` of pieces `[B, rows, heads, D]`, in whose order it is in memory."""
    return (torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]).transpose(1, 2)


def forward(whole: Whole, tensors: Tensors, group: Group) -> tuple[Tensor, Tensor]:
    """`out` in q's dtype and `lse` of this rank's rows over all ranks' keys."""
    found: list[tuple[Tensor, Tensor]] = []
    for chunk, kv in Gathered(tensors, whole, group):
        inputs = parts.heads_of(tensors, chunk.heads)._replace(**kv)
        results = RowResults(inputs.q, inputs.v.shape[3], once=True)
        passes.forward(chunk.calls, inputs, results)
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
    for chunk, kv in gathered:
        inputs = parts.heads_of(tensors, chunk.heads)._replace(**kv)
        of_q = RowSum(inputs.q.shape[2], partial(torch.empty_like, inputs.q)) if needs[0] else None
        of_k, of_v = gathered.sum_like(inputs.k), gathered.sum_like(inputs.v)
        sums = Sums(of_q, of_k, of_v, parts.heads_of(others, chunk.heads))
        passes.backward(chunk.calls, inputs, saved.heads(chunk.heads), sums)
        of_rows += [] if of_q is None else [of_q.result()]
        of_keys += [] if leaving is None else [leaving.wait()]
        leaving = gathered.return_gradients(chunk, of_k.result(), of_v.result())
    assert leaving is not None
    of_keys.append(leaving.wait())
    dq = join_heads(of_rows) if needs[0] else None
    return dq, join_heads([x for x, _ in of_keys]), join_heads([x for _, x in of_keys])


def join_heads(chunks: list[Tensor]) -> Tensor:
    return torch.cat(chunks, dim=1) if len(chunks) > 1 else chunks[0]
