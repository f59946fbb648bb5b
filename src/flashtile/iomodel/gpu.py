"""What our Triton kernels move between a GPU's memory and its L2 cache: the bytes that its DRAM counters count.

`iomodel` counts what a tile reads, wherever that comes from. On a GPU the programs of one head run at about the same
time and stream the same matrices, so one of them brings a block into L2, and the others find it there. A matrix then
comes from DRAM once; it comes once for each set of programs that run together where the cache cannot hold what the
heads in flight stream. Results are written once. benchmarks/dram_counters.py compares this with the counters.
"""

import math
from typing import NamedTuple

from . import SOFTMAX_OPERATIONS, Shape, Work, backward_flops, forward_flops, lengths


class Cache(NamedTuple):
    """A GPU's L2, and how many programs run at a time: one on each multiprocessor at the least."""

    size: int  # bytes
    programs: int


H200 = Cache(50 * 2**20, 132)  # NVIDIA's data sheet


def passes(blocks: int, heads: int, streamed: int, cache: Cache) -> int:
    """How often a head's streamed matrices, `streamed` bytes, come from DRAM for the `blocks` programs of the head."""
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

    The latter two each make S again, seven products in all. lse and delta of a row lie side by side.
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
