"""Configurations of the backward kernels as values: one kernel for all gradients, or kernels for rows and for keys."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from .tile_config import DQ_COLUMNS, MMA_M, NUM_WARPGROUPS, Constexpr, HeadDim


@dataclass(frozen=True)
class DqShare(Constexpr):
    """One warpgroup's share of a block's dq: 64 rows of some columns."""

    row: int  # first row in the block
    column: int  # first column
    width: int
    chunk: int  # columns at once


@dataclass(frozen=True)
class LateDq(Constexpr):
    """dq that is computed one step later, and added in any order (`kernels.backward.late_dq`)."""

    stages: int  # stages of rows
    # Chunks of k and of v, the last ones, that each warpgroup's products read from registers, not from shared memory.
    keys: tuple[int, int] = (0, 0)
    values: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class FusedBackwardConfig(Constexpr):
    """Fused backward kernel: tiles of 128 keys, blocks of `block_m` rows in `stages`."""

    head_dim: HeadDim  # q's, k's and v's
    block_m: int
    stages: int
    consumer_registers: int = 240
    producer_registers: int = 24
    early_half_exps: bool = False  # compute half of a block's exponentials one product earlier
    late_dq: LateDq | None = None
    lpt: bool = False  # longest processing time first (`kernels.backward.tile_scheduler`)
    in_order: bool = False  # accumulate dq in a fixed order (`kernels.backward.dq_writer`)
    dq_parts: int = 1  # accumulators of dq that blocks of keys share; `postprocess` adds them
    head_splits: int = 1  # programs that share the query heads of a block of keys, scheduled as heads of their own
    row_splits: int = 1  # programs that share its rows; `add_splits` adds their dk and dv
    row_chunks: int = 1  # launches that visit some of the rows each, and add to dk and dv in fp32
    last_splits: int = 1  # programs that share the rows of the blocks that are left after whole waves
    heads_at_once: int = 1  # heads of a dense call, or parts of their groups, whose blocks take turns
    block_n: int = 2 * MMA_M
    score_mod: Any = None
    pair_align: int = 1
    natural: bool = False
    bias_stages: int = 0
    kind: Literal["fused"] = "fused"

    @property
    def compiled(self) -> "FusedBackwardConfig":
        """The part that a kernel is compiled for: numbers of parts, splits and chunks are arguments."""
        return replace(self, dq_parts=1, head_splits=1, row_splits=1, row_chunks=1, last_splits=1, heads_at_once=1)

    @property
    def stats_rows(self) -> int:
        """Rows that the row statistics of a sequence are a multiple of."""
        return self.block_m

    @property
    def stores_through_ds(self) -> bool:
        """Whether dk and dv leave through the memory of ds, which makes room for a third stage of wide rows."""
        return self.late_dq is not None and self.late_dq.stages > 2 and self.head_dim.width > DQ_COLUMNS

    @property
    def splits(self) -> int:
        """Programs that share a block of keys."""
        return self.head_splits * self.row_splits

    @property
    def bytes_per_row(self) -> int:
        """Of q and dout in 16 bits, and of dq's accumulator: what a row takes of the L2 cache."""
        return self.head_dim.width * (2 * 2 + 4)

    @property
    def adds_dkdv(self) -> bool:
        """Whether these programs add to the same dk and dv, in any order."""
        return self.head_splits > 1 and self.row_splits == 1 and not self.in_order

    @property
    def dkdv_parts(self) -> int:
        """Buffers of dk and dv, if these are in fp32."""
        return 1 if self.adds_dkdv else self.splits

    @property
    def dq_shares(self) -> tuple[DqShare, DqShare]:
        width, chunks = self.head_dim.width, self.head_dim.chunks
        if self.block_m > MMA_M:
            return DqShare(0, 0, width, 0), DqShare(MMA_M, 0, width, 0)
        if width == DQ_COLUMNS:
            return DqShare(0, 0, width // 2, 0), DqShare(0, width // 2, width // 2, 0)
        return DqShare(0, 0, DQ_COLUMNS, 0), DqShare(0, DQ_COLUMNS, width - DQ_COLUMNS, len(chunks) - 1)

    @property
    def dq_box(self) -> int:
        """Columns of one TMA transfer of dq."""
        return min(share.width for share in self.dq_shares)

    @property
    def head_dim_v(self) -> HeadDim:
        return self.head_dim

    def __str__(self) -> str:
        launches = f", {self.row_chunks} launches" if self.row_chunks > 1 else ""
        return f"{self.block_n} keys x {self.block_m} rows (2 warpgroups, {self.stages} stages{launches})"


@dataclass(frozen=True)
class DqConfig(Constexpr):
    """dq kernel: tiles of `64 * num_warpgroups` rows; keys and values alternate in `kv_stages`."""

    head_dim: HeadDim
    head_dim_v: HeadDim
    kv_stages: int
    dout_in_registers: bool = False  # products read dout from registers, not from shared memory
    block_n: int = MMA_M
    num_warpgroups: int = 2
    column_groups: int = 1  # warpgroups that have the same rows, and a group of dq's columns each
    heads_at_once: int = 1
    consumer_registers: int = 240
    producer_registers: int = 24
    score_mod: Any = None
    pair_align: int = 1
    natural: bool = False

    @property
    def columns(self) -> tuple[HeadDim, ...]:
        """dq's columns of each warpgroup."""
        return self.head_dim.groups(self.column_groups) * self.row_groups

    @property
    def row_groups(self) -> int:
        """Groups of MMA_M rows."""
        return self.num_warpgroups // self.column_groups

    @property
    def block_m(self) -> int:
        return MMA_M * self.row_groups

    @property
    def compiled(self) -> "DqConfig":
        return replace(self, heads_at_once=1)


@dataclass(frozen=True)
class DkdvConfig(Constexpr):
    """dk and dv kernel: tiles of 64 keys, blocks of `block_m` rows in `stages`. With a `result` of its own, each kernel
    computes one of them, whose columns its warpgroups share (`kernels.wide.dkdv`).
    """

    head_dim: HeadDim
    head_dim_v: HeadDim
    stages: int
    keys_in_registers: bool = False  # products read k and v from registers; they arrive in a stage of rows
    block_m: int = MMA_M
    block_n: int = MMA_M
    result: Literal["both", "dk", "dv"] = "both"
    lpt: bool = True  # programs never wait for each other
    in_order: bool = False
    dq_parts: int = 1
    head_splits: int = 1  # programs that share the query heads of a block of keys
    heads_at_once: int = 1
    consumer_registers: int = 240
    producer_registers: int = 24
    score_mod: Any = None
    pair_align: int = 1
    natural: bool = False

    @property
    def columns(self) -> tuple[HeadDim, ...]:
        """Columns of a kernel's one result, of each warpgroup."""
        return (self.head_dim_v if self.result == "dv" else self.head_dim).groups(NUM_WARPGROUPS)

    @property
    def stats_rows(self) -> int:
        """Rows that the row statistics of a sequence are a multiple of."""
        return MMA_M

    @property
    def splits(self) -> int:
        """Programs that share a block of keys."""
        return self.head_splits

    @property
    def compiled(self) -> "DkdvConfig":
        """The part that a kernel is compiled for: numbers of splits and heads are arguments."""
        return replace(self, head_splits=1, heads_at_once=1)


@dataclass(frozen=True)
class SplitBackwardConfig(Constexpr):
    """Two kernels: over 128 features, accumulating dq in memory costs more than computing scores twice."""

    dq: DqConfig
    dkdv: DkdvConfig
    dv: DkdvConfig | None = None  # where `dkdv` computes dk alone
    kind: Literal["split"] = "split"

    def with_parts(self, parts: int) -> "SplitBackwardConfig":
        """The same kernels for numbers in another number of parts."""
        head_dim = replace(self.dq.head_dim, parts=parts)
        widths = {"head_dim": head_dim, "head_dim_v": head_dim}
        return SplitBackwardConfig(replace(self.dq, **widths), replace(self.dkdv, **widths))

    def __str__(self) -> str:
        dq, dkdv = self.dq, self.dkdv
        apart = "" if self.dv is None else f", apart, dv x {self.dv.block_m} rows"
        shared = f" in {dkdv.head_splits} parts of the heads" if dkdv.head_splits > 1 else ""
        keys = f"dk and dv {dkdv.block_n} keys x {dkdv.block_m} rows{apart}{shared}"
        return f"dq {dq.block_m} rows x {dq.block_n} keys, {keys}"
