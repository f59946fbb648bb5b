"""Memory accesses of step 9: the cost of their order, in HBM and in shared memory. Measured on a GPU.

Coalescing. A multiprocessor asks the L2 cache for sectors of 32 bytes. If the 32 lanes of a warp read 32 neighbouring
float32 numbers, these are 4 sectors, all of it used; if they read numbers s apart, up to 32 sectors with 4 bytes used
of each. HBM answers in pieces that may be larger than a sector, of G bytes. As long as nothing is found in a cache,

    bytes from L2 / bytes used  =  min(s, 8)          bytes from HBM / bytes used  =  min(s, G / 4)

Times of strides 16 and 32 tell G = 32 from G = 64, and benchmarks/coalescing_counters.py counts both.

Banks. Shared memory has 32 banks, and number i lies in bank i mod 32. A warp's read takes as many turns as the most
lanes that want different numbers of one bank. In a tile of rows of 32 numbers a column lies in a single bank: 32 turns.
One more number for each row, never used, moves row r by r banks, and the column lies in all 32: one turn.

The kernels are in memory_patterns.cu; two of step 9's kernels are also timed with the padding of their tiles removed.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._host import cuda_launch
from .._host.cuda_compile import source
from .._host.cuda_steps import CudaStep, registers, tensor_cores

STRIDES = (1, 2, 4, 8, 16, 32)
NUMBERS = 2**27  # 512 MiB: ten times what an H200's L2 holds
BLOCKS, THREADS = 132 * 16, 256
REPEATS = 1000
SHAPE = (1, 16, 2048, 64)  # of q, k and v, for the kernels of step 9


def read_columns(x: Tensor, stride: int, blocks: int, threads: int) -> Tensor:
    """The sum of all numbers of x, in parts, one for each thread; neighbouring threads read `stride` numbers apart."""
    rows = len(x) // stride
    if rows * stride != len(x) or rows & (rows - 1):
        raise ValueError(f"{len(x)} numbers are not a power of 2 of rows of {stride}")
    sums = torch.empty(blocks * threads, device=x.device)
    compiled = source("measure/memory_patterns.cu")
    cuda_launch.launch(compiled, "read_columns", (blocks, 1), (threads, 1), x, sums, rows.bit_length() - 1, stride)
    return sums


def read_shared_columns(x: Tensor, padding: int, repeats: int, blocks: int) -> Tensor:
    """For each of `blocks` warps, the sums of the rows of x `[32, 32]`, times `repeats`, from a tile so padded."""
    sums = torch.empty((blocks, 32), device=x.device)
    compiled = source("measure/memory_patterns.cu", PADDING=padding)
    cuda_launch.launch(compiled, "read_shared_columns", (blocks, 1), (32, 1), x, sums, repeats)
    return sums


class Padded(NamedTuple):
    """A kernel of step 9 whose tiles are padded, how it is launched, and the text that its padding is."""

    step: CudaStep
    dtype: torch.dtype
    text: str
    without: str

    def run(self, call: cuda_launch.Call) -> None:
        """As the step's `attention` does, but for the padding."""
        compiled = self.step.source_for(call.q.shape[-1], self.dtype)._replace(replaced=(self.text, self.without))
        size, grid = self.step.shared_bytes(call.q.shape[-1]), self.step.grid(call)
        cuda_launch.launch(compiled, self.step.NAME, grid, self.step.threads, *call.arguments, shared_bytes=size)


PADDED = {
    "registers": Padded(registers, torch.float32, "k_tile[BLOCK][D + 1];", "k_tile[BLOCK][D];"),
    "tensor cores": Padded(tensor_cores, torch.float16, "STRIDE = D + 8;", "STRIDE = D;"),
}


# Measurements ---------------------------------------------------------------------------------------------------------


def fastest_ms(run: Callable[[], Any], repeats: int = 20) -> float:
    """The fastest of several runs, by the GPU's clock: other work on the GPU only adds to a time."""
    run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


def coalescing(device: torch.device) -> Iterator[dict[str, Any]]:
    """For each stride the time, and the bytes used for each second."""
    x = torch.ones(NUMBERS, device=device)
    alone = None
    for stride in STRIDES:
        ms = fastest_ms(lambda stride=stride: read_columns(x, stride, BLOCKS, THREADS))
        alone = alone or ms
        yield {"stride": stride, "ms": ms, "gb_per_s_used": x.nbytes / ms / 1e6, "slower": ms / alone}


def bank_conflicts(device: torch.device) -> Iterator[dict[str, Any]]:
    """Columns of a tile, padded or not; then two kernels of step 9, as they are and with rows as long as the head."""
    x = torch.ones((32, 32), device=device)
    times = [fastest_ms(lambda p=padding: read_shared_columns(x, p, REPEATS, BLOCKS)) for padding in (1, 0)]
    yield compared("columns of a tile", *times)
    for name, padded in PADDED.items():
        q, k, v = (torch.randn(SHAPE, device=device).to(padded.dtype) for _ in range(3))
        call = cuda_launch.prepare(q, k, v, False, None, head_dims=padded.step.HEAD_DIMS, dtypes=(padded.dtype,))
        padded_ms = fastest_ms(lambda step=padded.step, call=call: step.attention(call.q, call.k, call.v))
        yield compared(f"step 9, {name}", padded_ms, fastest_ms(lambda padded=padded, call=call: padded.run(call)))


def compared(kernel: str, padded_ms: float, unpadded_ms: float) -> dict[str, Any]:
    return {"kernel": kernel, "padded_ms": padded_ms, "unpadded_ms": unpadded_ms, "slower": unpadded_ms / padded_ms}


def main() -> None:
    for measurement in (coalescing, bank_conflicts):
        for line in measurement(cuda_launch.gpu()):
            print(", ".join(f"{name} {x:.4g}" if isinstance(x, float) else f"{name} {x}" for name, x in line.items()))
