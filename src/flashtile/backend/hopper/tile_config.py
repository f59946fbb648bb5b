"""Configurations of kernels as values: head dimensions, tiles, stages, registers; and constants of all kernels."""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

MMA_M = 64  # rows (in transposed blocks, keys) of one warpgroup
DQ_COLUMNS = 64  # staging columns of a warpgroup's share of dq
SLOPE_PARTS = 4 * MMA_M  # parts of the gradient of slopes, two for each thread of a warpgroup
NUM_WARPGROUPS = 2  # consumers in backward, with 64 keys and one share of dq each
ALIGN = 8  # elements; divides the strides of rows
RAGGED_EXTENT = 2**30  # extent of the rows' dimension in ragged descriptors
COMBINE_ROWS = 16  # rows of a program that adds up the results of splits
REGISTERS = 2**16  # registers of a core
# Launch option of kernels that begin while the one before them still runs (`kernels.shared.dependent`).
OVERLAPPING: dict[str, Any] = {"launch_pdl": True}
PAGE_COLUMNS = 64  # most columns of 16 bits in a box of a page: a panel of shared memory


class Constexpr:
    """Base of objects that kernels take as constexpr arguments."""

    @property
    def cache_key(self) -> str:
        """Identity in Triton's disk cache, which would use `str`; that is for people."""
        return repr(self)


@dataclass(frozen=True)
class HeadDim(Constexpr):
    """A head dimension, split into `chunks` that are powers of two, as tensors require.

    One kind of TMA box fills all chunks. A chunk narrower than a box has a box in shared memory, and products take the
    first columns of it.
    """

    chunks: tuple[int, ...]
    box: int  # columns
    parts: int = 1  # parts of a number, side by side in memory: three of a float32 number (`kernels.shared.parts`)
    apart: bool = False  # whether chunks of keys or values, in a single stage, are loaded and released one by one
    before: tuple[int, ...] = ()  # the chunks before a group of them

    @property
    def width(self) -> int:
        return sum(self.chunks)

    @property
    def padded_width(self) -> int:
        """Columns of shared memory that holds all chunks side by side, a power of two."""
        return 1 << (self.width - 1).bit_length()

    @property
    def smem_chunks(self) -> tuple[int, ...]:
        """Columns of the chunks in shared memory, of all parts."""
        return tuple(max(chunk, self.box) for chunk in self.chunks) * self.parts

    @property
    def smem_width(self) -> int:
        """Columns of all chunks in shared memory."""
        return sum(self.smem_chunks)

    @property
    def num_boxes(self) -> int:
        return self.smem_width // self.box

    @property
    def loads(self) -> int:
        """Loads of a stage that have barriers of their own."""
        return len(self.chunks) if self.apart else 1

    @property
    def half(self) -> "HeadDim":
        """The first half of the chunks."""
        return self.groups(2)[0]

    def groups(self, number: int) -> tuple["HeadDim", ...]:
        """The chunks in so many groups."""
        n = len(self.chunks) // number
        firsts = range(0, n * number, n)
        return tuple(replace(self, chunks=self.chunks[c : c + n], before=self.chunks[:c]) for c in firsts)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first column of each chunk in memory."""
        chunks = self.chunks * self.parts
        return tuple(sum(self.before) + sum(chunks[:c]) for c in range(len(chunks)))

    def columns_of(self, x: Tensor) -> int | None:
        """Columns of `x [..., D]` in units of ALIGN if x is narrower than the kernel, else `None`."""
        return None if x.shape[-1] == self.width else x.shape[-1] // ALIGN


@dataclass(frozen=True)
class ForwardConfig(Constexpr):
    """Forward kernel: tiles of `64 * num_warpgroups` rows, blocks of `block_n` keys in `stages`."""

    head_dim: HeadDim  # q's and k's
    head_dim_v: HeadDim  # v's and the results'
    epilogue_columns: int  # columns of the output in one TMA store, a power of two
    block_n: int
    num_warpgroups: int
    stages: int
    consumer_registers: int = 240  # for all warpgroups but the first, which takes what is left
    producer_registers: int = 24
    q_stages: int = 2  # for each warpgroup; a single one is reloaded during its tile's last step
    speculative_exps: int = 16  # exponentials of a thread, computed before a step's maximum is known
    splits: int = 1  # splits of a tile's keys; more than one write fp32 results that `combine` merges
    last_splits: int = 1  # the same of the tiles that are left after whole waves
    heads_at_once: int = 1  # key heads of a dense call whose tiles take turns
    programs_per_core: int = 1
    score_mod: Any = None  # device functions (`formulas.ScoreModFunctions`), set for a launch
    pair_align: int = 1  # elements that divide the strides of bias and mask, set for a launch
    natural: bool = False  # differences of scores are taken before any factor (`formulas.is_natural`), set for a launch
    bias_stages: int = 0  # stages of tiles of a bias that TMA loads, set for a launch; 0 without them
    column_warpgroups: int = 1  # that share the results' columns: with two, the kernel is `kernels.wide`
    page_rows: int = 0  # keys of a part of a block, which lies in one page; 0 where keys are not in pages
    page_size: int | None = None  # where sequences have several pages
    kind: Literal["half"] = "half"
    page_columns = PAGE_COLUMNS

    @property
    def block_m(self) -> int:
        return MMA_M * self.num_warpgroups

    @property
    def max_registers(self) -> int | None:
        """Registers of a thread with which the programs of a core fit it; `None` for one program. The warps that do not
        multiply count as a warpgroup, which leaves most of its registers to the others.
        """
        if self.programs_per_core == 1:
            return None
        return REGISTERS // (self.programs_per_core * 128 * (self.num_warpgroups + 1)) // 8 * 8

    @property
    def skips_steps(self) -> bool:
        """Whether a warpgroup without rows skips all steps of a tile but the first. Up to 64 features the code costs
        all calls up to 2%, more than most gain; tiles of a bias have stages of their own.
        """
        return self.num_warpgroups > 1 and self.head_dim.width > MMA_M and self.bias_stages == 0

    @property
    def num_producers(self) -> int:
        """Warps that load q, k and v."""
        return 2 if self.page_rows else 1

    def box_of_keys(self, head_dim: HeadDim) -> tuple[int, int]:
        """Rows and columns of a box of k or v."""
        rows, columns = (self.page_rows, self.page_columns) if self.page_rows else (self.block_n, head_dim.box)
        return rows, min(head_dim.box, columns)

    @property
    def page_parts(self) -> int:
        """Parts of a block of keys."""
        return self.block_n // (self.page_rows or self.block_n)

    @property
    def head_factor(self) -> bool:
        """Whether the score_mod is the score times a number of the head."""
        return self.score_mod is not None and self.score_mod.factor is not None

    @property
    def by_distance(self) -> bool:
        """Whether the score_mod reads distances."""
        return self.score_mod is not None and self.score_mod.by_distance

    @property
    def compiled(self) -> "ForwardConfig":
        """The part that a kernel is compiled for: numbers of splits and heads are arguments."""
        return replace(self, splits=1, last_splits=1, heads_at_once=1)

    def with_splits(self, splits: int) -> "ForwardConfig":
        """The same kernel with split keys."""
        return self if splits == 1 else replace(self.in_float32, splits=splits)

    @property
    def in_float32(self) -> "ForwardConfig":
        """The same kernel with results in float32, whose columns take twice the staging memory."""
        return replace(self, last_splits=1, epilogue_columns=self.epilogue_columns // 2)

    def __str__(self) -> str:
        pages = f", pages in parts of {self.page_rows} keys" if self.page_rows else ""
        programs = "" if self.programs_per_core == 1 else f", {self.programs_per_core} programs a core"
        warpgroups = "1 warpgroup" if self.num_warpgroups == 1 else f"{self.num_warpgroups} warpgroups"
        last = f", the last wave in {self.last_splits} splits" * (self.last_splits > 1)
        return f"{self.block_m} x {self.block_n} ({warpgroups}, {self.stages} stages{programs}{pages}{last})"


@dataclass(frozen=True)
class EightBitForward(ForwardConfig):
    """The forward kernel in 8 bits. Results have chunks of `value_columns`."""

    transpose_warps: int = 2
    transpose_registers: int = 32  # a warpgroup's, with the producer's
    transposed_words: int = 16  # two features each, that a warp reads at a time
    speculative_exps: int = 0
    value_columns: int = 64
    v_stages: int = 3  # stages of values as they lie in memory
    transposed_stages: int = 2
    kind: Literal["eight_bit"] = "eight_bit"  # type: ignore[assignment]
    skips_steps = False  # type: ignore[assignment]
    page_columns = 2 * PAGE_COLUMNS
    head_factor = False  # type: ignore[assignment]  # units have the factors of scales

    @property
    def value_chunks(self) -> int:
        return self.head_dim_v.width // self.value_columns


@dataclass(frozen=True)
class Float32Forward(Constexpr):
    """Forward kernel: tiles of 128 rows; keys and values alternate in `kv_stages` of `block_n` keys."""

    head_dim: HeadDim
    kv_stages: int
    block_n: int = MMA_M
    block_m: int = NUM_WARPGROUPS * MMA_M
    consumer_registers: int = 240
    producer_registers: int = 24
    num_warpgroups: int = NUM_WARPGROUPS
    heads_at_once: int = 1
    kind: Literal["float32"] = "float32"

    @property
    def compiled(self) -> "Float32Forward":
        return replace(self, heads_at_once=1)

    def with_parts(self, parts: int) -> "Float32Forward":
        return replace(self, head_dim=replace(self.head_dim, parts=parts))

    def __str__(self) -> str:
        parts = f"{self.head_dim.parts} bfloat16 parts"
        return f"{self.block_m} x {self.block_n} ({NUM_WARPGROUPS} warpgroups, {self.kv_stages} stages, {parts})"


@dataclass(frozen=True)
class LatentForward(Constexpr):
    """Forward kernel of latent rows: tiles of 64 rows, pairs of blocks of 64 keys. A warpgroup has half the columns."""

    head_dim: HeadDim  # q's and k's: chunks of the values, then the other columns
    head_dim_v: HeadDim
    speculative_exps: int = 16
    splits: int = 1
    page_size: int | None = None  # where sequences have several pages
    consumer_registers: int = 240
    producer_registers: int = 24
    block_m: int = MMA_M
    block_n: int = 2 * MMA_M
    stages: int = 1
    num_warpgroups: int = NUM_WARPGROUPS
    last_splits: int = 1
    heads_at_once: int = 1
    kind: Literal["latent"] = "latent"

    @property
    def head_dims(self) -> tuple[HeadDim, HeadDim]:
        return self.head_dim, self.head_dim_v

    @property
    def compiled(self) -> "LatentForward":
        return replace(self, splits=1)

    def with_splits(self, splits: int) -> "LatentForward":
        return replace(self, splits=splits)

    def __str__(self) -> str:
        return f"{self.block_m} x {self.block_n} of latent rows ({NUM_WARPGROUPS} warpgroups, half of the columns each)"


@dataclass(frozen=True)
class LatentBytesForward(LatentForward):
    """Of rows of 8 bits: warpgroups take blocks of 64 keys in turn, or share pairs of them."""

    consumer_registers: int = 232
    stages: int = 4
    packed: bool = False  # rows of 656 bytes
    k_scales: str = ""  # "head" or "key", set for a launch
    v_scales: str = ""
    in_turn: bool = False  # whether a warpgroup's loads of a block's chunks stay behind the products before
    in_flight: int = 0  # products of a warpgroup's chunks that are in flight while the next one is converted

    @property
    def paired(self) -> bool:
        return self.block_n > MMA_M

    def __str__(self) -> str:
        rows, blocks = "656 bytes" if self.packed else "8 bits", "in pairs" if self.paired else "in turn"
        return f"{self.block_m} x {self.block_n} of latent rows of {rows} ({self.num_warpgroups} warpgroups, {blocks})"


@dataclass(frozen=True)
class TangentsConfig(Constexpr):
    """Kernel of forward mode: tiles of 128 rows; keys, values and their tangents are loads of `kv_stages`."""

    head_dim: HeadDim
    head_dim_v: HeadDim
    kv_stages: int
    block_n: int = MMA_M
    early_values: bool = True  # the product with dv is in flight while others are computed, which takes registers
    moves_q: bool = True  # inputs that have tangents, set for a launch
    moves_k: bool = True
    moves_v: bool = True
    heads_at_once: int = 1
    num_warpgroups: int = NUM_WARPGROUPS
    consumer_registers: int = 240
    producer_registers: int = 24
    score_mod: Any = None
    pair_align: int = 1
    natural: bool = False

    @property
    def block_m(self) -> int:
        return MMA_M * self.num_warpgroups

    @property
    def moves_scores(self) -> bool:
        return self.moves_q or self.moves_k

    @property
    def compiled(self) -> "TangentsConfig":
        return replace(self, heads_at_once=1)

    def __str__(self) -> str:
        return f"{self.block_m} x {self.block_n} ({self.num_warpgroups} warpgroups, {self.kv_stages} stages)"


class TileConfig(NamedTuple):
    """The configuration of a pass: the other one is absent. Forward mode has one of forward, and one of its own."""

    forward: Any  # ForwardConfig | Float32Forward | LatentForward
    backward: Any  # FusedBackwardConfig | SplitBackwardConfig
    tangents: Any = None  # TangentsConfig
