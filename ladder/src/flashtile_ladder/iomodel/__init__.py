"""Cost model of attention: operations, bytes between the big and the small memory, peak memory, roofline.

The big memory is a GPU's HBM or a CPU's DRAM; the small one is shared memory and registers, or a cache. Algorithms
are counted as the papers write them: a tile in the small memory is free, a slice of a matrix in the big memory is not.
Sizes are in bytes, lengths in elements.

Sources: Dao et al., "FlashAttention", 2022 (algorithm 0; section 3.1, algorithm 1; section 3.2, theorem 2; appendix B,
algorithms 3 and 4, theorem 5); Dao, "FlashAttention-2", 2023 (section 3.1, algorithms 1 and 2); Williams et al.,
"Roofline", 2009.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# On-chip memory of one streaming multiprocessor, L1 and shared memory together (NVIDIA, tuning guides for Ampere and
# Hopper, "unified shared memory/L1/texture cache").
ON_CHIP_BYTES = {"A100": 192 * 1024, "H100": 228 * 1024, "H200": 228 * 1024}
SOFTMAX_OPERATIONS = 5  # for each score: compare with the maximum, subtract it, exp, add up, divide


class Shape(NamedTuple):
    """One call: batch and heads of independent attentions, each `seqlen_q` rows over `seqlen_k` keys."""

    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    batch: int = 1
    num_heads_q: int = 1
    num_heads_kv: int = 1
    causal: bool = False  # bottom-right: row i sees the keys j <= i + seqlen_k - seqlen_q
    itemsize: int = 4  # bytes of an element of q, k, v, out

    @classmethod
    def square(cls, n: int, d: int, *, causal: bool = False, itemsize: int = 4) -> "Shape":
        """One head, N rows and N keys, as in the papers and in the ladder."""
        return cls(n, n, d, d, causal=causal, itemsize=itemsize)

    @property
    def attentions(self) -> int:
        return self.batch * self.num_heads_q

    @property
    def statistic(self) -> int:
        """Bytes of one element of lse, l, m or delta: float32, or float64 for float64."""
        return max(self.itemsize, 4)

    @property
    def pairs(self) -> int:
        """Visible pairs of a row and a key, over batch and heads."""
        if not self.causal:
            return self.attentions * self.seqlen_q * self.seqlen_k
        return self.attentions * sum(self.keys_seen(i) for i in range(self.seqlen_q))

    def keys_seen(self, row: int) -> int:
        last = row + self.seqlen_k - self.seqlen_q + 1 if self.causal else self.seqlen_k
        return min(max(last, 0), self.seqlen_k)


class Work(NamedTuple):
    """Cost of one pass."""

    flops: int  # of matrix products over visible pairs; a multiplication and an addition are two
    softmax: int  # other operations
    read: int  # bytes from the big memory
    written: int  # bytes to it
    peak: int = 0  # bytes of the big memory in use beyond inputs and results

    @property
    def moved(self) -> int:
        return self.read + self.written

    @property
    def intensity(self) -> float:
        """Operations for each byte that moves."""
        return (self.flops + self.softmax) / max(self.moved, 1)


# Lower bounds of every algorithm --------------------------------------------------------------------------------------


def forward_flops(pairs: int, head_dim: int, head_dim_v: int) -> int:
    """Two products: q k and p v."""
    return 2 * pairs * (head_dim + head_dim_v)


def backward_flops(pairs: int, head_dim: int, head_dim_v: int) -> int:
    """Five products, with S recomputed: q k, ds k and ds q with head_dim; dout v and p dout with head_dim_v."""
    return 2 * pairs * (3 * head_dim + 2 * head_dim_v)


def result_bytes(rows: int, head_dim_v: int, itemsize: int) -> int:
    """out `[rows, head_dim_v]` and lse `[rows]`."""
    return rows * (head_dim_v * itemsize + max(itemsize, 4))


def least_bytes(inputs: int, rows: int, head_dim_v: int, itemsize: int) -> int:
    """Bytes of a forward that reads each input once (`inputs` bytes in total) and writes each result once."""
    return inputs + result_bytes(rows, head_dim_v, itemsize)


class Machine(NamedTuple):
    """Measured rates; above the intensity `ridge`, arithmetic is the limit, below it memory."""

    flops_per_second: float
    bytes_per_second: float

    @property
    def ridge(self) -> float:
        return self.flops_per_second / self.bytes_per_second


class Roofline(NamedTuple):
    limit: str  # "compute" or "memory"
    seconds: float  # no run takes less


def roofline(flops: float, moved: float, machine: Machine) -> Roofline:
    """The larger of the times that operations and bytes take alone (Williams et al., 2009)."""
    compute, memory = flops / machine.flops_per_second, moved / machine.bytes_per_second
    return Roofline("compute" if compute > memory else "memory", max(compute, memory))


# Block sizes ----------------------------------------------------------------------------------------------------------


def block_sizes(memory: int, head_dim: int, itemsize: int = 4) -> tuple[int, int]:
    """FlashAttention-1's tile of Br rows and Bc keys for `memory` bytes on chip: with M elements, Bc = ceil(M / 4d) and
    Br = min(Bc, d), so that blocks of q, k, v and out fit together (algorithm 1, line 1).
    """
    keys = math.ceil(memory / itemsize / (4 * head_dim))
    return min(keys, head_dim), keys


def cpu_l2_bytes() -> int | None:
    """Bytes of one core's L2 cache; `None` if the system does not report it."""
    try:
        size = os.sysconf("SC_LEVEL2_CACHE_SIZE")
    except (AttributeError, ValueError, OSError):
        size = 0
    if size > 0:
        return size
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(text.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return None


def blocks(length: int, block: int) -> Iterator[range]:
    return (range(i, min(i + block, length)) for i in range(0, length, block))


def rows_per_key_block(shape: Shape, block_m: int, block_n: int) -> int:
    """Rows of all tiles that key blocks outside visit, for one head: seqlen_q times the key blocks, if not causal."""
    return sum(
        len(rows)
        for keys in blocks(shape.seqlen_k, block_n)
        for rows in blocks(shape.seqlen_q, block_m)
        if shape.keys_seen(rows[-1]) > keys[0]
    )


def keys_per_row_block(shape: Shape, block_m: int, block_n: int) -> int:
    """Keys of all tiles that row blocks outside visit, for one head: seqlen_k times the row blocks, if not causal."""
    last_seen = (shape.keys_seen(rows[-1]) for rows in blocks(shape.seqlen_q, block_m))
    return sum(min(math.ceil(seen / block_n) * block_n, shape.seqlen_k) for seen in last_seen)


# Algorithms -----------------------------------------------------------------------------------------------------------


def forward_work(shape: Shape, read: int, written: int, peak: int = 0, pairs: int | None = None) -> Work:
    """Forward from one head's bytes; `pairs` if more than the visible ones are computed."""
    pairs = shape.pairs if pairs is None else pairs
    flops, n = forward_flops(pairs, shape.head_dim, shape.head_dim_v), shape.attentions
    return Work(flops, SOFTMAX_OPERATIONS * pairs, n * read, n * written, peak)


def backward_work(shape: Shape, read: int, written: int, peak: int = 0) -> Work:
    """Backward with S recomputed, from one head's bytes; three operations for each pair: exp, subtraction, product."""
    flops, n = backward_flops(shape.pairs, shape.head_dim, shape.head_dim_v), shape.attentions
    return Work(flops, 3 * shape.pairs, n * read, n * written, peak)


def standard_forward(shape: Shape) -> Work:
    """Three kernels: reads Q, K, S, P, V, writes S, P, O (FlashAttention, algorithm 0), and lse.

    All pairs are computed, causal or not; S and P are the peak.
    """
    m, n, d, dv, size = shape.seqlen_q, shape.seqlen_k, shape.head_dim, shape.head_dim_v, shape.itemsize
    read = (m * d + n * d + 2 * m * n + n * dv) * size
    written = (2 * m * n + m * dv) * size + m * shape.statistic
    peak = 2 * m * n * size * shape.attentions
    return forward_work(shape, read, written, peak, pairs=shape.attentions * m * n)


def standard_backward(shape: Shape) -> Work:
    """Five kernels with P saved: dV = Pᵀ dO, dP = dO Vᵀ, dS, dQ = dS K, dK = dSᵀ Q (FlashAttention, algorithm 3).

    Four products, since S is not recomputed. The peak is dP and dS; P comes from forward.
    """
    m, n, d, dv, size = shape.seqlen_q, shape.seqlen_k, shape.head_dim, shape.head_dim_v, shape.itemsize
    read = (5 * m * n + 2 * m * dv + n * dv + n * d + m * d) * size  # P P dP dS dS, dO dO, V, K, Q
    written = (2 * m * n + n * dv + m * d + n * d) * size
    count = shape.attentions
    flops = 2 * count * m * n * (2 * d + 2 * dv)
    return Work(flops, 4 * count * m * n, count * read, count * written, 2 * m * n * size * count)


def flash1_forward(shape: Shape, memory: int) -> Work:
    """K/V outside (FlashAttention, algorithm 1), for `memory` bytes on chip: O(N² d² / M) elements move (theorem 2).

    K and V are read once; Q, O, l, m are read and O, l, m written once for each key block. O, l, m are initialized
    first, and lse is computed from l and m at the end.
    """
    m, n, d, dv, size, stat = *lengths(shape), shape.statistic
    rows = rows_per_key_block(shape, *block_sizes(memory, d, size))
    read = n * (d + dv) * size + rows * ((d + dv) * size + 2 * stat) + 2 * m * stat
    written = (m + rows) * (dv * size + 2 * stat) + m * stat
    return forward_work(shape, read, written, peak=2 * m * stat * shape.attentions)


def flash1_backward(shape: Shape, memory: int) -> Work:
    """K/V outside (FlashAttention, algorithm 4; lse in place of l and m): the same order as forward (theorem 5)."""
    m, n, d, dv, size, stat = *lengths(shape), shape.statistic
    rows = rows_per_key_block(shape, *block_sizes(memory, d, size))
    read = n * (d + dv) * size + rows * ((2 * d + 2 * dv) * size + stat)  # K V; Q dQ O dO, lse
    written = n * (d + dv) * size + (m + rows) * d * size  # dK dV; dQ
    return backward_work(shape, read, written)


def flash2_forward(shape: Shape, block_m: int, block_n: int) -> Work:
    """Rows outside (FlashAttention-2, algorithm 1): Q read and O, lse written once, K and V read for each row block."""
    m, _, d, dv, size, stat = *lengths(shape), shape.statistic
    keys = keys_per_row_block(shape, block_m, block_n)
    return forward_work(shape, m * d * size + keys * (d + dv) * size, m * (dv * size + stat))


def flash2_backward(shape: Shape, block_m: int, block_n: int) -> Work:
    """K/V outside (FlashAttention-2, algorithm 2), delta by an earlier kernel; dQ accumulates in the big memory."""
    m, n, d, dv, size, stat = *lengths(shape), shape.statistic
    rows = rows_per_key_block(shape, block_m, block_n)
    read = 2 * m * dv * size + n * (d + dv) * size + rows * ((2 * d + dv) * size + 2 * stat)  # O dO; K V; Q dQ dO
    written = m * stat + n * (d + dv) * size + (m + rows) * d * size  # delta; dK dV; dQ
    return backward_work(shape, read, written, peak=m * stat * shape.attentions)


def lengths(shape: Shape) -> tuple[int, int, int, int, int]:
    return shape.seqlen_q, shape.seqlen_k, shape.head_dim, shape.head_dim_v, shape.itemsize


def decode(shape: Shape, num_splits: int = 1) -> Work:
    """Few rows over a long cache: K and V are read once for each key/value head, by all query heads that share it.

    With `num_splits` parts of the keys in parallel, each part reads q and writes an unrounded out and an lse, which a
    last kernel reads and merges (Dao et al., "Flash-Decoding", 2023).
    """
    m, n, d, dv, size, stat = *lengths(shape), shape.statistic
    heads = shape.attentions
    parts = heads * num_splits * m * (dv + 1) * stat if num_splits > 1 else 0
    read = shape.batch * shape.num_heads_kv * n * (d + dv) * size + heads * num_splits * m * d * size + parts
    written = parts + heads * m * (dv * size + stat)
    flops = forward_flops(shape.pairs, d, dv)
    return Work(flops, SOFTMAX_OPERATIONS * shape.pairs, read, written, peak=parts)


# Loops made of torch operations -------------------------------------------------------------------------------------
#
# There a tile is in the big memory too: the peak is the largest set of blocks alive at a time.


class Alive(NamedTuple):
    """The largest number of blocks alive at a time in a loop: tiles of scores, blocks of rows, blocks of keys."""

    tiles: int
    row_blocks: int
    key_blocks: int


# Counted in the code. For example FlashAttention-2 forward at p = exp(s - m): the last tile's p, s, s - m and the new
# p; q_i and acc.
FLASH1_FORWARD, FLASH1_BACKWARD = Alive(4, 1, 0), Alive(7, 0, 2)  # ladder, step 5
FLASH2_FORWARD, FLASH2_BACKWARD = Alive(4, 2, 0), Alive(6, 1, 2)  # ladder, step 6
TILED_FORWARD, TILED_BACKWARD = Alive(3, 3, 0), Alive(6, 3, 0)  # backend `tiled`


def blocks_peak(alive: Alive, shape: Shape, block_m: int, block_n: int, heads_kv: int = 1, batch: int = 1) -> int:
    """Bytes of the blocks alive, for `heads_kv` key heads and `batch` sequences computed together."""
    block_m, block_n = min(block_m, shape.seqlen_q), min(block_n, shape.seqlen_k)
    width = max(shape.head_dim, shape.head_dim_v)
    kv = heads_kv * batch
    rows = kv * (shape.num_heads_q // shape.num_heads_kv) * block_m  # query heads of a group are rows of one product
    numbers = alive.tiles * rows * block_n + alive.row_blocks * rows * width + alive.key_blocks * kv * block_n * width
    hidden = block_m * block_n if shape.causal else 0  # a bool for each pair of the tile, the same for all heads
    return numbers * shape.statistic + hidden


def tiled_forward(shape: Shape, block_m: int, block_n: int, heads_kv: int = 1, batch: int = 1) -> Work:
    """The `tiled` backend with its tile (`tiled_forward(shape, *plan.tile)`), if intermediate tiles stay in a cache.

    As FlashAttention-2, with a group's query heads sharing each read of K and V, and results filled before they are
    stored. Low-precision K and V are widened block by block.
    """
    m, _, d, dv, size, stat = *lengths(shape), shape.statistic
    kv = shape.batch * shape.num_heads_kv
    keys = keys_per_row_block(shape, block_m, block_n)
    read = shape.attentions * m * d * size + kv * keys * (d + dv) * size
    written = 2 * shape.attentions * m * (dv * size + stat)
    alive = TILED_FORWARD if size == stat else TILED_FORWARD._replace(key_blocks=2)
    flops = forward_flops(shape.pairs, d, dv)
    peak = blocks_peak(alive, shape, block_m, block_n, heads_kv, batch)
    return Work(flops, SOFTMAX_OPERATIONS * shape.pairs, read, written, peak)


def tiled_backward(shape: Shape, block_m: int, block_n: int, heads_kv: int = 1, batch: int = 1) -> Work:
    """The `tiled` backend: rows outside, so dq is stored once and dk, dv accumulate in the big memory.

    Gradients are added up in the dtype of the statistics and cast at the end.
    """
    m, n, d, dv, size, stat = *lengths(shape), shape.statistic
    heads, kv = shape.attentions, shape.batch * shape.num_heads_kv
    keys = keys_per_row_block(shape, block_m, block_n)
    gradients = heads * m * d + kv * n * (d + dv)  # elements
    read = heads * m * ((d + 2 * dv) * size + stat) + kv * keys * (d + dv) * (size + stat)
    written = (heads * m * d + kv * keys * (d + dv) + gradients) * stat
    low = size != stat
    if low:
        read, written = read + gradients * stat, written + gradients * size
    alive = TILED_BACKWARD._replace(key_blocks=2) if low else TILED_BACKWARD
    peak = blocks_peak(alive, shape, block_m, block_n, heads_kv, batch) + gradients * (stat - size)
    flops = backward_flops(shape.pairs, d, dv)
    return Work(flops, 3 * shape.pairs, read, written, peak)
