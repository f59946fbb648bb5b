"""Results and gradients of rows, put together from parts.

The first part of a row is stored and later ones are added, so that nothing begins with zeros. A single part of all rows
is the result itself.
"""

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from ..call.problem import accumulation_dtype
from .copies import copy_rows

Term = tuple[slice, Tensor]


class Covered:
    """The rows of dimension 2 that have been written."""

    def __init__(self, length: int):
        self.length = length
        self.ranges: list[slice] = []

    def cut(self, rows: slice) -> Iterator[tuple[slice, bool]]:
        """Cut some rows into those that have been written (`True`) and the others."""
        inside = {n for r in self.ranges for n in (r.start, r.stop) if rows.start < n < rows.stop}
        for start, stop in pairwise(sorted({rows.start, rows.stop} | inside)):
            yield slice(start, stop), any(r.start <= start and stop <= r.stop for r in self.ranges)

    def add(self, rows: slice) -> list[tuple[slice, bool]]:
        """As `cut`, after which all of the rows have been written."""
        found = list(self.cut(rows))
        self.ranges.append(rows)
        return found

    def has_all(self, rows: slice) -> bool:
        """Whether nothing has been written, and these are all rows."""
        return not self.ranges and (rows.start, rows.stop) == (0, self.length)

    def fill(self, x: Tensor, value: float) -> None:
        """Give the rows that have not been written a value."""
        for rows, written in self.cut(slice(0, self.length)):
            if not written:
                x[:, :, rows] = value


class RowSum:
    """A sum of terms for ranges of rows, `[B, H, rows, D]`.

    Args:
        length: the number of rows.
        new: makes the uninitialized total, once it is needed: not for a single term for all rows.
    """

    def __init__(self, length: int, new: Callable[[], Tensor]):
        self.covered, self.new = Covered(length), new
        self.single: Tensor | None = None
        self.sum: Tensor | None = None

    def add(self, rows: slice, term: Tensor) -> None:
        if self.covered.has_all(rows):
            self.single = term
            self.covered.ranges.append(rows)
            return
        total = self.total()
        for part, written in self.covered.add(rows):
            own = term[:, :, part.start - rows.start : part.stop - rows.start]
            if written:
                total[:, :, part].add_(own)
            else:
                copy_rows(total[:, :, part], own)

    def total(self) -> Tensor:
        """The sum so far; rows without a term are uninitialized."""
        if self.sum is None:
            self.sum = self.new()
            if self.single is not None:
                self.sum.copy_(self.single)
                self.single = None
        return self.sum

    def result(self) -> Tensor:
        """The sum, zeros in rows without a term; a single term as it is."""
        return self.written() if self.single is None else self.single

    def written(self) -> Tensor:
        """The sum in the tensor that `new` made."""
        total = self.total()
        self.covered.fill(total, 0)
        return total


def sum_of_terms(terms: list[Term], like: Tensor) -> Tensor:
    """The sum of terms for ranges of rows; it is written into a term that has all rows, if there is one of its dtype.

    Args:
        terms: rows, and `[B, H, rows, D]`.
        like: has the shape, dtype and device of the sum.
    """
    everything = slice(0, like.shape[2])
    total = next((x for rows, x in terms if rows == everything and x.dtype == like.dtype), None)
    return write_sums(terms, torch.empty_like(like) if total is None else total)


def write_sums(terms: list[Term], total: Tensor) -> Tensor:
    """Write the sum of terms into `total`, which may be one of them: added in their order in the accumulation dtype,
    and rounded once. Rows without a term are zeros.
    """
    edges = sorted({0, total.shape[2], *(n for rows, _ in terms for n in (rows.start, rows.stop))})
    for start, stop in pairwise(edges):
        own = [x[:, :, start - rows.start : stop - rows.start] for rows, x in terms if rows.start <= start < rows.stop]
        place = total[:, :, start:stop]
        if not own:
            place.zero_()
        elif len(own) == 2 and own[0].dtype == own[1].dtype == total.dtype:
            torch.add(*own, out=place)  # which is rounded once
        elif len(own) > 1:
            place.copy_(functools.reduce(torch.add, (x.to(accumulation_dtype(total.dtype)) for x in own)))
        elif own[0].data_ptr() != place.data_ptr():
            copy_rows(place, own[0])
    return total


class RowResults:
    """The attention of rows over keys that come in parts, merged in a fixed order by log-sum-exp.

    Args:
        q: queries `[B, H, rows, D]`.
        head_dim_v: features of values.
        once: whether each row is in one part at most. Then `out` has q's dtype, otherwise the accumulation dtype.
    """

    def __init__(self, q: Tensor, head_dim_v: int, *, once: bool):
        self.q, self.head_dim_v, self.covered = q, head_dim_v, Covered(q.shape[2])
        self.dtype = accumulation_dtype(q.dtype)
        self.out_dtype = q.dtype if once else self.dtype
        self.single: tuple[Tensor, Tensor] | None = None
        self.totals: tuple[Tensor, Tensor] | None = None

    def merge(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Take in the attention of some rows, `out [B, H, rows, Dv]`, over keys that they have not seen."""
        if self.covered.has_all(rows):
            self.single = out, lse
            self.covered.ranges.append(rows)
            return
        all_out, all_lse = self.total()
        for part, written in self.covered.add(rows):
            own = slice(part.start - rows.start, part.stop - rows.start)
            place = all_out[:, :, part], all_lse[:, :, part]
            if written:
                merge_into(*place, out[:, :, own], lse[:, :, own])
            else:
                copy_rows(place[0], out[:, :, own])
                place[1].copy_(lse[:, :, own])

    def total(self) -> tuple[Tensor, Tensor]:
        if self.totals is None:
            shape = *self.q.shape[:3], self.head_dim_v
            out, lse = self.q.new_empty(shape, dtype=self.out_dtype), self.q.new_empty(shape[:3], dtype=self.dtype)
            self.totals = out, lse
            if self.single is not None:
                out.copy_(self.single[0])
                lse.copy_(self.single[1])
                self.single = None
        return self.totals

    def result(self) -> tuple[Tensor, Tensor]:
        """`out` and `lse`; 0 and `-inf` for rows without keys."""
        if self.single is not None:
            return self.single
        out, lse = self.total()
        self.covered.fill(out, 0)
        self.covered.fill(lse, -torch.inf)
        return out, lse


def merge_into(total: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge the attention over other keys into `total` and `total_lse`, which are in the accumulation dtype."""
    merged_lse = torch.logaddexp(total_lse, lse)
    total.mul_(weight(total_lse, merged_lse)[..., None])
    total.addcmul_(out, weight(lse, merged_lse)[..., None])
    total_lse.copy_(merged_lse)


def weight(lse: Tensor, total: Tensor) -> Tensor:
    """The weight of a part in a result, `exp(lse - total)`; of one without keys, 0."""
    return torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))
