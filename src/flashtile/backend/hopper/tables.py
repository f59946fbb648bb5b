"""Tiles of the Hopper kernels: at head dimensions 64 and 128 as measured on an H200, at others as counted
(docs/design/hopper-forward.md).
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ...call.device import Device
from ...call.problem import Problem
from ..gpu.installed import triton_version

ROWS = 64  # of one warpgroup
COLUMNS = 64  # of dq at most, that one warpgroup computes
HALVES = 2  # of a block of 128 keys in backward, and shares of its dq: one for each computing warpgroup
ALIGN = 8  # elements, of which strides of rows are multiples
END = 2**30  # of the dimension in which packed rows are described to the copy engine
MANY_KEYS = 1024  # of a row, from which on wide tiles pay
LONG = 8192  # keys, from which on sums of dq in one order are faster than in any


class Compiled:
    """What is compiled into a kernel."""

    @property
    def cache_key(self) -> str:
        """By which Triton tells kernels apart on disk; without it by `str`, which is for people."""
        return repr(self)


@dataclass(frozen=True)
class HeadDim(Compiled):
    """A head dimension, split into `chunks`, powers of two as products take them.

    The copy engine fills them with boxes as wide as the narrowest chunk, so that one kind of box serves all.
    """

    chunks: tuple[int, ...]

    @property
    def width(self) -> int:
        return sum(self.chunks)

    @property
    def room(self) -> int:
        """Columns of memory that holds all chunks side by side, a power of two."""
        return 1 << (self.width - 1).bit_length()

    @property
    def box(self) -> int:
        return min(self.chunks)

    @property
    def boxes(self) -> int:
        return self.width // self.box

    @property
    def starts(self) -> tuple[int, ...]:
        """The first column of each chunk."""
        return tuple(sum(self.chunks[:c]) for c in range(len(self.chunks)))


@dataclass(frozen=True)
class Launch(Compiled):
    """One kernel's tile: `64 * consumers` query rows, `block_n` keys of `stages` blocks at a time, and how many
    registers a thread of each role has.
    """

    head_dim: HeadDim  # of q and k
    head_dim_v: HeadDim  # of v and the results
    staged: int  # columns of results that leave at once, a power of two
    block_n: int
    consumers: int
    stages: int
    consumer_registers: int = 240
    copy_registers: int = 24
    tiles_of_q: int = 2  # in shared memory, for each consumer; one is copied anew during its tile's last step
    guessed: int = 16  # of a thread's exponentials in a step: computed before the maximum is known

    @property
    def block_m(self) -> int:
        return ROWS * self.consumers

    def __str__(self) -> str:
        return f"{self.block_m} x {self.block_n} ({self.consumers} warpgroups, {self.stages} stages)"


@dataclass(frozen=True)
class Share(Compiled):
    """What one warpgroup computes of a block's dq: 64 rows of some columns."""

    row: int  # the first one, in the block
    column: int  # the first one
    width: int
    chunk: int  # in which these columns are


@dataclass(frozen=True)
class BackwardLaunch(Compiled):
    """The backward kernel's tile: 128 keys, `block_m` query rows at a time in `stages`; and the order of its work
    (`backward_schedule`).
    """

    head_dim: HeadDim  # of q, k and v
    block_m: int
    stages: int
    consumer_registers: int
    copy_registers: int
    half_early: bool  # half of a block's exponentials are computed a product earlier
    downwards: bool = False
    ordered: bool = False  # sums of dq have one order (`backward_sums`)
    block_n: int = 2 * ROWS
    kind: Literal["fused"] = "fused"

    @property
    def shares(self) -> tuple[Share, Share]:
        width, chunks = self.head_dim.width, self.head_dim.chunks
        if self.block_m > ROWS:
            return Share(0, 0, width, 0), Share(ROWS, 0, width, 0)
        return Share(0, 0, COLUMNS, 0), Share(0, COLUMNS, width - COLUMNS, len(chunks) - 1)

    @property
    def head_dim_v(self) -> HeadDim:
        return self.head_dim

    def __str__(self) -> str:
        return f"{self.block_n} keys x {self.block_m} rows (2 warpgroups, {self.stages} stages)"


@dataclass(frozen=True)
class RowsLaunch(Compiled):
    """The tile of the kernel that computes dq of wide heads: as forward's, with keys and values in turn in `slots`."""

    head_dim: HeadDim
    head_dim_v: HeadDim
    slots: int
    block_n: int = ROWS
    consumers: int = 2
    consumer_registers: int = 240
    copy_registers: int = 24

    @property
    def block_m(self) -> int:
        return ROWS * self.consumers


@dataclass(frozen=True)
class KeysLaunch(Compiled):
    """The tile of the kernel that computes dk and dv of wide heads: 64 keys, 64 query rows at a time in `stages`."""

    head_dim: HeadDim
    head_dim_v: HeadDim
    stages: int
    block_m: int = ROWS
    block_n: int = ROWS
    downwards: bool = True  # nobody waits for others: the longest work comes first
    consumer_registers: int = 240
    copy_registers: int = 24


@dataclass(frozen=True)
class WideBackward(Compiled):
    """Two kernels: over 128 features sums of dq in memory cost more than scores computed twice."""

    rows: RowsLaunch
    keys: KeysLaunch
    kind: Literal["wide"] = "wide"

    def __str__(self) -> str:
        rows, keys = self.rows, self.keys
        return f"dq {rows.block_m} rows x {rows.block_n} keys, dk and dv {keys.block_n} keys x {keys.block_m} rows"


class Tile(NamedTuple):
    forward: Launch
    backward: BackwardLaunch | WideBackward


OF_64, OF_96, OF_128, OF_192, OF_256 = (HeadDim(x) for x in ((64,), (64, 32), (128,), (128, 64), (256,)))
# By the head dimensions of q and v: these, columns of results that leave at once, keys, warpgroups, stages.
NARROW = {
    (64, 64): Launch(OF_64, OF_64, 64, 128, 2, 4),
    (96, 96): Launch(OF_96, OF_96, 128, 128, 2, 3),
    (128, 128): Launch(OF_128, OF_128, 128, 128, 2, 2),
    (192, 128): Launch(OF_192, OF_128, 64, 128, 2, 2, tiles_of_q=1),
    (192, 192): Launch(OF_192, OF_192, 128, 64, 2, 3, tiles_of_q=1, guessed=12),
    (256, 256): Launch(OF_256, OF_256, 128, 64, 2, 2, tiles_of_q=1, guessed=12),
}
# Read keys less often, have more rows past the last one, and no registers to keep guesses in.
WIDE = {
    (64, 64): Launch(OF_64, OF_64, 64, 128, 3, 4, 160, 32, guessed=0),
    (96, 96): Launch(OF_96, OF_96, 64, 64, 3, 4, 160, 32, guessed=0),
}
BACKWARD = {
    64: BackwardLaunch(OF_64, 128, 2, 240, 24, half_early=True),
    96: BackwardLaunch(OF_96, 64, 2, 240, 24, half_early=False),
    128: BackwardLaunch(OF_128, 64, 2, 240, 24, half_early=False),
}
WIDE_BACKWARD = {
    (192, 128): WideBackward(RowsLaunch(OF_192, OF_128, slots=6), KeysLaunch(OF_192, OF_128, stages=3)),
    (192, 192): WideBackward(RowsLaunch(OF_192, OF_192, slots=5), KeysLaunch(OF_192, OF_192, stages=2)),
    (256, 256): WideBackward(RowsLaunch(OF_256, OF_256, slots=3), KeysLaunch(OF_256, OF_256, stages=2)),
}
WITHOUT_SPILLS = (3, 6)  # newer versions of Triton keep more in registers than WIDE's have


def tile(problem: Problem, device: Device) -> Tile:
    features = problem.softcap or problem.alibi  # take more registers than three warpgroups have
    fits = triton_version() == WITHOUT_SPILLS and not features
    head_dims = problem.head_dim, problem.head_dim_v
    many = MANY_KEYS if problem.window.left is None else 2 * MANY_KEYS  # a window has masks on both sides
    wide = head_dims in WIDE and keys_of_a_row(problem) >= many and fits
    forward = (WIDE if wide else NARROW)[head_dims]
    return Tile(forward, backward_tile(problem))


def backward_tile(problem: Problem) -> BackwardLaunch | WideBackward:
    head_dims = problem.head_dim, problem.head_dim_v
    if head_dims in WIDE_BACKWARD:
        return WIDE_BACKWARD[head_dims]
    found = BACKWARD[problem.head_dim]
    limited = not problem.window.unlimited
    # Without a diagonal, an order keeps programs in step, so that they read the same rows from the L2 cache.
    ordered = problem.deterministic or (not limited and problem.seqlen_k >= LONG)
    downwards = limited and (not ordered or found.block_m < found.block_n)
    return replace(found, downwards=downwards, ordered=ordered)


def most_blocks(tokens: int, block: int, sequences: int) -> int:
    """Blocks that packed sequences can have. The tokens that belong to none are one sequence more, and each sequence
    begins with a block.
    """
    return tokens // block + sequences + 1


def keys_of_a_row(problem: Problem) -> int:
    """How many keys a row sees, about."""
    window = problem.window
    keys = problem.seqlen_k
    if window.right is not None or window.top_left:
        keys //= 2
    if window.left is not None:
        keys = min(keys, window.left + 1 + (keys if window.right is None else window.right))
    return keys
