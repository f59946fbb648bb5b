"""A tile's k and v: in shared memory, or as left operands in registers, to which a stage of rows brings them.

A product of 64 rows with both operands in shared memory reads 128 bytes in each cycle, all that shared memory has. From
registers, k and v leave shared memory to the rows, and their memory to a further stage of rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared.mma import left_operands
from ..shared.pipeline import consumer_release, consumer_wait, stage_chunks
from ..shared.ptx import opaque


@gluon.jit
def begin_keys(
    keys, rows, empty, tile_count, count, layout: gl.constexpr, HEAD_DIM: gl.constexpr, CONFIG: gl.constexpr
):
    """Wait for k or v. Returns it, if registers hold it, and the number of the next stage of rows."""
    if CONFIG.keys_in_registers:
        consumer_wait(rows, count, CONFIG.stages)
        operands = left_operands(stage_chunks(rows, count, CONFIG.stages, HEAD_DIM), layout)
        consumer_release(empty, count, CONFIG.stages)
        return operands, count + 1
    else:
        consumer_wait(keys, tile_count, 1)
        return (), count


@gluon.jit
def left_keys(keys, loaded, HEAD_DIM: gl.constexpr, CONFIG: gl.constexpr):
    """k or v as left operands of a product."""
    if CONFIG.keys_in_registers:
        return loaded
    else:
        return stage_chunks(keys, opaque(0), 1, HEAD_DIM)


@gluon.jit
def end_keys(keys, tile_count, CONFIG: gl.constexpr):
    """Release k or v."""
    if not CONFIG.keys_in_registers:
        consumer_release(keys.empty, tile_count, 1)
