"""Bytes that our Triton kernels move between a GPU's memory and its L2 cache, as its DRAM counters count them.

`iomodel` counts the reads of a tile, from cache or memory. On a GPU the programs of one head run at about the same time
and stream the same matrices, so one of them brings a block into L2, and the others hit it there. A matrix then comes
from DRAM once. If the cache cannot hold the matrices of the heads in flight, it comes once for each wave of programs.
Results are written once. benchmarks/dram_counters.py compares this with the counters.
"""

import math
from typing import NamedTuple

from . import SOFTMAX_OPERATIONS, Shape, Work, backward_flops, forward_flops, lengths


class Cache(NamedTuple):
    """A GPU's L2, and the number of programs that run at a time: at least one on each multiprocessor."""

    size: int  # bytes
    programs: int


H200 = Cache(50 * 2**20, 132)  # NVIDIA's data sheet


def passes(blocks: int, heads: int, streamed: int, cache: Cache) -> int:
    """Number of times that a head's streamed matrices, `streamed` bytes, come from DRAM for its `blocks` programs."""
    in_flight = min(heads, math.ceil(cache.programs / blocks))
    fits = in_flight * streamed <= cache.size
    return 1 if fits else math.ceil(blocks / cache.programs)


def kernel_forward(shape: Shape, block_m: int, cache: Cache = H200) -> Work:
    """One kernel: a program for each block of rows, K and V streamed; a group's query heads follow each other."""
    m, n, d, dv, size, stat = *lengths(shape), shape.statistic
    kv = shape.batch * shape.num_heads_kv
    group = shape.num_heads_q // shape.num_heads_kv
    streamed = n * (d + dv) * size
    times = passes(math.ceil(m / block_m) * group, kv, streamed, cache)
    read = shape.attentions * m * d * size + times * kv * streamed
    written = shape.attentions * m * (dv * size + stat)
    return Work(forward_flops(shape.pairs, d, dv), SOFTMAX_OPERATIONS * shape.pairs, read, written)


def kernel_backward(shape: Shape, block_m: int, block_n: int, cache: Cache = H200) -> Work:
    """Three kernels: delta; dk and dv with keys outside, tiles of `block_n` keys; dq with rows outside, of `block_m`.

    The latter two each recompute S, seven products in total. lse and delta of a row are adjacent in memory.
    """
    m, n, d, dv, size, stat = *lengths(shape), shape.statistic
    heads, kv = shape.attentions, shape.batch * shape.num_heads_kv
    group = shape.num_heads_q // shape.num_heads_kv
    rows, keys = m * (d + dv) * size + 2 * m * stat, n * (d + dv) * size  # of a head: q, dout, lse and delta; k, v
    read = heads * m * (2 * dv * size + stat)
    written = heads * 2 * m * stat
    read += kv * keys + heads * rows * passes(math.ceil(n / block_n), kv, group * rows, cache)
    written += kv * keys
    read += heads * rows + kv * keys * passes(math.ceil(m / block_m) * group, kv, keys, cache)
    written += heads * m * d * size
    products = backward_flops(shape.pairs, d, dv) + 2 * shape.pairs * (d + dv)
    return Work(products, 2 * SOFTMAX_OPERATIONS * shape.pairs, read, written, peak=heads * 2 * m * stat)
