"""Stores of dk and dv."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..shared.compat import reinterpret_smem
from ..shared.coordinates import dkdv_coord
from ..shared.epilogue import tma_store_columns
from .dq_writer import DQ_COLUMNS
from .late_dq import store_late
from .tile_scheduler import key_head


@gluon.jit
def store_tile(
    context, tile, dk, dv, first_key, count, warpgroup: gl.constexpr, CONFIG: gl.constexpr, PACKED: gl.constexpr
):
    """Store or add dk and dv of a tile's 64 keys, after block of rows number `count - 1`."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    outputs, splits, dropout = context.outputs, context.splits, context.dropout
    dq_pipeline = outputs.dq_pipeline
    if CONFIG.late_dq is None:  # dv and dk reuse the memory of the last dq
        mbarrier.wait(dq_pipeline.empty.index(warpgroup), (count & 1) ^ 1)
    coord = dkdv_coord(tile, key_head(tile, splits), first_key, context.params.batch, splits, PACKED)
    OF_HEADS: gl.constexpr = splits.head_splits is not None and splits.row_splits is None
    ADD: gl.constexpr = OF_HEADS or context.chunk.chunk_lo is not None or splits.wave.first_tile is not None
    if CONFIG.stores_through_ds:
        stored = store_late(outputs.dv, coord, dv, dropout.keep_scale, outputs.ds, count, warpgroup, 0, HEAD_DIM, ADD)
        store_late(outputs.dk, coord, dk, outputs.scale, outputs.ds, count, warpgroup, stored, HEAD_DIM, ADD)
    else:
        store_dkdv(outputs.dv, coord, dv, dropout.keep_scale, dq_pipeline.smem.index(warpgroup), HEAD_DIM, ADD)
        store_dkdv(outputs.dk, coord, dk, outputs.scale, dq_pipeline.smem.index(warpgroup), HEAD_DIM, ADD)


@gluon.jit
def store_dkdv(desc, coord, x, scale, smem, HEAD_DIM: gl.constexpr, ADD: gl.constexpr):
    """Store or add (ADD) dk or dv of 64 keys; in fp32 as many columns at a time as the buffer holds."""
    WIDTH: gl.constexpr = HEAD_DIM.padded_width
    COLUMNS: gl.constexpr = min(WIDTH, DQ_COLUMNS) if desc.dtype == gl.float32 else WIDTH
    # Triton 3.8 takes views of the whole buffer only.
    PARTS: gl.constexpr = 1 if desc.dtype == gl.float32 else 2 * DQ_COLUMNS // COLUMNS
    if PARTS == 1:
        buffer = reinterpret_smem(smem, desc.dtype, desc.block_type.shape[:-1] + [COLUMNS], desc.layout)
    else:
        parts = reinterpret_smem(smem, desc.dtype, [PARTS] + desc.block_type.shape[:-1] + [COLUMNS], desc.layout)
        buffer = parts.index(0)
    for c in gl.static_range(len(x)):
        columns = x[c]
        if scale is not None:
            columns = columns * scale
        tma_store_columns(desc, columns, coord, buffer, HEAD_DIM.offsets[c], ADD)
