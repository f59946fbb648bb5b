"""The ladder: from the definition of softmax to fused kernels, one readable file for each step.

Every step has a function of the same form, for one head:

    attention(q, k, v, causal=False, scale=None) -> (out, lse)

    q, k, v   [N, d]   floating-point tensors; lists of N rows of d numbers in step 2
    causal             row i sees the keys j <= i
    scale              d ** -0.5 unless given
    out       [N, d]   softmax(scale * q @ k.T) @ v
    lse       [N]      log(sum_j exp(scale * q_i . k_j)), natural

and, where the step has one, its backward pass:

    backward(q, k, v, out, lse, dout, causal=False, scale=None) -> (dq, dk, dv)

A step may take further keywords (tile sizes, dropout) and says where it is limited. Steps compute in the dtype they are
given. They are written to be read: for use there is `flashtile.attention`, which is step 11.

Two memories occur in all steps. HBM, a GPU's large memory, holds whole matrices; on a CPU that is DRAM. SRAM, the
memory of one multiprocessor, holds a tile: registers and shared memory; on a CPU a cache. The L2 cache is between them.

Each step runs by itself and prints its result, error, bytes and time: `python -m flashtile_ladder.step05_flash1`.
Nothing here imports anything else of flashtile, and `import flashtile_ladder` imports no step.
"""

import importlib
from types import ModuleType
from typing import NamedTuple


class Step(NamedTuple):
    """One file of the ladder."""

    number: int
    name: str
    module: str  # in this package
    changed: str  # from the step before
    tensors: bool = True  # False: rows are lists of Python numbers
    backward: bool = False
    needs: str = ""  # beyond Python and PyTorch

    def load(self) -> ModuleType:
        """The step's module, imported now; a step whose needs are not met says so when it is called."""
        return importlib.import_module(f"{__name__}.{self.module}")


CPP, NUMBA, TRITON, CUDA = "a C++ compiler", "Numba", "Triton", "an NVIDIA GPU; NVRTC or nvcc"
STEPS = (
    Step(1, "softmax, online", "step01_softmax", "a sum over keys can be taken in one pass, in any grouping"),
    Step(
        2, "scalar autograd", "step02_autograd", "every number is an object that records how it came about", False, True
    ),
    Step(2, "Python floats", "step02_floats", "no graph: the derivative is written by hand", False, True),
    Step(3, "C++", "step03_cpp", "the same loops, compiled", True, True, CPP),
    Step(4, "standard PyTorch", "step04_standard", "three matrix operations; S and P lie in memory", True, True),
    Step(5, "FlashAttention-1", "step05_flash1", "tiles; S and P never leave SRAM", True, True),
    Step(6, "FlashAttention-2", "step06_flash2", "rows outside: the output is written once", True, True),
    Step(7, "Numba", "step07_numba", "the tile's own loops, compiled from Python", needs=NUMBA),
    Step(7, "Numba for CUDA", "step07_numba_cuda", "a thread for each row, tiles in shared memory", needs=NUMBA),
    Step(8, "Triton, lite", "step08_triton_lite", "one kernel; a softmax for each tile, which is wrong", needs=TRITON),
    Step(8, "Triton, online", "step08_triton_online", "the online softmax: nine lines for two", needs=TRITON),
    Step(8, "Triton, lse", "step08_triton_lse", "log-sum-exp, causal, any length", needs=TRITON),
    Step(9, "CUDA C++, rows", "step09_cuda_rows", "threads and shared memory, written out", needs=CUDA),
    Step(9, "CUDA C++, warps", "step09_cuda_warps", "a block for each row, sums by warp shuffles", needs=CUDA),
    Step(
        9, "CUDA C++, registers", "step09_cuda_registers", "32 x 32 threads, tiles in arrays of registers", needs=CUDA
    ),
    Step(9, "CUDA C++, tensor cores", "step09_cuda_tensor_cores", "products of tiles as instructions", needs=CUDA),
    Step(10, "compiled variants", "step10_variants", "one specialised kernel for each set of features", True, True),
)
