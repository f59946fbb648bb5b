"""Compile-time constants of the kernels, as host code makes them without importing Triton."""

from dataclasses import dataclass

MAX_HEAD_DIM = 512
MAX_LATENT_DIM = 576  # where values are the first 512 columns of k
MOST_MMA = 256  # features of `kernels.mma.forward`, above which `wide_forward` takes its place
WIDE_COLUMNS = 128  # columns of a chunk of keys or values in `wide_forward`
TRANSPOSED_ROWS = 8  # rows of a tile, if whole groups of query heads fit


@dataclass(frozen=True)
class HeadDim:
    """A head dimension, held in one or two chunks, powers of two: 96 = 64 + 32."""

    WIDTH: int
    CHUNK_0: int
    CHUNK_1: int  # 0 without a second chunk
    SPLIT: bool = False  # rows in memory are float32 numbers in three parts
    PAIRS: bool = False  # the chunks are the even and the odd features (`kernels.eight_bit`)


@dataclass(frozen=True)
class Constants:
    """Compile-time parameters of a kernel."""

    HEAD_DIM: HeadDim
    HEAD_DIM_V: HeadDim
    NATURAL: bool  # scores have a bias or a score_mod: differences of them are taken before any factor
    COMPENSATED: bool  # float32 inputs: sums carry their rounding errors
    PRECISION: str  # precision of float32 products: "ieee", "tf32x3", "bf16x6" or "tf32"
    ALIGN: int  # elements, the unit of strides
    KEY_ALIGN: int  # the same of k and v
    PAGE_SIZE: int  # 0 without pages, and for a page table of one column
    BLOCK_B: int  # a power of two above the number of packed sequences
    BLOCK_M: int
    BLOCK_N: int
    PACK_GQA: int = 1  # query heads that share a tile
    SPLITS: int = 1  # programs that share the keys of a row
    TRANSPOSED: bool = False  # scores are `[N, M]` (`kernels.few_rows`)
    IN_ORDER: bool = False  # a page table of one column is `0 .. batch - 1`, and not read
    NUM_WARPS: int = 4  # warps of a program; they decide how many rows of the splits are merged at once
    STAGES: int = 1  # stages of rows in shared memory, in `kernels.mma`
    KEY_FORMAT: str = ""  # format of 8-bit keys and values (`kernels.eight_bit.numbers`)
    PTX: bool = False  # 8-bit numbers are converted by PTX
    K_SCALES: str = ""  # whether scales differ by "head" or by "key"
    V_SCALES: str = ""
    VALUES: str = ""  # dtype of products with values, if not q's: "bf16x2" or, in the interpreter, "fp32"
    LATENT: bool = False  # values are the first chunk of the keys' rows, or all of them
    BATCH_INVARIANT: bool = False  # a row sees its blocks in order, and other rows' change nothing
    PART_KEYS: int = 0  # keys of a part (`kernels.decode`)
    EVEN: bool = False  # no block needs masks; that of dq is slower without their code
    Q_SCALES: bool = False  # queries have scales


@dataclass(frozen=True)
class TangentConstants(Constants):
    """Compile-time parameters of the forward kernel with tangents."""

    PRODUCTS_MOVE: bool = False  # q or k
    SCORES_MOVE: bool = False  # q, k, or what else changes the scores of keys
    CAPTURED_MOVE: bool = False  # tensors of the score_mod


@dataclass(frozen=True)
class AppendConstants:
    """Compile-time constants of `kernels.append`."""

    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int
    HALF: int  # rotated pairs, 0 for none
    INTERLEAVED: bool
    Q_FIXED: bool  # all queries of a sequence turn as its first one
    BLOCK_B: int
    KEY_FORMAT: str = ""  # format of a cache of 8 bits
    K_SCALES: str = ""  # "token" if scales are computed and stored, "given" if they are read
    V_SCALES: str = ""


def wide_forward_bytes(head_dim: int, block_m: int, block_n: int, slots: int) -> int:
    """Shared memory that `kernels.mma.wide_forward` allocates: queries, slots for chunks, and probabilities."""
    chunks = -(-head_dim // WIDE_COLUMNS)
    return 2 * ((chunks * block_m + slots * block_n) * WIDE_COLUMNS + block_m * block_n)
