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
from .copies import copy_rows, join_rows
from .gather_plan import Chunk, GatherPlan, gather_plan
from .group import Group, Transfer
from .packed import Run
from .parts import Whole
from .passes import Saved, Sums
from .sums import RowResults, RowSum, Term, sum_of_terms, write_sums


class Gathered:
    """The keys and values that a rank's rows see, by chunks of key heads.

    On their way, tensors of rows are `[B, rows, heads, D]`: rows of all heads follow each other in memory.
    """

    def __init__(self, tensors: Tensors, whole: Whole, group: Group):
        self.kv, self.group = (tensors.k, tensors.v), group
        self.plan = gather_plan(whole, group.rank, tensors.q.shape[1], tensors.k.shape[1])

    def __iter__(self) -> Iterator[tuple[Chunk, dict[str, Tensor]]]:
        """Each chunk with its keys and values in the order of its calls, `[B, heads, rows, D]`."""
        chunks = self.plan.chunks
        arriving = Arriving(self.own(chunks[0]), self.plan, self.group)
        for n, chunk in enumerate(chunks):
            present = arriving
            if n + 1 < len(chunks):
                arriving = Arriving(self.own(chunks[n + 1]), self.plan, self.group)
            yield chunk, dict(zip("kv", (x.transpose(1, 2) for x in present.wait()), strict=True))

    def own(self, chunk: Chunk) -> list[Tensor]:
        """This rank's keys and values of a chunk."""
        return [x[:, chunk.kv_heads].transpose(1, 2) for x in self.kv]

    def sum_like(self, x: Tensor) -> RowSum:
        """A sum over parts of the gradients of gathered keys or values. Where they have one of each key, it is not
        rounded again.
        """
        shape, dtype = (x.shape[0], self.plan.num_keys, x.shape[1], x.shape[3]), x.dtype
        dtype = dtype if self.plan.once else accumulation_dtype(dtype)
        return RowSum(self.plan.num_keys, lambda: x.new_empty(shape, dtype=dtype).transpose(1, 2))


class Blocks:
    """Rows of keys and values for each rank, in a flat tensor.

    Args:
        like: keys and values, with the other sizes and the dtype.
        num_rows: by ranks.
        flat: uninitialized by default.
    """

    def __init__(self, like: list[Tensor], num_rows: list[int], flat: Tensor | None = None):
        self.like, self.num_rows = like, num_rows
        self.flat = like[0].new_empty(sum(self.sizes(num_rows))) if flat is None else flat

    def sizes(self, num_rows: list[int]) -> list[int]:
        """Elements of rows of both tensors."""
        each = sum(x.shape[0] * x.shape[2] * x.shape[3] for x in self.like)
        return [n * each for n in num_rows]

    def of_ranks(self) -> list[list[Tensor]]:
        """Keys and values of each rank; nothing of a rank without rows."""
        return [
            self.views(block, n) if n > 0 else []
            for block, n in zip(self.flat.split(self.sizes(self.num_rows)), self.num_rows, strict=True)
        ]

    def views(self, block: Tensor, num_rows: int) -> list[Tensor]:
        shapes = [(x.shape[0], num_rows, x.shape[2], x.shape[3]) for x in self.like]
        parts = block.split([torch.Size(shape).numel() for shape in shapes])
        return [x.view(shape) for x, shape in zip(parts, shapes, strict=True)]

    def exchange(self, group: Group, num_rows: list[int]) -> Transfer:
        """Begin to exchange the blocks for others."""
        return group.all_to_all(self.flat, self.sizes(self.num_rows), self.sizes(num_rows))


class Arriving:
    """A chunk of keys on its way."""

    def __init__(self, own: list[Tensor], plan: GatherPlan, group: Group):
        self.own, self.plan, self.rank = own, plan, group.rank
        blocks = Blocks(own, plan.lent_rows)
        for of_rank, runs in zip(blocks.of_ranks(), plan.lent, strict=True):
            for place, x in zip(of_rank, own, strict=False):
                join_rows([x[:, run.here] for run in runs], 1, out=place)
        self.transfer = blocks.exchange(group, plan.borrowed_rows)
        self.all: list[Tensor] = []
        if len(plan.sources) > 1 and len(plan.borrowed[self.rank]) == 1:  # copied while the others travel
            self.all = [x.new_empty(x.shape[0], plan.num_keys, *x.shape[2:]) for x in own]
            self.place(self.rank, own)

    def place(self, rank: int, tensors: list[Tensor]) -> None:
        """Copy a rank's rows to their places."""
        for run in self.plan.borrowed[rank]:
            for place, x in zip(self.all, tensors, strict=True):
                copy_rows(place[:, run.there], x[:, run.here])

    def wait(self) -> list[Tensor]:
        """All keys and values of the chunk. Those of a single run are not copied."""
        by_rank = Blocks(self.own, self.plan.borrowed_rows, self.transfer.wait()).of_ranks()
        by_rank[self.rank] = self.own
        if not self.all:
            pieces = [[by_rank[rank][n][:, rows] for rank, rows in self.plan.sources] for n in range(2)]
            return [join_rows(of, 1) if of else x[:, :0] for of, x in zip(pieces, self.own, strict=True)]
        for rank, tensors in enumerate(by_rank):
            if rank != self.rank:
                self.place(rank, tensors)
        return self.all


class Returned:
    """Gradients of a chunk of gathered keys on their way to the keys' owners; the gradients of this rank's keys
    arrive.
    """

    def __init__(self, own: list[Tensor], gradients: tuple[Tensor, Tensor], plan: GatherPlan, group: Group):
        self.own, self.plan, self.rank = own, plan, group.rank
        self.terms = [[terms_of(runs, x) for x in gradients] for runs in plan.borrowed]
        blocks = Blocks(own, plan.borrowed_rows)
        for of_rank, terms in zip(blocks.of_ranks(), self.terms, strict=True):
            for place, of_tensor in zip(of_rank, terms, strict=False):  # none of this rank
                write_sums(of_tensor, place.transpose(1, 2))
        self.transfer = blocks.exchange(group, plan.lent_rows)

    def wait(self) -> list[Tensor]:
        """The gradients of this rank's keys and values, in their dtype: sums in the order of ranks."""
        arrived = Blocks(self.own, self.plan.lent_rows, self.transfer.wait()).of_ranks()
        sums = []
        for n, own in enumerate(self.own):
            terms: list[Term] = []
            for rank, runs in enumerate(self.plan.lent):
                if rank == self.rank:
                    terms += self.terms[rank][n]
                else:
                    terms += [(run.here, arrived[rank][n][:, run.there].transpose(1, 2)) for run in runs]
            sums.append(sum_of_terms(terms, own.transpose(1, 2)))
        return sums


def terms_of(runs: tuple[Run, ...], gradient: Tensor) -> list[Term]:
    """The gradient `[B, heads, rows, D]` of gathered keys as terms of their owner's."""
    return [(run.here, gradient[:, :, run.there]) for run in runs]


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
    of_keys: list[list[Tensor]] = []
    leaving: Returned | None = None
    for chunk, kv in gathered:
        inputs = parts.heads_of(tensors, chunk.heads)._replace(**kv)
        of_q = RowSum(inputs.q.shape[2], partial(torch.empty_like, inputs.q)) if needs[0] else None
        of_k, of_v = gathered.sum_like(inputs.k), gathered.sum_like(inputs.v)
        sums = Sums(of_q, of_k, of_v, parts.heads_of(others, chunk.heads))
        passes.backward(chunk.calls, inputs, saved.heads(chunk.heads), sums)
        of_rows += [] if of_q is None else [of_q.result()]
        of_keys += [] if leaving is None else [leaving.wait()]
        leaving = Returned(gathered.own(chunk), (of_k.result(), of_v.result()), gathered.plan, group)
    assert leaving is not None
    of_keys.append(leaving.wait())
    dq = join_heads(of_rows) if needs[0] else None
    return dq, join_heads([dk for dk, _ in of_keys]), join_heads([dv for _, dv in of_keys])


def join_heads(chunks: list[Tensor]) -> Tensor:
    return torch.cat(chunks, dim=1) if len(chunks) > 1 else chunks[0]
