"""Running a compiled function on several threads at once, which share out its tasks among themselves.

PyTorch's OpenMP threads are there already: a parallel region of our own on the library that PyTorch has loaded costs
some microseconds and never has more threads than cores. Without OpenMP (Windows, some builds for macOS), threads of
our own call the function. A forked process has neither: `forking` leaves it one thread.
"""

import ctypes
import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

WORKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def openmp() -> Any | None:
    """`GOMP_parallel` of the OpenMP library that PyTorch calls, under the name that GNU's, LLVM's and Intel's have.
    Other packages bring their own: it is looked up as for PyTorch's library, first where all symbols of the process
    are, then in what the library itself depends on.
    """
    if sys.platform != "linux":
        return None
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if line.count("/")}
    for path in (None, *(path for path in paths if os.path.basename(path) == "libtorch_cpu.so")):
        parallel = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if parallel is not None:
            parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            parallel.restype = None
            return parallel
    return None


@functools.cache
def thread_pool(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="flashtile")


def run(worker: Any, block: int, threads: int) -> None:
    """Call `worker`, a `WORKER`, on `threads` threads and wait for all of them; the GIL is free meanwhile."""
    if threads <= 1:
        worker(block)
        return
    parallel = openmp()
    if parallel is not None:
        parallel(worker, block, threads, 0)
        return
    futures = [thread_pool(threads - 1).submit(worker, block) for _ in range(threads - 1)]
    worker(block)
    wait(futures)
