"""Peak arithmetic rate of one core, measured by a loop of multiply-adds on registers.

A matrix product would not be an upper limit: on some processors, the kernels of this package are several times faster
than PyTorch's float32 product.
"""

import ctypes
import time
from typing import Any

import torch

from . import targets
from .jit import function_address
from .kernels.codegen import Code, Source
from .kernels.matrix_tiles import REGISTERS, matrix_tiles
from .kernels.operands import ADDRESS, LONG, REAL_TYPES
from .targets import Target
from .threads import WORKER
from .variant import Variant
from .workspace import TILE_DEPTH, TILE_ROWS

NAME, OF_TILES = "multiply_add", "multiply_tiles"
TILE_ACCUMULATORS = 4
STEPS = 2_000  # in one run: about 10 µs, short enough that other processes rarely interrupt it
RUNS = 500


def flops_per_second(dtype: torch.dtype) -> float:
    """Measure one thread in the accumulation dtype, or with AMX's tiles of bfloat16: the best of many short runs."""
    target, variant = targets.host(), Variant("float64" if dtype is torch.float64 else "float32", vectors=1)
    if dtype is torch.bfloat16 and target.tiles == "amx":
        run = WORKER(function_address(OF_TILES, variant, target, lambda: source_of_tiles(variant, target)))
        return 2 * STEPS * TILE_ACCUMULATORS * TILE_ROWS * TILE_ROWS * TILE_DEPTH / best_seconds(run, 0)
    run = WORKER(function_address(NAME, variant, target, lambda: source(variant, target)))
    real = ctypes.c_double if dtype is torch.float64 else ctypes.c_float
    accumulators, lanes = target.vectors * target.rows, target.vector_bytes // ctypes.sizeof(real)
    block = (real * (accumulators * lanes))()
    return 2 * STEPS * accumulators * lanes / best_seconds(run, ctypes.addressof(block))


def best_seconds(run: Any, address: int) -> float:
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run(address)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def source(variant: Variant, target: Target) -> Source:
    """`multiply_add(x)`: `x = x / 2 + 1` in each step, on as many vectors as a kernel has accumulators."""
    code = Code(target, REAL_TYPES[variant.real_dtype])
    with code.function(NAME, ADDRESS, public=True) as (block,):
        x = code.pointer(block)
        places = [n * code.lanes for n in range(target.vectors * target.rows)]
        accumulators = [code.variable(x.vector(place)) for place in places]
        with code.loop(0, code.constant(STEPS, LONG)):
            for accumulator in accumulators:
                accumulator.set(code.multiply_add(accumulator.get(), code.full(0.5), code.full(1.0)))
        for accumulator, place in zip(accumulators, places, strict=True):
            x.store(accumulator.get(), place)
    return code.source()


def source_of_tiles(variant: Variant, target: Target) -> Source:
    """`multiply_tiles(x)`: products of zeros, added to as many tiles as a kernel has accumulators."""
    code = Code(target, REAL_TYPES[variant.real_dtype])
    with code.function(OF_TILES, ADDRESS, public=True):
        tiles = matrix_tiles(code)
        tiles.configure()
        for n in range(REGISTERS):
            tiles.zero(n)
        with code.loop(0, code.constant(STEPS, LONG)):
            for n in range(TILE_ACCUMULATORS):
                tiles.multiply_add(n, TILE_ACCUMULATORS, TILE_ACCUMULATORS + 1)
        tiles.release()
    return code.source()
