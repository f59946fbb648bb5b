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

from .compat import reinterpret_smem, tma_load
from .coordinates import ragged_coord
from .pipeline import producer_acquire, stage_of
from .ptx import from_lane, lane_id

SCANNED = gl.constexpr(128)  # entries of the page table that the scheduler warp looks at together


class PageTable(NamedTuple):
    """Pages of each sequence; the fields are `None` where keys are not in pages."""

    data: gl.tensor | None  # pointer, [batch, columns]
    stride: gl.tensor | None  # elements from sequence to sequence
    num_pages: gl.tensor | None
    page_size: gl.tensor | None
    stride_k: gl.tensor | None  # rows from page to page
    stride_v: gl.tensor | None


@gluon.jit
def no_pages():
    """The table of keys that are not in pages."""
    return PageTable(None, None, None, None, None, None)


@gluon.jit
def entries(pages, b, column, exists):
    """Entries of a sequence's page table; -1 for pages that do not exist."""
    entry = gl.load(pages.data + pages.stride.to(gl.int64) * b + column, mask=exists, other=-1)
    return gl.where((entry >= 0) & (entry < pages.num_pages), entry, -1).to(gl.int32)


@gluon.jit
def part_of_lane(BLOCK_N: gl.constexpr, ROWS: gl.constexpr):
    """The part of a block that a lane has."""
    if BLOCK_N == ROWS:
        return 0
    else:
        return lane_id()


@gluon.jit
def load_pages(pages, tile, first_key, CONFIG: gl.constexpr):
    """The page of a lane's part of the block of keys that begins at `first_key`; -1 without keys. 0 without pages."""
    if CONFIG.page_rows == 0:
        return 0
    else:
        key = first_key + part_of_lane(CONFIG.block_n, CONFIG.page_rows) * CONFIG.page_rows
        return entries(pages, tile.b, key // pages.page_size, key < tile.seqlen_k)


@gluon.jit
def acquire_and_load_pages(
    pipeline, desc, stride, pages, tile, page, first_key, count, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Wait until the stage of load number `count` is empty, and start the loads of a block, whose pages are given."""
    PARTS: gl.constexpr = BLOCK_N // ROWS
    key = first_key + part_of_lane(BLOCK_N, ROWS) * ROWS
    row = key % pages.page_size
    length = gl.where(page < 0, 0, gl.minimum(tile.seqlen_k - (key - row), pages.page_size))
    coord = ragged_coord(tile.head_k, row, gl.maximum(page, 0) * stride, length)
    stage = stage_of(count, STAGES)
    producer_acquire(pipeline.empty, count, STAGES)
    BOXES: gl.constexpr = PARTS * (HEAD_DIM.width // desc.block_type.shape[-1])
    mbarrier.expect(pipeline.full.index(stage), BOXES * desc.block_type.nbytes)
    for part in range(PARTS):
        if PARTS == 1:
            load_part(pipeline, desc, coord, stage, part, STAGES, HEAD_DIM, PARTS)
        else:
            of_part = (coord[0], from_lane(coord[1], part), coord[2], from_lane(coord[3], part), 0)
            load_part(pipeline, desc, of_part, stage, part, STAGES, HEAD_DIM, PARTS)


@gluon.jit
def load_part(
    pipeline, desc, coord, stage, part, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr, PARTS: gl.constexpr
):  # fmt: skip
    """Start the loads of one part of a stage."""
    full = pipeline.full.index(stage)
    for c in gl.static_range(len(HEAD_DIM.chunks)):
        load_chunk(pipeline.data[c], full, desc, coord, HEAD_DIM.offsets[c], stage, part, STAGES, PARTS)


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
def keys_in_pages(pages, tile, first_key, CONFIG: gl.constexpr):
    """Mask bits (`column_masks`) of the keys of a block that are in pages, the same for all threads."""
    ROWS: gl.constexpr = CONFIG.page_rows
    PARTS: gl.constexpr = CONFIG.block_n // ROWS
    if PARTS == 1:
        page = entries(pages, tile.b, first_key // pages.page_size, first_key < tile.seqlen_k)
        return gl.where(page < 0, 0, -1)
    else:
        bits = first_key * 0
        for part in range(PARTS):
            key = first_key + part * ROWS
            page = entries(pages, tile.b, key // pages.page_size, key < tile.seqlen_k)
            bits = bits | gl.where(page < 0, 0, ((1 << (ROWS // 4)) - 1) << (part * (ROWS // 4)))
        return bits
