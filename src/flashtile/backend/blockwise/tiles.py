"""Tiles of dense, varlen or paged tensors, behind one interface.

A call is cut into `Slab`s, groups of sequences and heads that are computed together. A slab reads and writes tensors
through `Rows`, which map a range of positions to a tile `[B, H, n, D]`. Where the host can read the lengths (dense, or
varlen on a CPU), positions are slices of views. Elsewhere positions become token indices, so that no length is copied
to the host: positions that do not exist are loaded as zeros and stored to a spare last row.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, overload

import torch
from torch import Tensor

from ...call import device
from ...call.call import Call, new_rows


class TileShape(NamedTuple):
    """The size of a tile: query rows, keys, key/value heads and sequences that are computed at once."""

    block_m: int
    block_n: int
    heads_kv: int
    batch: int


class DenseRows:
    """Rows of `x [B, H, S, D]`, as slices."""

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
    """The map from positions of sequences to tokens of a packed or paged tensor."""

    first: Tensor | None  # [B] first token, packed sequences
    page_table: Tensor | None  # [B, max_pages], paged ones
    page_size: int
    length: Tensor  # [B]
    num_tokens: int
    leftpad: Tensor | None = None  # [B] positions at the front that do not exist

    def tokens(self, positions: slice) -> tuple[Tensor, Tensor]:
        """The token of each position, or `num_tokens` if it does not exist, and whether it exists; `[B, n]` each."""
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
        if self.leftpad is not None:
            exists = exists & (position >= self.leftpad[:, None])
        return torch.where(exists, token, self.num_tokens), exists


class GatheredRows:
    """Rows of `x [T, H, D]` or pages `[P, page_size, H, D]`, by indices; buffers for results are `[T + 1, H, D]`."""

    def __init__(self, x: Tensor, index: TokenIndex):
        self.x, self.index = x, index

    def load(self, positions: slice) -> Tensor:
        token, exists = self.index.tokens(positions)
        token = token.clamp(max=self.index.num_tokens - 1)
        pages = self.x.dim() == 4
        tile = (
            self.x[token // self.index.page_size, token % self.index.page_size] if pages else self.x[token]
        )  # [B, n, H, D]
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
    """One side of a call, its queries or its keys: lengths and layout of all sequences. Makes `Rows` of any tensor of
    that layout.
    """

    def __init__(self, call: Call, *, keys: bool):
        tensors, settings = call.tensors, call.settings
        self.keys = keys
        self.paged = keys and tensors.page_table is not None
        self.dense = tensors.cu_seqlens_q is None and not self.paged
        self.bind(call)
        self.on_host = call.layout == "dense" or device.host_readable(self.x)
        if self.dense:
            self.batch, self.max_length = self.x.shape[0], self.x.shape[2]
            return
        self.batch = self.index.length.shape[0]
        capacity = self.num_tokens
        if self.index.page_table is not None:
            capacity = self.index.page_table.shape[1] * self.index.page_size
        if self.on_host:
            self.lengths = [min(n, capacity) for n in self.index.length.tolist()]
            self.firsts = None if self.index.first is None else self.index.first.tolist()
            self.max_length = max(self.lengths, default=0)
        else:
            requested = settings.max_seqlen_k if keys else settings.max_seqlen_q
            self.max_length = capacity if requested is None else min(requested, capacity)
        if self.num_tokens == 0:
            self.max_length = 0

    def bind(self, call: Call) -> None:
        """Use the tensors of `call`; lengths that the host has read before are kept."""
        tensors = call.tensors
        self.x = tensors.k if self.keys else tensors.q
        if self.dense:
            return
        bounds = tensors.cu_seqlens_k if self.keys else tensors.cu_seqlens_q
        used = tensors.seqused_k if self.keys else tensors.seqused_q
        length = used if bounds is None else (bounds[1:] - bounds[:-1]).clamp(min=0)
        if bounds is not None and length is not None and used is not None:
            length = used if self.paged else torch.minimum(used, length).clamp(min=0)
        assert length is not None
        self.num_tokens = self.x.shape[0] * self.x.shape[1] if self.paged else self.x.shape[0]
        self.index = TokenIndex(
            first=bounds[:-1].long() if bounds is not None and not self.paged else None,
            page_table=tensors.page_table if self.paged else None,
            page_size=self.x.shape[1] if self.paged else 1,
            length=length.long(),
            num_tokens=self.num_tokens,
            leftpad=tensors.leftpad_k if self.keys else None,
        )

    def bound_to(self, call: Call) -> "Side":
        """A copy with the tensors of `call`: the same call, inside a transform."""
        side = copy.copy(self)
        side.bind(call)
        return side

    def buffer(self, like: Tensor, heads: int, width: int, dtype: torch.dtype, fill: float = 0.0) -> Tensor:
        """Allocate a result of this side, with the rows of `like`: `[B, H, S, width]` or `[T + 1, H, width]`."""
        if self.dense:
            return new_rows(like, heads, width, dtype).fill_(fill)
        return like.new_full((self.num_tokens + 1, heads, width), fill, dtype=dtype)

    def result(self, buffer: Tensor) -> Tensor:
        """A buffer in the shape of the caller's tensor: without the spare row, and in pages if that is paged."""
        if self.dense:
            return buffer
        buffer = buffer[: self.num_tokens]
        return buffer.unflatten(0, self.x.shape[:2]) if self.paged else buffer

    def length(self, sequence: int) -> int:
        return self.max_length if self.dense else self.lengths[sequence]

    def first(self, sequence: int) -> int:
        """The first token of a packed sequence whose lengths the host knows."""
        assert self.firsts is not None
        return self.firsts[sequence]

    def device_length(self, batch: slice) -> int | Tensor:
        """Lengths on the device, `[B, 1, 1, 1]`; an int for dense sequences."""
        return self.max_length if self.dense else self.index.length[batch, None, None, None]

    def rows(self, x: Tensor, batch: slice, heads: slice) -> Rows:
        """Rows of a range of sequences and heads of `x`, a tensor or a buffer of this side."""
        if self.dense:
            return DenseRows(x[batch, heads])
        if self.on_host and not self.paged:
            first, length = self.first(batch.start), self.lengths[batch.start]
            return DenseRows(x[first : first + length, heads].transpose(0, 1)[None])  # [1, H, S, D]
        per_sequence = ("first", "page_table", "length", "leftpad")
        per_batch = {name: y for name in per_sequence if (y := getattr(self.index, name)) is not None}
        part = {name: y[batch] for name, y in per_batch.items()}
        return GatheredRows(x[..., heads, :], self.index._replace(**part))


@dataclass(frozen=True)
class Slab:
    """Sequences and heads of a call that are computed together."""

    queries: Side
    keys: Side
    batch: slice
    heads_q: slice
    heads_kv: slice
    seqlen_q: int  # the longest sequence's
    seqlen_k: int
    diagonal: int | Tensor  # seqlen_k - seqlen_q of each sequence; an int, or [B, 1, 1, 1]

    def bound_to(self, call: Call) -> "Slab":
        """A copy with the tensors of `call`: the same call, inside a transform."""
        queries, keys = self.queries.bound_to(call), self.keys.bound_to(call)
        diagonal = self.diagonal
        if isinstance(diagonal, Tensor):
            diagonal = keys.device_length(self.batch) - queries.device_length(self.batch) + call.settings.diagonal
        return replace(self, queries=queries, keys=keys, diagonal=diagonal)

    @property
    def num_groups(self) -> int:
        """Query heads that share a key/value head."""
        return (self.heads_q.stop - self.heads_q.start) // self.num_heads_kv

    @property
    def num_heads_kv(self) -> int:
        return self.heads_kv.stop - self.heads_kv.start

    @property
    def num_sequences(self) -> int:
        return self.batch.stop - self.batch.start

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
    """Cut a call along sequences and key/value heads. Packed sequences have a slab each if the host knows lengths."""
    heads_kv = num_heads_kv(call)
    group = call.tensors.q.shape[1] // heads_kv
    read_on_host = queries.on_host and call.layout != "dense"
    step = 1 if read_on_host else shape.batch
    for b in range(0, queries.batch, step):
        batch = slice(b, min(b + step, queries.batch))
        if queries.on_host:
            seqlen_q, seqlen_k = queries.length(b), keys.length(b)
            diagonal: int | Tensor = seqlen_k - seqlen_q
        else:
            seqlen_q, seqlen_k = queries.max_length, keys.max_length
            diagonal = keys.device_length(batch) - queries.device_length(batch)
        for h in range(0, heads_kv, shape.heads_kv):
            kv = slice(h, min(h + shape.heads_kv, heads_kv))
            q = slice(kv.start * group, kv.stop * group)
            yield Slab(queries, keys, batch, q, kv, seqlen_q, seqlen_k, diagonal + call.settings.diagonal)


def num_heads_kv(call: Call) -> int:
    return call.tensors.k.shape[1 if call.layout == "dense" else -2]


def fold_groups(x: Tensor, num_groups: int) -> Tensor:
    """`[B, Hq, M, D]` to `[B, Hkv, G * M, D]`: query heads of a group become rows of one matrix product."""
    return x.unflatten(1, (-1, num_groups)).flatten(2, 3) if num_groups > 1 else x


def unfold_groups(x: Tensor, num_groups: int) -> Tensor:
    """`[B, Hkv, G * M, N]` back to `[B, Hq, M, N]`."""
    return x.unflatten(2, (num_groups, -1)).flatten(1, 2) if num_groups > 1 else x
