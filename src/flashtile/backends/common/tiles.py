"""Which rows and keys a tile holds: dense, varlen or paged, behind one interface.

A call is cut into `Slab`s: some sequences and some heads that are computed together. A slab reads and writes tensors
through `Rows`, which turn a range of positions into a tile `[B, H, n, D]`. Where lengths can be read on the host
(dense, or varlen on a CPU), positions are slices of views. On other devices nothing is read back: positions become
gathered token indices, and positions that do not exist come as zeros and are written to a spare last row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, overload

import torch
from torch import Tensor

from ...call import Call, new_rows


class TileShape(NamedTuple):
    """How much of a call is computed at once: query rows, keys, key/value heads and sequences."""

    block_m: int
    block_n: int
    heads_kv: int
    batch: int


class DenseRows:
    """Positions are slices: `x` is `[B, H, S, D]`."""

    def __init__(self, x: Tensor):
        self.x = x

    def load(self, positions: slice) -> Tensor:
        return self.x[:, :, positions]

    def store(self, positions: slice, tile: Tensor) -> None:
        self.x[:, :, positions] = tile

    def add(self, positions: slice, tile: Tensor) -> None:
        self.x[:, :, positions] += tile

    def exists(self, positions: slice) -> Tensor | None:
        return None


class TokenIndex(NamedTuple):
    """Where the positions of some sequences lie in a flat list of tokens."""

    first: Tensor | None  # [B] first token, packed sequences
    page_table: Tensor | None  # [B, max_pages], paged ones
    page_size: int
    length: Tensor  # [B]
    num_tokens: int

    def tokens(self, positions: slice) -> tuple[Tensor, Tensor]:
        """Token of each position, and whether it exists; `[B, n]` each. What does not exist is at `num_tokens`."""
        position = torch.arange(positions.start, positions.stop, device=self.length.device)  # [n]
        if self.page_table is None:
            assert self.first is not None
            token = self.first[:, None] + position
            exists = (position < self.length[:, None]) & (token >= 0) & (token < self.num_tokens)
        else:
            column = position // self.page_size  # below max_pages: slabs do not go past it
            page = self.page_table[:, column].long()
            token = page * self.page_size + position % self.page_size
            exists = (position < self.length[:, None]) & (page >= 0) & (token < self.num_tokens)
        return torch.where(exists, token, self.num_tokens), exists


class GatheredRows:
    """Positions are indices: `x` is `[T, H, D]`, or `[T + 1, H, D]` for a buffer that is written."""

    def __init__(self, x: Tensor, index: TokenIndex):
        self.x, self.index = x, index

    def load(self, positions: slice) -> Tensor:
        token, exists = self.index.tokens(positions)
        tile = self.x[token.clamp(max=self.index.num_tokens - 1)]  # [B, n, H, D]
        return torch.where(exists[..., None, None], tile, 0).transpose(1, 2)

    def store(self, positions: slice, tile: Tensor) -> None:
        token, _ = self.index.tokens(positions)
        self.x[token] = tile.transpose(1, 2).to(self.x.dtype)

    def add(self, positions: slice, tile: Tensor) -> None:
        token, _ = self.index.tokens(positions)
        self.x.index_put_((token,), tile.transpose(1, 2).to(self.x.dtype), accumulate=True)

    def exists(self, positions: slice) -> Tensor | None:
        return self.index.tokens(positions)[1]


Rows = DenseRows | GatheredRows


class Side:
    """The queries or the keys of all sequences of a call; makes the `Rows` of any tensor shaped like them."""

    def __init__(self, call: Call, *, keys: bool):
        tensors, settings = call.tensors, call.settings
        self.x = tensors.k if keys else tensors.q
        self.dense = tensors.cu_seqlens_q is None
        self.paged = keys and tensors.page_table is not None
        self.on_host = self.dense or self.x.device.type == "cpu"
        if self.dense:
            self.batch, self.max_length = self.x.shape[0], self.x.shape[2]
            return
        bounds = tensors.cu_seqlens_k if keys else tensors.cu_seqlens_q
        used = tensors.seqused_k if keys else None
        length = used if bounds is None else (bounds[1:] - bounds[:-1]).clamp(min=0)
        assert length is not None
        if bounds is not None and used is not None:
            length = used if self.paged else torch.minimum(used, length)
        page_table = tensors.page_table if self.paged else None
        self.num_tokens = self.x.shape[0] * self.x.shape[1] if self.paged else self.x.shape[0]
        capacity = page_table.shape[1] * self.x.shape[1] if page_table is not None else self.num_tokens
        first = bounds[:-1].long() if bounds is not None and not self.paged else None
        page_size = self.x.shape[1] if self.paged else 1
        self.index = TokenIndex(first, page_table, page_size, length.long(), self.num_tokens)
        self.batch = length.shape[0]
        if self.on_host:
            self.lengths = [min(n, capacity) for n in self.index.length.tolist()]
            self.firsts = first.tolist() if first is not None else None
            self.max_length = max(self.lengths, default=0)
        else:
            asked = settings.max_seqlen_k if keys else settings.max_seqlen_q
            self.max_length = capacity if asked is None else min(asked, capacity)
        if self.num_tokens == 0:
            self.max_length = 0

    def buffer(self, like: Tensor, heads: int, width: int, dtype: torch.dtype, fill: float = 0.0) -> Tensor:
        """A tensor for results of this side, with the rows of `like`: `[B, H, S, width]` or `[T + 1, H, width]`."""
        if self.dense:
            return new_rows(like, heads, width, dtype).fill_(fill)
        return like.new_full((self.num_tokens + 1, heads, width), fill, dtype=dtype)

    def finished(self, buffer: Tensor) -> Tensor:
        """A filled buffer in the shape of the caller's tensor: without the spare row, pages as pages."""
        if self.dense:
            return buffer
        buffer = buffer[: self.num_tokens]
        return buffer.unflatten(0, self.x.shape[:2]) if self.paged else buffer

    def length(self, sequence: int) -> int:
        return self.max_length if self.dense else self.lengths[sequence]

    def rows(self, x: Tensor, batch: slice, heads: slice) -> Rows:
        """Rows of some sequences and heads of `x`, a tensor of this side or one of its buffers."""
        if self.paged and x.dim() == 4:
            x = x.flatten(0, 1)  # [num_pages, page_size, H, D] to [T, H, D]; copies only where strides ask for it
        if self.dense:
            return DenseRows(x[batch, heads])
        if self.on_host and not self.paged:
            assert self.firsts is not None
            first, length = self.firsts[batch.start], self.lengths[batch.start]
            return DenseRows(x[first : first + length, heads].transpose(0, 1)[None])  # [1, H, S, D]
        index = self.index
        first = None if index.first is None else index.first[batch]
        table = None if index.page_table is None else index.page_table[batch]
        index = index._replace(first=first, page_table=table, length=index.length[batch])
        return GatheredRows(x[:, heads], index)


@dataclass(frozen=True)
class Slab:
    """Some sequences and heads of a call, computed together."""

    queries: Side
    keys: Side
    batch: slice
    heads_q: slice
    heads_kv: slice
    seqlen_q: int  # the longest sequence's, where they differ
    seqlen_k: int
    diagonal: int | Tensor  # seqlen_k - seqlen_q of each sequence; an int, or [B, 1, 1, 1]

    @property
    def num_groups(self) -> int:
        """Query heads that share a key/value head."""
        return (self.heads_q.stop - self.heads_q.start) // (self.heads_kv.stop - self.heads_kv.start)

    @overload
    def query_rows(self, x: Tensor) -> Rows: ...
    @overload
    def query_rows(self, x: None) -> None: ...
    @overload
    def query_rows(self, x: Tensor | None) -> Rows | None: ...

    def query_rows(self, x: Tensor | None) -> Rows | None:
        """This slab's rows of a tensor with q's rows and heads."""
        return None if x is None else self.queries.rows(x, self.batch, self.heads_q)

    @overload
    def key_rows(self, x: Tensor) -> Rows: ...
    @overload
    def key_rows(self, x: None) -> None: ...
    @overload
    def key_rows(self, x: Tensor | None) -> Rows | None: ...

    def key_rows(self, x: Tensor | None) -> Rows | None:
        """This slab's rows of k, v, or a buffer with their rows and heads."""
        return None if x is None else self.keys.rows(x, self.batch, self.heads_kv)


def slabs(call: Call, queries: Side, keys: Side, shape: TileShape) -> Iterator[Slab]:
    """Cut a call along sequences and key/value heads; host-known lengths give a slab for each sequence."""
    heads_kv = num_heads_kv(call)
    group = call.tensors.q.shape[1] // heads_kv
    host_varlen = not queries.dense and queries.on_host
    step = 1 if host_varlen else shape.batch
    for b in range(0, queries.batch, step):
        batch = slice(b, min(b + step, queries.batch))
        if queries.on_host:
            seqlen_q, seqlen_k = queries.length(b), keys.length(b)
            diagonal: int | Tensor = seqlen_k - seqlen_q
        else:
            seqlen_q, seqlen_k = queries.max_length, keys.max_length
            lengths = keys.index.length[batch] - queries.index.length[batch]
            diagonal = lengths[:, None, None, None]
        for h in range(0, heads_kv, shape.heads_kv):
            kv = slice(h, min(h + shape.heads_kv, heads_kv))
            q = slice(kv.start * group, kv.stop * group)
            yield Slab(queries, keys, batch, q, kv, seqlen_q, seqlen_k, diagonal + call.settings.diagonal)


def num_heads_kv(call: Call) -> int:
    return call.tensors.k.shape[1 if call.layout == "dense" else -2]


def fold_groups(x: Tensor, num_groups: int) -> Tensor:
    """`[B, Hq, M, D]` to `[B, Hkv, G * M, D]`: the query heads of a group become rows of one product."""
    return x.unflatten(1, (-1, num_groups)).flatten(2, 3) if num_groups > 1 else x


def unfold_groups(x: Tensor, num_groups: int) -> Tensor:
    """`[B, Hkv, G * M, N]` back to `[B, Hq, M, N]`."""
    return x.unflatten(2, (num_groups, -1)).flatten(1, 2) if num_groups > 1 else x
