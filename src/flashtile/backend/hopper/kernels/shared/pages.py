"""Keys and values in pages: where a block's keys are, and the TMA loads of its pages.

A block is loaded in parts of CONFIG.page_rows keys, each of which lies in one page. A box of a part's rows and of the
columns of one panel of shared memory is contiguous there, so that the parts are boxes like any other. Each lane of the
producer warp has one part of the block, so that a block takes one load of the page table.

Rows of a page have coordinates as the tokens of a packed sequence that ends in this page
(`descriptors.pages_descriptor`): TMA fills rows past the last key with 0, and those of pages that do not exist.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .compat import Pointer, Scalar, reinterpret_smem, tma_load
from .coordinates import RAGGED_EXTENT, ragged_coord
from .pipeline import chunk_empty, full_of, producer_acquire, stage_of
from .ptx import from_lane, lane_id

SCANNED = gl.constexpr(128)  # entries of the page table that the scheduler warp looks at together


class PageTable(NamedTuple):
    """Pages of each sequence; the fields are `None` where keys are not in pages."""

    data: Pointer  # [batch, columns]
    stride_b: Scalar
    num_pages: Scalar
    page_size: Scalar
    rows_of_page: Scalar  # from page to page


class BlockParts(NamedTuple):
    """Coordinates of the parts of a block, one part in each lane; the others are the same for all."""

    stop: gl.tensor
    row: gl.tensor


@gluon.jit
def entries(pages, b, column, exists):
    """Entries of a sequence's page table; -1 for pages that do not exist."""
    entry = gl.load(pages.data + pages.stride_b.to(gl.int64) * b + column, mask=exists, other=-1)
    return gl.where((entry >= 0) & (entry < pages.num_pages), entry, -1).to(gl.int32)


@gluon.jit
def part_of_lane(CONFIG: gl.constexpr):
    """The part of a block that a lane has."""
    if CONFIG.page_parts == 1:
        return 0
    else:
        return lane_id()


@gluon.jit
def load_parts(pages, tile, block, CONFIG: gl.constexpr):
    """Coordinates of the parts of a block of keys: two of a lane's part. A block before the first one, after the last
    step, has none.
    """
    key = block * CONFIG.block_n + part_of_lane(CONFIG) * CONFIG.page_rows
    column, row = column_and_row(pages, key, CONFIG)
    page = entries(pages, tile.b, column, (key >= 0) & (key < tile.seqlen_k))
    length = gl.where(page < 0, 0, gl.minimum(tile.seqlen_k - (key - row), pages.page_size))
    coord = ragged_coord(tile.head_k, row, gl.maximum(page, 0) * pages.rows_of_page, length)
    return BlockParts(coord[1], coord[3])


@gluon.jit
def column_and_row(pages, key, CONFIG: gl.constexpr):
    """The column of the page table for a key, and its row in the page."""
    PAGE_SIZE: gl.constexpr = CONFIG.page_size
    if PAGE_SIZE is None:
        return 0, key
    else:
        return key // PAGE_SIZE, key % PAGE_SIZE


@gluon.jit
def acquire_and_load_pages(pipeline, desc, head, parts, count, HEAD_DIM: gl.constexpr, CONFIG: gl.constexpr):
    """Wait until the stage of load number `count` is empty, and start the loads of a block's parts."""
    STAGES: gl.constexpr = CONFIG.stages
    PARTS: gl.constexpr = CONFIG.page_parts
    LOADS: gl.constexpr = HEAD_DIM.loads
    BOXES: gl.constexpr = PARTS * (HEAD_DIM.smem_width // desc.block_type.shape[-1]) // LOADS
    CHUNKS: gl.constexpr = len(HEAD_DIM.chunks) // LOADS  # of a load
    stage = stage_of(count, STAGES)
    for n in gl.static_range(LOADS):  # chunks that are loaded apart have one stage
        producer_acquire(chunk_empty(pipeline, n), count, STAGES)
        full = full_of(pipeline, stage, n, HEAD_DIM)
        mbarrier.expect(full, BOXES * desc.block_type.nbytes)
        for part in range(PARTS):
            stop, row = parts.stop, parts.row
            if PARTS > 1:
                stop, row = from_lane(stop, part), from_lane(row, part)
            coord = (RAGGED_EXTENT, stop, head, row, 0)
            load_part(pipeline.data, full, desc, coord, stage, part, n * CHUNKS, CHUNKS, STAGES, HEAD_DIM, PARTS)


@gluon.jit
def load_part(
    data, full, desc, coord, stage, part, FIRST: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Start the loads of one part of CHUNKS chunks of a stage."""
    for c in gl.static_range(FIRST, FIRST + CHUNKS):
        load_chunk(data[c], full, desc, coord, HEAD_DIM.offsets[c], stage, part, STAGES, PARTS)


@gluon.jit
def load_chunk(
    smem, full, desc, coord, FIRST: gl.constexpr, stage, part, STAGES: gl.constexpr, PARTS: gl.constexpr
):  # fmt: skip
    """Start the loads of one part of a chunk, a panel of columns at a time."""
    PANEL: gl.constexpr = desc.block_type.shape[-1]
    PANELS: gl.constexpr = smem.shape[-1] // PANEL
    shape: gl.constexpr = [STAGES * PANELS * PARTS] + desc.block_type.shape
    boxes = reinterpret_smem(smem, desc.dtype, shape, desc.layout)
    for n in gl.static_range(PANELS):
        box = boxes.index((stage * PANELS + n) * PARTS + part)
        tma_load(desc, coord[:-1] + (FIRST + n * PANEL,), full, box)


@gluon.jit
def lacks_pages(pages, b, first_key, stop_key):
    """Whether a page of the keys `first_key..stop_key - 1` does not exist, as 0 or 1."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    first, stop = first_key // pages.page_size, gl.cdiv(stop_key, pages.page_size)
    least = gl.zeros([SCANNED], gl.int32, layout)
    for column in range(first, stop, SCANNED):
        columns = column + gl.arange(0, SCANNED, layout)
        exists = columns < stop
        least = gl.minimum(least, gl.where(exists, entries(pages, b, columns, exists), 0))
    return -gl.min(least, 0)


@gluon.jit
def keys_in_pages(pages, tile, block, CONFIG: gl.constexpr):
    """Mask bits (`column_masks`) of the keys of a block that are in pages, the same for all threads."""
    PARTS: gl.constexpr = CONFIG.page_parts
    BITS: gl.constexpr = CONFIG.page_rows // 4  # of a part
    ALL: gl.constexpr = -1 if PARTS == 1 else (1 << BITS) - 1
    bits = block * 0
    for part in range(PARTS):
        key = block * CONFIG.block_n + part * CONFIG.page_rows
        column, _ = column_and_row(pages, key, CONFIG)
        page = entries(pages, tile.b, column, key < tile.seqlen_k)
        bits = bits | gl.where(page < 0, 0, ALL << (part * BITS))
    return bits
