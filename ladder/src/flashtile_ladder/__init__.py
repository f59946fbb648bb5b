"""Attention step by step: from the definition of softmax to fused kernels, one readable file for each step.

`python -m flashtile_ladder` lists the steps, and `python -m flashtile_ladder 5` runs one. Steps have a function of the
same form, for one head:

    attention(q, k, v, causal=False, scale=None) -> (out, lse)

    q, k, v   [N, d]   floating-point tensors of one shape; lists of N rows of d numbers in step 2
    causal             row i sees the keys j <= i
    scale              d ** -0.5 unless given
    out       [N, d]   softmax(scale * q @ k.T) @ v
    lse       [N]      log(sum_j exp(scale * q_i . k_j)), natural

and, in steps 2 to 6 and 10, its backward pass:

    backward(q, k, v, out, lse, dout, causal=False, scale=None) -> (dq, dk, dv)

Step 8's lite and online refuse causal and return `None` for lse. A step may take further keywords (tile sizes,
dropout) and says where it is limited. Steps compute in the dtype they are given. They are written to be read: for use
there is `flashtile.attention`, which is step 11.

Two memories occur in all steps. HBM, a GPU's large memory, holds whole matrices; on a CPU that is DRAM. SRAM, the
memory of one multiprocessor, holds a tile: registers and shared memory; on a CPU a cache. The L2 cache is between them.

This folder has the steps. `related` has what is around them, `measure` what counts and measures, `_host` what a learner
may skip: compilers, launches and printing; `iomodel` is the model of bytes and `cli` the command `flashtile-ladder`.
Nothing here imports flashtile but one module of `cli`, and `import flashtile_ladder` imports no step.
"""

import importlib
from typing import Any, NamedTuple


class Step(NamedTuple):
    """One file of the course, and what its program says beside its figures."""

    number: int
    name: str
    file: str  # in this package
    changed: str  # from the step that it follows from
    still_open: str  # what is still wrong or slow, and where it is mended
    time: str  # why it is faster or slower than that step, on the machine that its program runs on
    after: str = ""  # the step that it follows from, by the name of its file; "" for the first
    tensors: bool = True  # False: rows are lists of Python numbers
    backward: bool = False
    needs: str = ""  # beyond Python and PyTorch

    @property
    def module(self) -> str:
        """The file's name without its ending, by which a step is called."""
        return self.file.partition(".")[0]

    def load(self) -> Any:
        """What has the step's `attention`, imported now; a step whose needs are not met says so when it is called."""
        if self.file.endswith(".py"):
            return importlib.import_module(f"{__name__}.{self.module}")
        if self.file.endswith(".cpp"):
            return importlib.import_module(f"{__name__}._host.cpp")
        return importlib.import_module(f"{__name__}._host.cuda_steps").STEPS[self.module]


CPP, NUMBA, TRITON, CUDA = "a C++ compiler", "Numba", "Triton", "an NVIDIA GPU; NVRTC or nvcc"
TILES_IN_PYTHON = (
    "Python calls torch some thirty times for each of 24 tiles, and at this N the calls take longer than the bytes"
)
ONE_LAUNCH = "one kernel in place of thirteen for each tile, and the state of a row stays in registers"
STEPS = (
    Step(
        1,
        "softmax, online",
        "step01_softmax.py",
        "a sum over keys can be taken in one pass, in any grouping",
        "no derivative, and one key at a time (2, 5)",
        "a loop of Python over all pairs: it is there to be read",
    ),
    Step(
        2,
        "scalar autograd",
        "step02_autograd.py",
        "every number is an object that records how it came about",
        "an object for each multiplication, all kept until backward (the next file)",
        "an object is made for each operation",
        "step01_softmax",
        False,
        True,
    ),
    Step(
        2,
        "Python floats",
        "step02_floats.py",
        "no graph: the derivative is written by hand",
        "Python looks at the type of each number, each time (3)",
        "no object for each operation, and no graph",
        "step02_autograd",
        False,
        True,
    ),
    Step(
        3,
        "C++",
        "step03_cpp.cpp",
        "the same loops, compiled",
        "each row reads all keys and values for itself; one core, no matrix unit (4)",
        "a multiplication is one instruction",
        "step02_floats",
        True,
        True,
        CPP,
    ),
    Step(
        4,
        "standard PyTorch",
        "step04_standard.py",
        "three matrix operations; S and P lie in memory",
        "S and P, N² numbers each, are written and read again (5)",
        "tuned matrix products reuse what they load",
        "step03_cpp",
        True,
        True,
    ),
    Step(
        5,
        "FlashAttention-1",
        "step05_flash1.py",
        "tiles; S and P never leave SRAM",
        "O, l and m come and go for each block of keys; one block after the other (6)",
        TILES_IN_PYTHON,
        "step04_standard",
        True,
        True,
    ),
    Step(
        6,
        "FlashAttention-2",
        "step06_flash2.py",
        "rows outside: the output is written once",
        "a loop of Python, thirteen calls for each tile (7, 8)",
        "thirteen calls for each of 16 tiles, where step 5 has some thirty for each of 24; next to step 4 they decide",
        "step05_flash1",
        True,
        True,
    ),
    Step(
        7,
        "Numba",
        "step07_numba.py",
        "the tile's own loops, compiled from Python",
        "one core; products are not blocked for registers (8)",
        "no call for each operation, which decides at small N; but torch's products, which step 6 calls, are blocked "
        "for registers, and these loops are not",
        "step06_flash2",
        needs=NUMBA,
    ),
    Step(
        7,
        "Numba for CUDA",
        "step07_numba_cuda.py",
        "a thread for each row, tiles in shared memory",
        "scalar products leave the tensor cores idle (8)",
        "rows run at the same time on a GPU; in the simulator a thread of Python stands for each",
        "step06_flash2",
        needs=NUMBA,
    ),
    Step(
        8,
        "Triton, lite",
        "step08_triton_lite.py",
        "one kernel; a softmax for each tile, which is wrong",
        "the result, from two tiles on (the next file)",
        ONE_LAUNCH,
        "step06_flash2",
        needs=TRITON,
    ),
    Step(
        8,
        "Triton, online",
        "step08_triton_online.py",
        "the online softmax: nine lines for two",
        "whole tiles only, no causal, no lse for backward (the next file)",
        "a few operations more for each tile; no byte more",
        "step08_triton_lite",
        needs=TRITON,
    ),
    Step(
        8,
        "Triton, lse",
        "step08_triton_lse.py",
        "log-sum-exp, causal, heads, any length",
        "what threads and registers do is the compiler's choice (9)",
        "masks run on the last tile alone, and 2^x takes the place of exp",
        "step08_triton_online",
        needs=TRITON,
    ),
    Step(
        9,
        "CUDA C++, rows",
        "step09_cuda_rows.cu",
        "threads and shared memory, written out",
        "a block for each head: nearly all of a GPU is idle (the next file)",
        "one launch for the whole call, though a block for each head leaves nearly all multiprocessors idle",
        "step05_flash1",
        needs=CUDA,
    ),
    Step(
        9,
        "CUDA C++, warps",
        "step09_cuda_warps.cu",
        "a block for each row, sums by warp shuffles",
        "each row reads all of K and V for itself (the next file)",
        "N blocks in place of one, and neighboring lanes read neighboring numbers",
        "step09_cuda_rows",
        needs=CUDA,
    ),
    Step(
        9,
        "CUDA C++, registers",
        "step09_cuda_registers.cu",
        "32 x 32 threads, tiles of 64 rows",
        "products on the ordinary units (the next file)",
        "K and V are read once for 64 rows; but one head is few blocks, where the step before has one for each row, "
        "and a large GPU is idle: with 16 heads this one is faster",
        "step09_cuda_warps",
        needs=CUDA,
    ),
    Step(
        9,
        "CUDA C++, tensor cores",
        "step09_cuda_tensor_cores.cu",
        "products of tiles as instructions",
        "copies and products wait for each other, and Hopper has larger ones: step 11",
        "products on tensor cores, in 16 bits: half the bytes too",
        "step09_cuda_registers",
        needs=CUDA,
    ),
    Step(
        10,
        "compiled variants",
        "step10_variants.py",
        "one specialised kernel for each set of features",
        "a loop of torch operations again: the idea, without the speed; step 11 has both",
        "smaller tiles than step 6's (64 in place of 128 rows), so four times as many calls of torch",
        "step06_flash2",
        True,
        True,
    ),
)
