"""Threads that compile parts of a kernel, or the kernel of the other pass, while this one compiles the rest.

LLVM holds no lock of Python, but llvmlite has one of its own around each function of LLVM, because modules may share a
context. Ours have contexts of their own, so `emit_object` makes machine code, which takes most of the time, without it.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import torch
from llvmlite import binding as llvm

MOST = 4  # threads
Result = TypeVar("Result")


class Threads:
    """Threads that begin work whose result is needed later. Without free ones, the thread that needs it does it."""

    def __init__(self, count: int):
        self.pool = ThreadPoolExecutor(count, "flashtile-compiler") if count else None

    def __enter__(self) -> "Threads":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def begin(self, function: Callable[..., Result], *arguments: Any) -> Callable[[], Result]:
        """Begin `function(*arguments)`; the returned function waits for its result."""
        if self.pool is None:
            return functools.partial(function, *arguments)
        future = self.pool.submit(function, *arguments)
        # What waits for a thread is done at once: no two threads wait for each other.
        return lambda: function(*arguments) if future.cancel() else future.result()


def free_threads() -> int:
    """Threads beside this one: as many as PyTorch may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST, cores, torch.get_num_threads()) - 1


def emit_object(machine: Any, module: Any) -> bytes:
    """`machine.emit_object(module)`, at the same time as other threads where llvmlite is as known: `machine` and the
    module's context are this thread's own.
    """
    library = llvm.ffi.lib
    emit = getattr(library.LLVMPY_TargetMachineEmitToMemory, "_cfn", None)  # without the lock (llvmlite 0.50)
    if emit is None:
        return machine.emit_object(module)  # type: ignore[no-any-return]
    with llvm.ffi.OutputString() as error:
        try:
            buffer = emit(machine, module, 1, error)
        except ctypes.ArgumentError:  # another version's arguments
            return machine.emit_object(module)  # type: ignore[no-any-return]
        if not buffer:
            raise RuntimeError(str(error))
    try:
        return ctypes.string_at(library.LLVMPY_GetBufferStart(buffer), library.LLVMPY_GetBufferSize(buffer))
    finally:
        library.LLVMPY_DisposeMemoryBuffer(buffer)
