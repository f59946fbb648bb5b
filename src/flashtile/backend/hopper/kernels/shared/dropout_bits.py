"""Bits of dropout on their way from a warpgroup that makes them to the consumers: its integers overlap what these wait for."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .column_masks import all_visible
from .mma import MMA_M
from .pipeline import make_mbarriers, stage_of, wraps_of


class DropoutBits(NamedTuple):
    """The bits of `dropout.kept_pairs`, for each stage and consumer warpgroup."""

    data: gl.shared_memory_descriptor  # [STAGES * NUM_WARPGROUPS, MMA_M, 4] int32
    full: gl.shared_memory_descriptor  # [STAGES * NUM_WARPGROUPS, 1] mbarriers
    empty: gl.shared_memory_descriptor


@gluon.jit
def make_dropout_bits(CONFIG: gl.constexpr):
    """Buffers of the bits, in a tuple; an empty one where the consumers make them."""
    if CONFIG.dropout_stages == 0:
        return ()
    else:
        SLOTS: gl.constexpr = CONFIG.dropout_stages * CONFIG.num_warpgroups
        layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        data = gl.allocate_shared_memory(gl.int32, [SLOTS, MMA_M, 4], layout)
        return (DropoutBits(data, make_mbarriers(SLOTS, 1), make_mbarriers(SLOTS, 1)),)


@gluon.jit
def write_bits(bits, kept, count, warpgroup, CONFIG: gl.constexpr):
    """Pass on the bits of step number `count` of a consumer warpgroup."""
    slot = slot_of(count, warpgroup, CONFIG)
    mbarrier.wait(bits.empty.index(slot), (wraps_of(count, CONFIG.dropout_stages) & 1) ^ 1)
    bits.data.index(slot).store(kept[0])
    mbarrier.arrive(bits.full.index(slot), count=1)


@gluon.jit
def read_bits(bits, count, warpgroup, x, CONFIG: gl.constexpr):
    """The bits of step number `count` for the scores `x` of a consumer warpgroup, as `dropout.kept_pairs`."""
    slot = slot_of(count, warpgroup, CONFIG)
    mbarrier.wait(bits.full.index(slot), wraps_of(count, CONFIG.dropout_stages) & 1)
    kept = bits.data.index(slot).load(all_visible(x).type.layout)
    mbarrier.arrive(bits.empty.index(slot), count=1)
    return (kept,)


@gluon.jit
def slot_of(count, warpgroup, CONFIG: gl.constexpr):
    return stage_of(count, CONFIG.dropout_stages) * CONFIG.num_warpgroups + warpgroup
