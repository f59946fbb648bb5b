"""Rules by which the FlashAttention library picks a compiled backward kernel, and the kernels that they save.

Seven flags of a call are template arguments, compiled into the kernel: dropout, causal, local window, ALiBi, lengths
that tiles divide ("even MN"), a head dimension that fills its tile ("even K"), softcap. 2^7 = 128 kernels for each head
dimension and type would take hours to compile. Rules make flags follow from others, so that fewer are different:

    dropout and softcap     the kernel has softcap alone                       (the library refuses such calls)
    local and causal        the kernel is the causal one                       (a window with its right side at 0)
    even MN                 only with even K, without a window, without ALiBi, and for d <= 128
    even K                  only without ALiBi

A rule may switch "even" off, because a kernel with masks is right for even lengths too, only slower. It may switch
"local" off for causal calls, because a causal window comes as a local call whose right side is 0.

Deterministic backward. Each key block adds to dq, in the order of arrival. Without `deterministic` the grid
has a block for each key block. With it, each head of each sequence has just enough blocks to fill the GPU,

    workers = ceil(multiprocessors / (batch heads))

each walking over every `workers`-th key block into its own dq; another kernel adds the `workers` copies in order. So
dq takes `workers` times its memory in float32: most for few heads, and once for as many as there are multiprocessors.

(`flash_bwd_launch_template.h` of Dao-AILab/flash-attention, version 2.) step10_variants.py compiles such variants,
forward and backward, and its `backward` has workers. `python -m flashtile_ladder related.launcher` prints both counts.
"""

import itertools
import math
from typing import NamedTuple


class Flags(NamedTuple):
    """The features that a call asks for, or that a kernel is compiled for."""

    dropout: bool = False
    causal: bool = False
    local: bool = False
    alibi: bool = False
    even_mn: bool = False
    even_k: bool = False
    softcap: bool = False


def flags_of(  # as a call's arguments come in
    seqlen_q: int,
    seqlen_k: int,
    d: int,
    *,
    block_m: int,
    block_n: int,
    tile_d: int,
    packed: bool = False,
    window: tuple[int, int] = (-1, -1),
    causal: bool = False,
    dropout_p: float = 0.0,
    alibi: bool = False,
    softcap: float = 0.0,
) -> Flags:
    """The flags of a call; packed sequences are never even, since each has its own length."""
    even_mn = not packed and seqlen_q % block_m == 0 and seqlen_k % block_n == 0
    local = (window[0] >= 0 or window[1] >= 0) and not causal
    return Flags(dropout_p > 0, causal, local, alibi, even_mn, d == tile_d, softcap > 0)


def kernel_for(call: Flags, tile_d: int) -> Flags:
    """The flags that the kernel of this call is compiled for."""
    return Flags(
        dropout=call.dropout and not call.softcap,
        causal=call.causal,
        local=call.local and not call.causal,
        alibi=call.alibi,
        even_mn=call.even_mn and call.even_k and not call.local and not call.alibi and tile_d <= 128,
        even_k=call.even_k and not call.alibi,
        softcap=call.softcap,
    )


def kernels(tile_d: int) -> set[Flags]:
    """All kernels that are compiled for a head dimension."""
    calls = (Flags(*flags) for flags in itertools.product((False, True), repeat=len(Flags._fields)))
    return {kernel_for(call, tile_d) for call in calls}


def deterministic_workers(multiprocessors: int, batch: int, heads: int) -> int:
    """Blocks for each head of each sequence, and copies of dq."""
    return math.ceil(multiprocessors / (batch * heads))


def dq_bytes(multiprocessors: int, batch: int, heads: int, seqlen_q: int, d: int) -> int:
    """Bytes of all copies of dq, float32, rows rounded up to 128 and d to 32, as they are allocated."""
    rows, columns = math.ceil(seqlen_q / 128) * 128, math.ceil(d / 32) * 32
    return 4 * deterministic_workers(multiprocessors, batch, heads) * batch * heads * rows * columns


def main() -> None:
    for tile_d in (128, 256):
        print(f"d = {tile_d}: {len(kernels(tile_d))} kernels of {2 ** len(Flags._fields)}")
    for batch, heads in ((1, 1), (1, 16), (2, 16), (8, 32)):
        workers = deterministic_workers(132, batch, heads)
        size = dq_bytes(132, batch, heads, 4096, 128) / 2**20
        print(f"132 multiprocessors, batch {batch}, {heads:>2} heads: {workers:>3} workers, {size:,.0f} MiB of dq")
