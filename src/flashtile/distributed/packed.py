"""Parts of packed sequences as the sequences of one packed call, instead of a call for each."""

import functools
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.call import Call, Settings, Tensors
from ..call.window import Window
from .copies import join_rows
from .parts import Whole, find_parts

MAX_COPIES = 2  # copies of keys that several parts see


class Run(NamedTuple):
    """Rows or keys that follow each other in a rank's tensors, and their places in the packed call."""

    here: slice
    there: slice


class PackedParts(NamedTuple):
    """Parts as one packed call.

    Attributes:
        cu_seqlens_q: offsets of its sequences.
        cu_seqlens_k: the keys' offsets.
        rows: runs of its rows, in the order of the call.
        keys: runs of its keys; several may be the same.
        settings: the call's.
        keys_in_order: whether tensors have the keys of the call, not an owner's.
    """

    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]
    rows: tuple[Run, ...]
    keys: tuple[Run, ...]
    settings: Settings
    keys_in_order: bool = False

    def call(self, t: Tensors) -> Call:
        """The call, of a rank's rows and an owner's keys `[1, H, S, D]`."""
        device = t.q.device
        q = tokens(t.q, self.rows)
        k, v = (tokens(x, self.gathered_keys) for x in (t.k, t.v))
        of_q, of_k = offsets(self.cu_seqlens_q, device), offsets(self.cu_seqlens_k, device)
        packed = t._replace(q=q, k=k, v=v, cu_seqlens_q=of_q, cu_seqlens_k=of_k, sinks=None)
        return Call(packed, self.settings)

    @property
    def gathered_keys(self) -> tuple[Run, ...]:
        """The runs of the keys that tensors have."""
        everything = slice(0, self.cu_seqlens_k[-1])
        return (Run(everything, everything),) if self.keys_in_order else self.keys

    def rows_of(self, x: Tensor | None) -> Tensor | None:
        """The rows of out or its gradient `[1, H, S, D]`, or of lse `[1, H, S]`, in the packed call."""
        if x is None:
            return None
        return tokens(x, self.rows) if x.dim() == 4 else joined(x[0], self.rows, 1)


@functools.lru_cache(maxsize=4096)
def packed_parts(whole: Whole, rank: int, owner: int) -> PackedParts | None:
    """The parts of `rank`'s rows and `owner`'s keys as one call, if the ends of their sequences say what is visible.

    Parts that see the same keys need copies of them, so there must be few of those.
    """
    window = whole.settings.window
    if not whole.packed or whole.positions or window.top_left or window.chunk is not None:
        return None
    found = list(find_parts(whole, rank, owner))
    aligned = window == Window() or all(p.settings.i0 + p.settings.diagonal == p.settings.j0 for p in found)
    copied = sum(length(p.keys) for p in found) > MAX_COPIES * whole.keys.rows(owner)
    if len(found) < 2 or not aligned or copied:
        return None
    rows, keys = [p.rows for p in found], [p.keys for p in found]
    settings = whole.settings._replace(max_seqlen_q=max(map(length, rows)), max_seqlen_k=max(map(length, keys)))
    of_q, of_k = (tuple(accumulate(map(length, x), initial=0)) for x in (rows, keys))
    return PackedParts(of_q, of_k, runs(rows, of_q), runs(keys, of_k), settings)


def length(x: slice) -> int:
    return x.stop - x.start  # type: ignore[no-any-return]


def runs(ranges: list[slice], starts: tuple[int, ...]) -> tuple[Run, ...]:
    """The ranges with their places in the packed call, those that follow each other as one."""
    found: list[Run] = []
    for here, (start, stop) in zip(ranges, pairwise(starts), strict=True):
        if found and found[-1].here.stop == here.start:
            found[-1] = Run(slice(found[-1].here.start, here.stop), slice(found[-1].there.start, stop))
        else:
            found.append(Run(here, slice(start, stop)))
    return tuple(found)


def tokens(x: Tensor, of: tuple[Run, ...]) -> Tensor:
    """`[T, H, D]` from `[1, H, S, D]`."""
    return joined(x[0].transpose(0, 1), of, 0)


def joined(x: Tensor, of: tuple[Run, ...], dim: int) -> Tensor:
    return join_rows([x.narrow(dim, run.here.start, length(run.here)) for run in of], dim)


@functools.lru_cache(maxsize=256)
def offsets(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Offsets on a device, where a repeated call finds them."""
    return torch.tensor(values, dtype=torch.int32, device=device)
