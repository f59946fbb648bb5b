"""All-gather: each rank has the keys of all ranks, some key heads at a time.

A rank's rows see the keys in their own order, so that each piece of rows is one call, whose result is rounded once.
Few key heads make it cheap. Gradients of keys are summed by their owner, in the order of ranks (Liu et al., "Llama 3",
2024, section 3.3.2, gathers all heads at once).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..call.call import Tensors
from ..call.problem import accumulation_dtype
from . import parts
from .group import Exchange, Gathering, Group
from .layout import Piece, Placement, joined
from .parts import Results, Saved, Whole

MAX_CHUNKS = 4  # two are in memory, and each is one all-gather


def chunks_of(num_heads_kv: int) -> list[slice]:
    """Key heads that are gathered together; as many for each chunk."""
    count = max(n for n in range(1, MAX_CHUNKS + 1) if num_heads_kv % n == 0)
    each = num_heads_kv // count
    return [slice(n * each, (n + 1) * each) for n in range(count)]


class Gathered:
    """The chunks of keys and values: one is gathered while the one before is computed with."""

    def __init__(self, tensors: Tensors, keys: Placement, group: Group):
        self.tensors, self.keys, self.group = tensors, keys, group
        self.longest = max(map(keys.rows, range(group.size)))

    def begin(self, heads: slice) -> Gathering:
        """Shards travel padded to the longest one."""
        k, v = self.tensors.k[:, heads], self.tensors.v[:, heads]
        rows, width = k.shape[2], k.shape[3]
        buffer = k.new_zeros((*k.shape[:2], self.longest, width + v.shape[3]))
        buffer[:, :, :rows, :width], buffer[:, :, :rows, width:] = k, v
        return self.group.gather_tensors(buffer)

    def end(self, gathering: Gathering) -> dict[str, Tensor]:
        """All keys and values in their order."""
        whole = self.keys.assemble(list(gathering.wait()), 2)
        k, v = whole.split([self.tensors.k.shape[3], self.tensors.v.shape[3]], dim=3)
        return {"k": k, "v": v}

    def __iter__(self) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Each chunk's key heads with its keys and values."""
        chunks = chunks_of(self.tensors.k.shape[1])
        arriving = self.begin(chunks[0])
        for n, heads in enumerate(chunks):
            present = arriving
            if n + 1 < len(chunks):
                arriving = self.begin(chunks[n + 1])
            yield heads, self.end(present)


def of_all_keys(whole: Whole, tensors: Tensors, kv_heads: slice) -> tuple[Whole, slice]:
    """The call of some key heads in which each rank has all keys, and its query heads."""
    group_size = tensors.q.shape[1] // tensors.k.shape[1]
    heads = slice(kv_heads.start * group_size, kv_heads.stop * group_size)
    settings = parts.settings_of_heads(whole.settings, heads.start, tensors.q.shape[1])
    return whole._replace(settings=settings, keys=Placement((joined([Piece(0, whole.keys.length)]),))), heads


def forward(whole: Whole, tensors: Tensors, group: Group, results: Results) -> None:
    """Merge the attention of this rank's rows over all ranks' keys into `results`."""
    for kv_heads, kv in Gathered(tensors, whole.keys, group):
        chunk, heads = of_all_keys(whole, tensors, kv_heads)
        inputs = parts.heads_of(tensors, heads)._replace(**kv)
        parts.forward(chunk, inputs, (group.rank, 0), results.heads(heads))


def backward(whole: Whole, tensors: Tensors, group: Group, saved: Saved, sums: Tensors) -> tuple[Tensor, Tensor]:
    """The gradients of this rank's keys and values; all others are added to `sums`."""
    dtype = accumulation_dtype(tensors.k.dtype)
    dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (tensors.k, tensors.v))
    leaving: tuple[slice, Exchange] | None = None
    for kv_heads, kv in Gathered(tensors, whole.keys, group):
        chunk, heads = of_all_keys(whole, tensors, kv_heads)
        inputs = parts.heads_of(tensors, heads)._replace(**kv)
        both = dk.new_zeros((*kv["k"].shape[:3], dk.shape[3] + dv.shape[3]))
        of_k, of_v = both.split([dk.shape[3], dv.shape[3]], dim=3)
        totals = parts.heads_of(sums, heads)._replace(k=of_k, v=of_v)
        parts.backward(chunk, inputs, (group.rank, 0), saved.heads(heads), totals)
        if leaving is not None:
            add(*leaving, dk, dv)
        sent = [whole.keys.select(both, rank, 2) for rank in range(group.size)]
        shape = (*both.shape[:2], dk.shape[2], both.shape[3])
        leaving = kv_heads, group.exchange(sent, [shape] * group.size)
    assert leaving is not None
    add(*leaving, dk, dv)
    return dk, dv


def add(heads: slice, exchange: Exchange, dk: Tensor, dv: Tensor) -> None:
    """Sum what all ranks have for this rank's keys."""
    both = torch.stack(exchange.wait()).sum(dim=0)
    dk[:, heads] += both[..., : dk.shape[3]]
    dv[:, heads] += both[..., dk.shape[3] :]
