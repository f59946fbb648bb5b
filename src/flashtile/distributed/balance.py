"""Balanced layouts: chunks of a sequence are assigned to ranks by their visible pairs.

Each rank has as many chunks, so that other layers share their work too (Tao and Huang, "MagiAttention", 2025,
has such a dispatcher).
"""

import heapq
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..api.settings import chunk_of, window_of
from ..api.signatures import Causal, MaskArgument, WindowArgument
from ..call.window import Window
from ..errors import ArgumentError
from .group import grid_of
from .inputs import documents_of
from .layout import Layout, Piece, joined
from .mask_work import EXAMPLE, mask_blocks
from .visible import BLOCK, Document
from .work import Visible, imbalance, work_of

CHUNKS = 1, 2, 4, 8, 16  # chunks of a rank
# Of twice as many chunks: what they have to take off the busiest rank's work over the mean. Each is a part of its own,
# and needs keys of its own in a window.
PRICE = 0.01


def balanced(
    mesh: DeviceMesh | int,
    length: int,
    *,
    causal: Causal = False,
    window: WindowArgument = None,
    attention_chunk: int | None = None,
    mask: MaskArgument = None,
    cu_seqlens: Any = None,
    batch: int = 1,
    heads: int = 1,
    chunk: int | None = None,
    contiguous: bool = False,
) -> Layout:
    """Find a layout in which all ranks have about as many visible pairs, and as many rows.

    The sequence is cut into chunks, as many for each rank, which are assigned from the one with the most visible pairs
    on, each to the rank with the fewest so far. Pairs are counted by position, in packed sequences too, and by the
    summary of blocks that kernels use for a mask. The layout is the same on all ranks for the same arguments, and is
    accepted as `layout` wherever its name is. Counting a mask waits for its device, so that a layout is best kept as
    long as its mask.

    Example:
        >>> layout = flashtile.distributed.balanced(4, 4096, causal=True)
        >>> layout.pieces(3)
        (Piece(start=1536, stop=2560),)

    Args:
        mesh: a `DeviceMesh` with one or two dimensions, or a number of ranks.
        length: rows of the whole sequence, which has as many keys; of packed sequences all tokens.
        causal, window, attention_chunk, mask: as in the calls. A mask tensor has all rows.
        cu_seqlens: offsets `[B + 1]` of packed sequences, in a list or a tensor on the CPU.
        batch: sequences for which a mask function that depends on them is counted.
        heads: query heads for which a mask function that depends on them is counted.
        chunk: rows of a chunk. By default they are as few as balance well, at most 16 for each rank: each is a part of
            its own.
        contiguous: give each rank one piece, of as many visible pairs but not of as many rows. So a window, whose first
            rows see fewer keys, is even between neighbors.

    Returns:
        A `Layout`.

    Raises:
        ArgumentError: an argument is none of those, or the mask function cannot be traced.
    """
    ranks = mesh if type(mesh) is int else grid_of(mesh).size  # type: ignore[arg-type]
    for argument, n in (("mesh", ranks), ("batch", batch), ("heads", heads), ("chunk", chunk)):
        if n is not None and (type(n) is not int or n < 1):
            raise ArgumentError(argument, n, "an int from 1" + " or None" * (argument == "chunk"), EXAMPLE)
    if type(length) is not int or length < 0:
        raise ArgumentError("length", length, "the rows of the whole sequence", EXAMPLE)
    if contiguous and chunk is not None:
        raise ArgumentError("chunk", chunk, "None with `contiguous`", EXAMPLE)
    documents = None if cu_seqlens is None else documents_of(cu_seqlens, None)
    window_of_call = window_of("attention", causal, window)._replace(chunk=chunk_of("attention", attention_chunk))
    visible = visible_pairs(length, length, window_of_call, mask, documents, batch, heads)
    work = visible.of_rows()
    return in_one_piece(work, ranks) if contiguous else divided(work, ranks, chunk)


def visible_pairs(
    num_rows: int,
    num_keys: int,
    window: Window,
    mask: Any,
    documents: tuple[Document, ...] | None,
    batch: int,
    heads: int,
) -> Visible:
    """The visible pairs of a call."""
    everything = documents is None
    if documents is None:
        documents = (Document(Piece(0, num_rows), Piece(0, num_keys)),)
    lengths = tuple(max((document[n].stop for document in documents), default=0) for n in (0, 1))
    if lengths != (num_rows, num_keys):
        accepted = f"offsets up to {num_rows}, the rows of the whole sequence"
        raise ArgumentError("cu_seqlens", f"offsets up to {lengths[0]}", accepted, EXAMPLE)
    blocks = None if mask is None else mask_blocks(mask, window, documents, not everything, batch, heads)
    return Visible(window, documents, blocks)


def in_one_piece(work: Tensor, ranks: int) -> Layout:
    """The layout of one piece a rank, of as much work. Long ones begin at multiples of `BLOCK`."""
    length, done = len(work), work.cumsum(0)
    block = BLOCK if length >= 32 * ranks * BLOCK else 1
    goals = done[-1:].sum() * torch.arange(1, ranks) / ranks
    ends = [min(round(n / block) * block, length) for n in torch.searchsorted(done, goals).tolist()]
    pieces = tuple((Piece(start, stop),) for start, stop in pairwise([0, *ends, length]))
    return Layout("balanced", length, ranks, pieces)


def divided(work: Tensor, ranks: int, chunk: int | None = None) -> Layout:
    """The layout of rows with some work: the most even one, after a price of each doubling of chunks."""
    length, found = len(work), []
    for doublings, each in enumerate(CHUNKS):
        if chunk is not None:
            chunks = [Piece(n, min(n + chunk, length)) for n in range(0, length, chunk)]
        elif each > 2 and ranks * each * BLOCK > length:
            break
        else:
            chunks = cut(length, ranks * each)
        layout = Layout("balanced", length, ranks, assigned(chunks, work_of(work, chunks), ranks))
        share = imbalance(work, layout)
        found.append((share + doublings * PRICE, layout))
        if chunk is not None or share <= 1 + PRICE:
            break
    return min(found, key=lambda x: x[0])[1]


def cut(length: int, parts: int) -> list[Piece]:
    """Pieces of about one length, that begin at multiples of `BLOCK` if their lengths then differ by 3% at most."""
    block = BLOCK if length % (parts * BLOCK) == 0 or length >= 32 * parts * BLOCK else 1
    blocks = -(-length // block)
    ends = [min(n * blocks // parts * block, length) for n in range(parts + 1)]
    return [Piece(start, stop) for start, stop in pairwise(ends)]


def assigned(chunks: list[Piece], work: list[float], ranks: int) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each rank: the chunk with the most work goes to the rank with the least that has room for it.

    Args:
        chunks: all pieces of the sequence, in their order.
        work: each chunk's.
        ranks: their numbers of chunks differ by one at most. Of several with as little work, the one takes a chunk that
            has the chunk before or after it, so that they join.
    """
    each, longer = divmod(len(chunks), ranks)  # so many ranks have one chunk more
    owned: list[set[int]] = [set() for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for n in sorted(range(len(chunks)), key=lambda n: (-work[n], n)):
        tied: list[tuple[float, int]] = []
        while heap and (not tied or heap[0][0] == tied[0][0]):
            candidate = heapq.heappop(heap)
            if len(owned[candidate[1]]) < each + (longer > 0):
                tied.append(candidate)
        chosen = min(tied, key=lambda x: (owned[x[1]].isdisjoint((n - 1, n + 1)), x))
        for candidate in tied:
            if candidate != chosen:
                heapq.heappush(heap, candidate)
        load, rank = chosen
        owned[rank].add(n)
        longer -= len(owned[rank]) > each
        heapq.heappush(heap, (load + work[n], rank))
    # Ranks that have neighboring pieces are neighbors, as a window needs it.
    return tuple(sorted(joined([chunks[n] for n in of_rank]) for of_rank in owned))
