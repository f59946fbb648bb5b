"""Shared memory of a tile, as a formula: with K and V in one buffer, in two, and in stages; and what d costs.

A kernel for tensor cores keeps tiles of 16-bit numbers in shared memory, [Br, d] of Q and [Bc, d] of K and V. Rows are
padded by 16 bytes against bank conflicts. K is not needed any more when V is, so they can share a buffer; and while one
tile is multiplied, the next `stages - 1` can be on their way:

    bytes = 2 (d + 8) (Br + buffers stages Bc)          buffers: 1 if K and V share, else 2

A block may have 48 KB of shared memory as arrays of a known size. More is one array without a size,
`extern __shared__`; the launch says how many bytes it has, after the kernel has been allowed that many
(`cuFuncSetAttribute`, in CUDA's runtime `cudaFuncSetAttribute`). A multiprocessor has 164 KB on an A100 and 228 KB on
an H100, of which a block may have all but 1 KB, and of which each block takes 1 KB more than it asked for. What a block
has decides how many run at a time, and these hide each other's waiting.

Step 9's tensor-core kernel takes exactly these bytes, with K and V in one buffer or two stages, for any
tile: cuda_launch.py asks, and compares with the most that the GPU allows a block. `MEASURED` are tiles for it.

A larger d makes every row larger, so tiles become smaller or blocks fewer: at a given size of shared memory
Br + Bc is proportional to 1 / d. The bytes of a pass, N² d / Br of K and V, grow as d² then.

`PUBLISHED_KB` are sizes that an account of such a kernel prints. Two differ from the formula: 64 x 64 at d = 128 takes
34 KB and not 36, and 82 KB are given for 16 keys, which take 74.25. (32 keys take 82.5, and 49.5 became 50.) The same
account once writes 8M where it means 8 KB.

`python -m flashtile_ladder related.shared_memory` prints the table; `flashtile-ladder --table shared` has times.
"""

import math
from typing import Any, NamedTuple

KB = 1024
STATIC_LIMIT = 48 * KB  # without asking
MULTIPROCESSOR = {"A100": 164 * KB, "H100 and H200": 228 * KB}
RESERVED = 1 * KB  # of each block, for the system
PADDING = 8  # numbers for each row: 16 bytes


class Tile(NamedTuple):
    """Rows, keys and the head dimension."""

    rows: int
    keys: int
    d: int
    stages: int = 1
    shared: bool = True  # K and V take turns in one buffer

    @property
    def bytes(self) -> int:
        buffers = 1 if self.shared else 2
        return 2 * (self.d + PADDING) * (self.rows + buffers * self.stages * self.keys)

    @property
    def has_to_ask(self) -> bool:
        """Whether the launch needs the attribute for more than 48 KB."""
        return self.bytes > STATIC_LIMIT

    def blocks(self, multiprocessor: int) -> int:
        """Number that run on a multiprocessor at a time, as far as shared memory decides."""
        return multiprocessor // (self.bytes + RESERVED)

    @property
    def keywords(self) -> dict[str, Any]:
        """Those of step 9's `tensor_cores_of`."""
        return {"block_m": self.rows, "block_n": self.keys, "stages": self.stages}


def largest_keys(memory: int, rows: int, d: int, multiple: int = 16) -> int:
    """The most keys of a tile, K and V in one buffer, in `memory` bytes; 0 if none fit."""
    keys = (memory // (2 * (d + PADDING)) - rows) // multiple * multiple
    return max(keys, 0)


def streamed_bytes(n: int, rows: int, d: int) -> int:
    """16-bit K and V that a head's pass reads from the big memory, once for each block of rows."""
    return math.ceil(n / rows) * 2 * n * d * 2


TILES = (
    Tile(64, 64, 64), Tile(128, 128, 64), Tile(64, 64, 128), Tile(64, 64, 64, stages=2), Tile(64, 64, 64, shared=False),
    Tile(64, 64, 256), Tile(64, 32, 256), Tile(128, 16, 256), Tile(128, 32, 256),
)  # fmt: skip
PUBLISHED_KB = {TILES[0]: 18, TILES[1]: 36, TILES[2]: 36, TILES[5]: 66, TILES[6]: 50, TILES[7]: 82}
MEASURED = (  # by the table `shared`; the fourth number is that of stages
    Tile(64, 64, 64), Tile(64, 64, 64, 2), Tile(128, 64, 64, 2), Tile(64, 64, 128), Tile(64, 64, 128, 2),
    Tile(128, 64, 128, 2), Tile(64, 64, 256), Tile(64, 32, 256), Tile(128, 32, 256), Tile(64, 32, 256, 2),
    Tile(128, 32, 256, 2),
)  # fmt: skip


def main() -> None:
    for tile in TILES:
        blocks = ", ".join(f"{tile.blocks(size)} on an {name}" for name, size in MULTIPROCESSOR.items())
        print(
            f"{tile.rows:>3} x {tile.keys}, d = {tile.d:>3}, stages {tile.stages}, "
            f"{'K and V share' if tile.shared else 'K and V apart'}: {tile.bytes / KB:5.1f} KB, "
            f"{'asks' if tile.has_to_ask else 'need not ask'}; blocks: {blocks}"
            + (f"; published {PUBLISHED_KB[tile]} KB" if tile in PUBLISHED_KB else "")
        )
    for d in (64, 128, 256):
        rows = max(r for r in range(16, 1024, 16) if largest_keys(STATIC_LIMIT, r, d) >= r)
        mib = streamed_bytes(4096, rows, d) / 2**20
        print(f"d = {d:>3}: 48 KB hold square tiles of {rows:>3}, K and V are {mib:.0f} MiB for N = 4096")
