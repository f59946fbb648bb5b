"""The loops over a slab's tiles that forward and backward share: row blocks, and the key blocks that each can see."""

from collections.abc import Iterator

from torch import Tensor

from ... import private_torch
from ...call import device
from ...call.call import Settings
from ...call.window import KeyRange, key_range
from ...expression.blocks import FULL, HIDDEN, PARTIAL
from ..blockwise.scores import Scores, Tile, tile_part
from ..blockwise.tiles import Slab, TileShape
from .blocks import mask_states


def row_blocks(slab: Slab, shape: TileShape) -> Iterator[slice]:
    for start in range(0, slab.seqlen_q, shape.block_m):
        yield slice(start, min(start + shape.block_m, slab.seqlen_q))


def tiles(slab: Slab, settings: Settings, scores: Scores, rows: slice, shape: TileShape) -> Iterator[Tile]:
    """The tiles of one row block that may have a visible pair."""
    visible = key_range_of(slab, settings, rows)
    if visible.lo == visible.hi:
        return
    first = visible.lo - visible.lo % shape.block_n
    states = mask_states(scores, shape)
    for start in range(first, visible.hi, shape.block_n):
        keys = slice(max(start, visible.lo), min(start + shape.block_n, visible.hi))
        state = PARTIAL if states is None else states[rows.start // shape.block_m][start // shape.block_n]
        full = visible.full_lo <= keys.start and keys.stop <= visible.full_hi
        tile = Tile(rows, keys, full, unmasked=state == FULL)
        if state != HIDDEN and not masked_out(scores, tile):
            yield tile


def key_range_of(slab: Slab, settings: Settings, rows: slice) -> KeyRange:
    if isinstance(slab.diagonal, Tensor):  # lengths are on the device: all key blocks, masked
        return KeyRange(0, 0, slab.seqlen_k if settings.window.unlimited else 0, slab.seqlen_k)
    first, last = rows.start + settings.i0, rows.stop - 1 + settings.i0
    return key_range(settings.window, first, last, slab.seqlen_k, slab.diagonal, settings.j0)


def masked_out(scores: Scores, tile: Tile) -> bool:
    """Whether the bool mask hides the whole tile. False where the host cannot read the mask, and under vmap, where the
    mask differs between examples.
    """
    if (
        scores.mask is None
        or not device.host_readable(scores.mask)
        or private_torch.is_functorch_wrapped_tensor(scores.mask)
    ):
        return False
    return not bool(tile_part(scores.mask, tile).any())
