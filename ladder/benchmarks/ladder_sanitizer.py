"""CUDA kernels of the ladder under `compute-sanitizer`: `python benchmarks/ladder_sanitizer.py --out FILE`.

Each tool runs the kernels on short sequences that no tile divides: memcheck looks for accesses outside of arrays,
racecheck for shared memory that is read and written without a barrier between, synccheck for barriers that not all
threads reach. Those of attention in CUDA C++ are one process, those that measure memory another, Numba's a third, and
those in Triton and Gluon a fourth. Two runs have a mistake that has to be found: a barrier less, for racecheck, and a
bound less, for memcheck.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "synccheck")
BARRIER = "__syncthreads();  // no thread reads K any more: V takes its place"
BOUND = "const int keys = min(BLOCK_N, n - start);", "const int keys = BLOCK_N;"
FOUND = 9  # exit status where a tool finds something
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def run_kernels() -> None:
    """Every kernel of attention in CUDA C++ once or twice: partial tiles, causal or not."""
    import torch

    from flashtile_ladder._host.cuda_steps import registers, rows, split_keys, stages, tensor_cores_of, warps
    from flashtile_ladder._host.cuda_steps import running_lse as running_lse_cuda
    from flashtile_ladder.related import block_query

    q, k, v = torch.randn(3, 77, 64, device="cuda")
    q16, k16, v16 = (x.half() for x in (q, k, v))
    for step in (rows, warps, registers, running_lse_cuda):
        step.attention(q, k, v, True)
    split_keys.attention(q16, k16, v16, True)
    for reduction in ("tree", "shuffles"):
        block_query.attention(q, k, v, reduction=reduction)
        block_query.attention(q16, k16, v16, reduction=reduction)
    stages.attention(q16, k16, v16, True)
    for number in (1, 2):
        tensor_cores_of(stages=number).attention(q16, k16, v16, True)
        tensor_cores_of(128, stages=number).attention(q16, k16, v16, True)
        q_wide, k_wide, v_wide = torch.randn(3, 77, 248, device="cuda").half()
        tensor_cores_of(64, 32, number).attention(q_wide, k_wide, v_wide)
    torch.cuda.synchronize()


def run_memory_kernels() -> None:
    """The kernels that measure levels of memory, strides and banks, each with few repeats."""
    import torch

    from flashtile_ladder.measure import memory_levels, memory_patterns

    device = torch.device("cuda")
    cycles = torch.zeros(1, dtype=torch.int64, device=device)
    for level, distance, places in (("L2", memory_levels.PLACE, 64), ("shared", 1, memory_levels.RING_SHARED)):
        place = torch.zeros(1, dtype=torch.int32, device=device)
        memory_levels.walk(level, 100, memory_levels.ring(places, distance, device), place, cycles)
    memory_levels.walk("registers", 100, torch.zeros(1, device=device), place, cycles)
    x, sums = torch.ones(1024, device=device), torch.empty(2 * 256, device=device)
    memory_levels.launch("read_global", 2, 256, x, sums, len(x) // 4, 2)
    memory_levels.launch("read_shared", 2, 256, x, sums, 2)
    memory_levels.launch("use_registers", 2, 256, sums, 0.5, 2)
    for stride in memory_patterns.STRIDES:
        memory_patterns.read_columns(x, stride, 2, 256)
    for padding in (0, 1):
        memory_patterns.read_shared_columns(x.view(32, 32), padding, 2, 2)
    torch.cuda.synchronize()


def run_numba() -> None:
    """Step 7's kernel."""
    import torch

    from flashtile_ladder import step07_numba_cuda

    step07_numba_cuda.attention(*torch.randn(3, 77, 64, device="cuda"), True)
    torch.cuda.synchronize()


def run_triton() -> None:
    """Step 8's last kernels, and step 9's in Gluon where the GPU is a Hopper one."""
    import torch

    from flashtile_ladder import step08_triton_backward, step09_hopper
    from flashtile_ladder._host.gluon_or_not import hopper_problem

    q, k, v = torch.randn(3, 1, 2, 200, 64, device="cuda").half()
    out, lse = step08_triton_backward.attention(q, k, v, True)
    step08_triton_backward.backward(q, k, v, out, lse, v, True)
    if hopper_problem(q.device) is None:
        step09_hopper.attention(q, k, v, True)
    torch.cuda.synchronize()


def run_without_a_bound() -> None:
    """Step 9's first kernel, in which the last tile of keys is taken for a full one: it reads behind K and V."""
    import torch

    from flashtile_ladder._host.cuda_steps import rows as step

    right = step.source_for
    step.source_for = lambda *given, **options: right(*given, **options)._replace(replaced=BOUND)
    step.attention(*torch.randn(3, 77, 64, device="cuda"))
    torch.cuda.synchronize()


def run_without_a_barrier() -> None:
    """Step 9's tensor-core kernel, in which V is copied over K while some warps still read K."""
    import torch

    from flashtile_ladder._host.cuda_steps import tensor_cores as step

    right = step.source_for
    step.source_for = lambda *given, **options: right(*given, **options)._replace(replaced=(BARRIER, "//"))
    q, k, v = torch.randn(3, 77, 64, device="cuda").half()
    step.attention(q, k, v)
    torch.cuda.synchronize()


RUNS = {
    "kernels": run_kernels,
    "memory": run_memory_kernels,
    "numba": run_numba,
    "triton": run_triton,
    "barrier": run_without_a_barrier,
    "bound": run_without_a_bound,
}
CORRECT = ("kernels", "memory", "numba", "triton")
MISTAKES = (("racecheck", "barrier"), ("memcheck", "bound"))  # and the tool that finds it


def planned(correct: tuple[str, ...]) -> list[tuple[str, str]]:
    """Tools and what they run: both mistakes, and these kernels."""
    tools = {"triton": TOOLS[:1]}  # racecheck knows nothing of barriers that count bytes
    return [*MISTAKES, *((tool, what) for what in correct for tool in tools.get(what, TOOLS))]


def runnable() -> tuple[str, ...]:
    """Kernels that run here: Numba's where Numba is installed."""
    return tuple(what for what in CORRECT if what != "numba" or importlib.util.find_spec("numba") is not None)


def checked(tool: str, what: str, sanitizer: str) -> dict[str, Any]:
    """Errors that a tool reports for one of `RUNS`, `None` where it did not finish; its words unless there are none."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, __file__, "--run", what]
    # PyTorch's allocator hands out parts of large blocks, behind whose ends there is more of the block.
    own_blocks = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=own_blocks)
    text = done.stdout + done.stderr
    found = SUMMARY.findall(text)
    errors = int(found[-1]) if found and done.returncode in (0, FOUND) else None
    return {"tool": tool, "run": what, "errors": errors, "words": "" if errors == 0 else text[-600:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the tool's command")
    parser.add_argument("--out", type=Path, help="a JSON file for the findings")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        RUNS[options.run]()
        return 0
    path = shutil.which(options.sanitizer) or shutil.which(f"/usr/local/cuda/bin/{options.sanitizer}")
    if path is None:
        print(f"{options.sanitizer} is not there: it comes with the CUDA toolkit.")
        return 2
    rows = []
    for tool, what in planned(runnable()):
        rows.append(checked(tool, what, path))
        print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["errors"] == 0 if row["run"] in CORRECT else (row["errors"] or 0) > 0 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
