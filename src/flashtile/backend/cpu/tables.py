"""Tables that host code writes and kernels read: of sequences, of blocks of keys, and of captured tensors."""

from .workspace import BLOCK_N, BLOCK_PARTS

# A row of the table of sequences (`lengths.Lengths.table`).
SEQUENCE_FIELDS = ("first_task", "q_first", "k_first", "seqlen_q", "seqlen_k", "leftpad")
UNLIMITED = 2**40  # a side of a window without bound

# A byte of the table of blocks: the state of a block, and the first and the last of its parts that are not hidden.
PART = BLOCK_N // BLOCK_PARTS  # keys
FIRST_BIT, LAST_BIT = 2, 4


def entry(state: int, first: int = 0, last: int = BLOCK_PARTS - 1) -> int:
    """The byte of a block; `state` says what its parts from `first` to `last` are."""
    return state | first << FIRST_BIT | last << LAST_BIT


# Tensors that a formula reads.
STORED_DTYPES = (
    "float32", "float64", "bfloat16", "float16", "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "int64",
)  # fmt: skip
GRADIENT_DIMENSIONS = 4  # dimensions of a captured tensor's gradient before the tensor's own (`captured_gradients`)


def stored_dtype(dtype: str) -> str:
    """The dtype in which kernels read a captured tensor. The host converts others, such as float8."""
    return dtype if dtype in STORED_DTYPES else "float32"
