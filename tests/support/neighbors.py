"""Rows of one causal sequence in calls with other neighbors, cuts and layouts, whose bits are compared."""

import random
from typing import Any, NamedTuple

import torch
from checking import offsets
from torch import Tensor

import flashtile

LONGEST = 129  # tokens of a neighbor
Results = tuple[Tensor, Tensor]  # out [rows, Hq, Dv] and lse [Hq, rows]


class Sequence(NamedTuple):
    """The tokens `q [S, Hq, D]`, `k [S, Hkv, D]`, `v [S, Hkv, D]`."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def random(
        cls, length: int, heads: tuple[int, int], width: int, dtype: torch.dtype, seed: int = 0, device: str = "cpu"
    ) -> "Sequence":
        generator = torch.Generator().manual_seed(seed)
        sizes = [(length, n, width) for n in (heads[0], heads[1], heads[1])]
        q, k, v = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
        return cls(q, k * torch.linspace(0.2, 3, length, device=device)[:, None, None].to(dtype), v)

    def like(self, length: int, seed: int) -> "Sequence":
        heads = self.q.shape[1], self.k.shape[1]
        return Sequence.random(length, heads, self.q.shape[2], self.q.dtype, seed, str(self.q.device))


def neighborhoods(count: int, most: int, seed: int) -> list[list[tuple[int, int]]]:
    """Lists of neighbors, each of its queries and its keys: none, then random numbers up to `most`, then that many."""
    draw = random.Random(seed)
    numbers = [0, *(draw.randint(1, most) for _ in range(count - 2)), most - 1]
    lengths = [[(draw.randint(1, LONGEST), draw.randint(0, LONGEST)) for _ in range(n)] for n in numbers]
    return [[(queries, queries + cached) for queries, cached in of_one] for of_one in lengths]


def in_pages(x: Tensor, cu_seqlens: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Pages of packed tokens in shuffled order, and their table."""
    lengths = cu_seqlens.diff().tolist()
    columns = -(-max(lengths) // page_size)
    order = torch.randperm(len(lengths) * columns, generator=torch.Generator().manual_seed(1))
    pages = x.new_zeros(len(order), page_size, *x.shape[1:])
    table = order.view(len(lengths), columns).int().to(x.device)
    for row, start, length in zip(table.tolist(), cu_seqlens[:-1].tolist(), lengths, strict=True):
        for column in range(-(-length // page_size)):
            part = x[start + column * page_size : start + min((column + 1) * page_size, length)]
            pages[row[column], : len(part)] = part
    return pages, table


def packed(
    sequence: Sequence,
    start: int,
    stop: int,
    around: list[tuple[int, int]],
    page_size: int | None = None,
    **options: Any,
) -> Results:
    """Rows `start` to `stop`, with all keys before `stop`, in the middle of a packed call; keys in pages if asked."""
    others = [sequence.like(keys, 17 + n) for n, (_, keys) in enumerate(around)]
    parts = [(x.q[len(x.q) - queries :], x.k, x.v) for x, (queries, _) in zip(others, around, strict=True)]
    place = len(parts) // 2
    parts.insert(place, (sequence.q[start:stop], sequence.k[:stop], sequence.v[:stop]))
    q, k, v = (torch.cat(x) for x in zip(*parts, strict=True))
    cu_q, cu_k = (offsets(*(len(part[n]) for part in parts)).to(q.device) for n in (0, 1))
    given: dict[str, Any] = {"causal": True, "batch_invariant": True} | options
    if page_size is not None:
        (k, table), (v, _) = in_pages(k, cu_k, page_size), in_pages(v, cu_k, page_size)
        given |= {"page_table": table}
    out, lse = flashtile.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **given)
    first = int(cu_q[place])
    return out[first : first + stop - start], lse[:, first : first + stop - start]


def decoded(sequence: Sequence, position: int, lengths: list[int], capacity: int, **options: Any) -> Results:
    """The row at a position by `attention_with_kvcache`, the last one of a batch with neighbors of these lengths."""
    others = [sequence.like(length, 31 + n) for n, length in enumerate(lengths)]
    parts = [(x.q[-1], x.k, x.v) for x in others]
    parts.append((sequence.q[position], sequence.k[: position + 1], sequence.v[: position + 1]))
    caches = [sequence.k.new_zeros(len(parts), sequence.k.shape[1], capacity, sequence.k.shape[2]) for _ in range(2)]
    for n, part in enumerate(parts):
        for cache, x in zip(caches, part[1:], strict=True):
            cache[n, :, : len(x)] = x.transpose(0, 1)
    held = torch.tensor([len(part[1]) for part in parts], dtype=torch.int32, device=sequence.q.device)
    q = torch.stack([part[0] for part in parts])[:, :, None]
    given: dict[str, Any] = {"causal": True, "batch_invariant": True} | options
    out, lse = flashtile.attention_with_kvcache(q, *caches, cache_seqlens=held, return_lse=True, **given)
    return out[-1].transpose(0, 1), lse[-1]


def same_bits(x: Results, y: Results) -> bool:
    return all(torch.equal(a, b) for a, b in zip(x, y, strict=True))
