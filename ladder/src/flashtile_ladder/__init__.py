"""Attention step by step: from the definition of softmax to fused kernels, one readable file for each step.

`python -m flashtile_ladder` lists the steps, and `python -m flashtile_ladder 5` runs one. Steps have a function of the
same form, for one head:

    attention(q, k, v, causal=False, scale=None) -> (out, lse)

    q, k, v   [N, d]   floating-point tensors of one shape; lists of N rows of d numbers in step 2
    causal             row i sees the keys j <= i
    scale              d ** -0.5 unless given
    out       [N, d]   softmax(scale * q @ k.T) @ v
    lse       [N]      log(sum_j exp(scale * q_i . k_j)), natural

and, in steps 2 to 6 and 10 and in step 8's last, its backward pass:

    backward(q, k, v, out, lse, dout, causal=False, scale=None) -> (dq, dk, dv)

Step 8's lite and online refuse causal and return `None` for lse. A step may take further keywords (tile sizes,
dropout) and says where it is limited. Steps compute in the dtype they are given. They are written to be read: for use
there is `flashtile.attention`, which is step 11.

Two memories occur in all steps. HBM, a GPU's large memory, holds whole matrices; on a CPU that is DRAM. SRAM, the
memory of one multiprocessor, holds a tile: registers and shared memory; on a CPU a cache. The L2 cache is between them.

This folder has the steps. `related` has what is around them, `measure` what counts and measures, `_host` what a learner
may skip: compilers, launches and printing; `exercises` has steps with a hole and their judge; `iomodel` is the model of
bytes and `cli` the command `flashtile-ladder`.
Nothing here imports flashtile but one module of `cli`, and `import flashtile_ladder` imports no step.
"""

import importlib
import tomllib
from pathlib import Path
from typing import Any, NamedTuple


class Step(NamedTuple):
    """One file of the course, and what its program says beside its figures: a table of `steps.toml`."""

    number: int
    name: str
    file: str  # in this package
    changed: str  # from the step that it follows from
    still_open: str  # what is still wrong or slow, and where it is mended
    time: str  # why it is faster or slower than that step, on the machine that its program runs on
    after: str = ""  # the step that it follows from, by the name of its file; "" for the first
    tensors: bool = True  # False: rows are lists of Python numbers
    backward: bool = False
    runs: str = "attention"  # what its program runs: that, or "backward"
    needs: str = ""  # beyond Python and PyTorch
    counted: bool = False  # touches HBM by slices alone
    on_gpu: bool = False  # takes tensors of a GPU, or those of an emulation
    halves: bool = False  # computes in 16 bits
    rows: int = 0  # for which a block of compiled code reads K and V once

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


TABLES = tomllib.loads((Path(__file__).parent / "steps.toml").read_text(encoding="utf-8"))["step"]
STEPS = tuple(Step(**table) for table in TABLES)
