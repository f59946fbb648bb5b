"""Skip this file when you learn: a table of step 9's kernels, and of two related ones, each a Python function."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cuda_launch
from .cuda_compile import Source, source
from .cuda_launch import Call, blocks

PTX_TYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}
FLOATS, HALVES = (torch.float32,), tuple(PTX_TYPES)


class Bug(NamedTuple):
    """A mix-up of indices: the text of the kernel, and the wrong one in its place."""

    right: str
    wrong: str
    hidden: str  # problems that it computes right
    seen: str  # those that it does not


@dataclass
class CudaStep:
    """A kernel for q `[heads, N, d]` and the usual arguments, and how it is compiled and launched."""

    file: str
    NAME: str  # of the kernel
    HEAD_DIMS: tuple[int, ...]
    threads: tuple[int, int]
    grid: Callable[[Call], tuple[int, int]]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    macros: dict[str, int] = field(default_factory=dict)
    rows_for_a_read: int = 1  # rows for which a block reads K and V once
    state_in_hbm: bool = False  # m and l are arguments, and out begins with zeros
    shared_bytes: Callable[[int], int] = lambda d: 0  # of dynamic shared memory, for a head dimension
    bugs: dict[str, Bug] = field(default_factory=dict)
    replaced: tuple[str, str] | None = None  # a text of the file, and what takes its place

    def source_for(self, d: int, dtype: torch.dtype | None = None, *flags: str) -> Source:
        """The kernel's source for a head dimension; `flags` are the compiler's, such as `--fmad=false`."""
        macros: dict[str, Any] = {"HEAD_DIM": d, **self.macros}
        if self.dtypes == HALVES:
            macros["HALF"] = PTX_TYPES[dtype or torch.float16]
        return source(self.file, *flags, replaced=self.replaced, **macros)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, *,
        flags: tuple[str, ...] = (), bug: str | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`[N, d]` to out `[N, d]` in q's dtype and lse `[N]` in float32; or `[B, heads, N, d]`, where k and v may have
        fewer heads. With `bug`, a name of the kernel's `bugs`, the results are wrong as it says.

        Raises:
            CudaUnavailableError: there is no GPU, or no compiler.
            ValueError: a shape or dtype that the kernel does not take.
        """
        call = cuda_launch.prepare(q, k, v, causal, scale, head_dims=self.HEAD_DIMS, dtypes=self.dtypes)
        compiled = self.source_for(q.shape[-1], q.dtype, *flags)
        if bug is not None:
            compiled = with_bug(compiled, self.bugs[bug])
        state: tuple[Any, ...] = ()
        if self.state_in_hbm:
            call.out.zero_()
            state = torch.full_like(call.lse, -torch.inf), torch.zeros_like(call.lse)  # m and l [heads, N]
        size = self.shared_bytes(q.shape[-1])
        cuda_launch.launch(
            compiled, self.NAME, self.grid(call), self.threads, *call.arguments, *state, shared_bytes=size
        )
        return call.out, call.lse


def tile_bytes(d: int, rows: int) -> int:
    """Of so many rows of 16-bit numbers: as wide as the next multiple of 16, and 16 bytes more."""
    return 2 * (blocks(d, 16) * 16 + 8) * rows


def with_bug(compiled: Source, bug: Bug) -> Source:
    return compiled._replace(replaced=(bug.right, bug.wrong))


BUGS = {  # of the third kernel
    "register": Bug(
        "acc[i][c] *= alpha;",
        "acc[0][c] *= alpha;",
        "one tile of keys: the accumulator is still 0",
        "N above 32: one row is corrected twice, the other never",
    ),
    "key as row": Bug(
        "key >= n",
        "row >= n",
        "N a multiple of 32; causal, which hides these keys itself",
        "a last tile of keys that is partial: its zeros take part in the softmax",
    ),
    "tile": Bug(
        "key > row",
        "x > y",
        "one tile of keys; attention that is not causal",
        "causal, N above 32: the mask of the first tile is taken for all",
    ),
}
BLOCK_N = 32  # keys of a tile in `rows` and `running_lse`


def tall(rows: int) -> Callable[[Call], tuple[int, int]]:
    """A grid with a block for each `rows` rows of each head."""
    return lambda call: (blocks(call.n, rows), call.heads)


rows = CudaStep(
    "step09_cuda_rows.cu",
    "attention_rows",
    (16, 32, 64),  # q and acc of a row are registers
    (128, 1),
    lambda call: (1, call.heads),
    macros={"BLOCK_N": BLOCK_N},
    state_in_hbm=True,
)
warps = CudaStep(
    "step09_cuda_warps.cu",
    "attention_warps",
    tuple(range(1, 257)),
    (128, 1),
    lambda call: (call.n, call.heads),
    macros={"WARPS": 4},
)
registers = CudaStep(
    "step09_cuda_registers.cu",
    "attention_registers",
    (16, 32, 64),  # more does not fit 48 KB
    (32, 32),
    tall(64),
    macros={"ROWS": 2},
    rows_for_a_read=64,
    bugs=BUGS,
)


def tensor_cores_of(block_m: int = 64, block_n: int = 64, stages: int = 1) -> CudaStep:
    """Step 9's fourth kernel in tiles of `block_m` rows and `block_n` keys, with one buffer or two of them.

    Raises:
        ValueError: a tile that is no multiple of 16, or more rows than a block has warps for.
    """
    if block_m % 16 or not 0 < block_m <= 512 or block_n % 16 or block_n <= 0 or stages not in (1, 2):
        raise ValueError(f"tiles of {block_m} x {block_n}, {stages} stages: multiples of 16, and 1 or 2 stages")
    return CudaStep(
        "step09_cuda_tensor_cores.cu",
        "attention_tensor_cores",
        tuple(range(8, 257, 8)),
        (2 * block_m, 1),
        tall(block_m),
        HALVES,
        macros={"BLOCK_M": block_m, "BLOCK_N": block_n, "STAGES": stages},
        rows_for_a_read=block_m,
        shared_bytes=lambda d: tile_bytes(d, block_m + stages * block_n),
    )


tensor_cores = tensor_cores_of()
stages = CudaStep(
    "step09_cuda_stages.cu",
    "attention_stages",
    (16, 32, 64, 128),  # powers of 2, for the swizzle
    (256, 1),
    tall(128),
    HALVES,
    rows_for_a_read=128,
    shared_bytes=lambda d: 2 * d * (128 + 4 * 64),  # Q, and two stages of K and V
)
running_lse = CudaStep(
    "related/running_lse.cu",
    "attention_running_lse",
    (16, 32, 64),
    (128, 1),
    tall(128),
    macros={"BLOCK_N": BLOCK_N, "THREADS": 128},
    rows_for_a_read=128,
)
split_keys = CudaStep(
    "related/split_keys.cu",
    "attention_split_keys",
    (16, 32, 64),  # acc takes 2 d registers of each thread
    (128, 1),
    tall(64),
    HALVES,
    rows_for_a_read=64,
)
STEPS = {step.file.partition(".")[0]: step for step in (rows, warps, registers, tensor_cores, stages)}
