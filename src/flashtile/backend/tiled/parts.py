"""Row blocks of a call as calls of their own, so that derivatives of a block have the block's size.

`transforms` differentiates one block of rows at a time. If a block read the tensors of the whole call, its gradients
would have their size, and be zeros almost everywhere. A part has the sequences and heads of a slab, and of its rows one
block. Rows that are gathered by indices on the device stay in the whole call's tensors.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from ...call.call import DESCRIBED, Call, Tensors
from ..blockwise.tiles import Side, Slab, TileShape, num_heads_kv, slabs
from . import support
from .loop import row_blocks

Ranges = list[slice]
LONGER = 4  # times the rows and keys of a tile: with few heads, longer tiles cost little memory


class RowBlock(NamedTuple):
    """A block of rows: the call and the slab that it is computed in, and its rows there."""

    call: Call
    slab: Slab
    rows: slice


def shape_of_row_blocks(shape: TileShape, call: Call, queries: Side, keys: Side) -> TileShape:
    """The size of row blocks: a budget for the scores `[B, H, M, Sk]`; second derivatives hold about a dozen of them
    tensors. Blocks with as many rows as that allows come first, then as many heads and sequences.
    """
    budget = support.row_block_scores(call.tensors.q.device.type)
    group = call.tensors.q.shape[1] // max(num_heads_kv(call), 1)
    window, most_rows = call.settings.window, LONGER * shape.block_m
    if not window.unlimited:  # long blocks have more hidden pairs
        most_rows = max(shape.block_m, min(most_rows, queries.max_length // LONGER))
    visible = keys.max_length
    if window.left is not None and window.right is not None:
        visible = min(visible, max(window.left + window.right, 0) + most_rows)
    visible = max(visible, 1)
    block_m = max(min(most_rows, queries.max_length, budget // (visible * group)), 1)
    pairs = max(budget // (block_m * visible * group), 1)  # key/value heads times sequences
    heads_kv = even_part(num_heads_kv(call), pairs)
    batch = even_part(queries.batch, pairs // heads_kv)
    return TileShape(block_m, LONGER * shape.block_n, heads_kv, batch)


def even_part(total: int, most: int) -> int:
    """The size of equal parts of at most `most`."""
    return max(-(-total // max(-(-total // max(most, 1)), 1)), 1)


def row_blocks_of_slabs(
    call: Call, queries: Side, keys: Side, shape: TileShape
) -> Iterator[tuple[Slab, Iterator[RowBlock]]]:
    """The slabs of a call that have rows, each with its row blocks."""
    of_call = [slab for slab in slabs(call, queries, keys, shape) if slab.seqlen_q > 0]
    if not queries.on_host or keys.paged:
        for slab in of_call:
            yield slab, (RowBlock(call, slab, rows) for rows in row_blocks(slab, shape))
        return
    for slab, part in zip(of_call, slab_calls(call, of_call), strict=True):
        yield slab, row_blocks_of_part(part, slab, shape)


def slab_calls(call: Call, of_call: list[Slab]) -> Iterator[Call]:
    """Each slab as a dense call."""
    for_sequences: dict[int, list[Slab]] = {}
    for slab in of_call:
        for_sequences.setdefault(slab.batch.start, []).append(slab)
    first = [its_slabs[0] for its_slabs in for_sequences.values()]
    for its_slabs, tensors in zip(for_sequences.values(), sequences(call, first), strict=True):
        q, kv = [slab.heads_q for slab in its_slabs], [slab.heads_kv for slab in its_slabs]
        per_head = {name: (0 if x.dim() == 1 else 1, q) for name, x in features(tensors).items()}
        parts = divide(tensors, {"q": (1, q), "k": (1, kv), "v": (1, kv)} | per_head)
        for slab, part in zip(its_slabs, parts, strict=True):
            s = call.settings
            first_b, first_h = s.b0 + slab.batch.start, s.h0 + slab.heads_q.start
            yield Call(part, s._replace(b0=first_b, h0=first_h, num_heads=call.num_heads))


def sequences(call: Call, of_batches: list[Slab]) -> list[Tensors]:
    """The tensors of groups of sequences, dense; of a packed call, each sequence is a group."""
    tensors, batches = call.tensors, [slab.batch for slab in of_batches]
    per_batch = {name: (0, batches) for name, x in features(tensors).items() if x.dim() > 1}
    if call.layout == "dense":
        return divide(tensors, dict.fromkeys(("q", "k", "v"), (0, batches)) | per_batch)
    q, k = [tokens(slab.queries, slab) for slab in of_batches], [tokens(slab.keys, slab) for slab in of_batches]
    dense = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"))
    return [
        x._replace(**{name: getattr(x, name).transpose(0, 1)[None] for name in ("q", "k", "v")}, **dense)
        for x in divide(tensors, {"q": (0, q), "k": (0, k), "v": (0, k)} | per_batch)
    ]


def tokens(side: Side, slab: Slab) -> slice:
    """The tokens of a packed sequence whose lengths the host knows."""
    first = side.first(slab.batch.start)
    return slice(first, first + side.length(slab.batch.start))


def row_blocks_of_part(call: Call, slab: Slab, shape: TileShape) -> Iterator[RowBlock]:
    """The row blocks of a slab, which is the dense call. All blocks have all keys: each adds to the gradients of k and
    v as soon as it is done, where slices of k would wait for all blocks.
    """
    blocks, s = list(row_blocks(slab, shape)), call.settings
    pairs = [name for name, x in features(call.tensors).items() if x.dim() == 4]
    for rows, part in zip(blocks, divide(call.tensors, dict.fromkeys(("q", *pairs), (2, blocks))), strict=True):
        assert isinstance(slab.diagonal, int)
        num_rows = rows.stop - rows.start
        diagonal = slab.diagonal - (slab.seqlen_k - num_rows)
        block = Call(part, s._replace(i0=s.i0 + rows.start, diagonal=diagonal))
        whole = TileShape(num_rows, 1, slab.num_heads_kv, slab.num_sequences)
        inner = next(slabs(block, Side(block, keys=False), Side(block, keys=True), whole))
        yield RowBlock(block, inner, slice(0, num_rows))


def features(tensors: Tensors) -> dict[str, Tensor]:
    """The tensors that describe sequences, heads or pairs: `[H]`, `[B, H]` or `[B|1, H|1, Sq|1, Sk|1]`."""
    return {name: x for name in DESCRIBED if (x := getattr(tensors, name)) is not None}


def divide(tensors: Tensors, ranges: dict[str, tuple[int, Ranges]]) -> list[Tensors]:
    """The tensors of each part. Those named are cut along a dimension, except for features that it broadcasts."""
    parts = {}
    for name, (dim, of_dim) in ranges.items():
        x = getattr(tensors, name)
        parts[name] = [x] * len(of_dim) if name in DESCRIBED and x.shape[dim] == 1 else cut(x, dim, of_dim)
    return [tensors._replace(**dict(zip(parts, part, strict=True))) for part in zip(*parts.values(), strict=True)]


def cut(x: Tensor, dim: int, ranges: Ranges) -> list[Tensor]:
    """Slices along a dimension. Ascending ranges are one `split`, whose gradient is one concatenation: the gradient of
    each slice would have the size of x.
    """
    size = x.shape[dim]
    if all(part == slice(0, size) for part in ranges):
        return [x] * len(ranges)
    bounds = [0, *(bound for part in ranges for bound in (part.start, part.stop)), size]
    sizes = [end - start for start, end in pairwise(bounds)]
    if min(sizes) < 0:
        return [x.narrow(dim, part.start, part.stop - part.start) for part in ranges]
    return list(x.split(sizes, dim)[1::2])
