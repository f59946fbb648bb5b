"""Run a compiled function on several threads, which claim its tasks from a shared counter.

Kernels run on PyTorch's own OpenMP threads: a parallel region of the library that PyTorch has loaded starts in a few
microseconds and does not oversubscribe the cores. Without OpenMP (Windows, some builds for macOS) a thread pool is
used. A forked process has neither, and `dispatch.forking` leaves it one thread.
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
    """`GOMP_parallel`, which GNU's, LLVM's and Intel's OpenMP libraries export, from the library that PyTorch uses.
    Other packages may have loaded another one, so the lookup follows the dynamic linker's order for `libtorch_cpu`:
    first the global symbols of the process, then the dependencies of the library.
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
    """Call `worker`, a `WORKER`, on `threads` threads and wait for all of them, with the GIL released."""
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
