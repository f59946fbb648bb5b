"""Skip this file when you learn: it runs step 9's kernels without a GPU.

They are compiled as C++ with emulation.h and run block by block on CPU tensors, each thread a fiber. Within `emulation`
this takes the place of step 9's compiler and driver, so that `attention` of a step runs as it stands. Needs a C++
compiler, and Linux.
"""

import ctypes
import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from . import cuda_launch
from .cpp import CompilerError, needed_compiler
from .cuda_compile import FOLDER, Source, source

HEADER = Path(__file__).parent / "emulation.h"
KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\(.*?\) )?(\w+)\(")
IFDEF = re.compile(r"#ifdef (\w+)\n.*?#endif", re.DOTALL)  # of a macro that not all kernels of a file have
FLAGS = ("-std=c++14", "-O1", "-w", "-fPIC")
ORDERS = {"forward": 0, "backward": 1, "shuffled": 2}


class EmulationError(RuntimeError):
    """The kernel did what no GPU allows: threads that wait for ever, an address that is not aligned, ..."""


@functools.cache
def system_headers(path: str) -> tempfile.TemporaryDirectory[str]:
    """The system's headers that emulation.h includes, precompiled: that saves a third of a kernel's compile time."""
    folder = tempfile.TemporaryDirectory(prefix="flashtile-emulation-")
    header = Path(folder.name) / "system.h"
    header.write_text(
        "\n".join(line for line in HEADER.read_text().splitlines() if line.startswith("#include <")) + "\n"
    )
    succeed([path, *FLAGS, "-x", "c++-header", str(header), "-o", f"{header}.gch"])
    return folder


def succeed(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise CompilerError(f"`{' '.join(command)}` failed:\n{done.stderr}")


@functools.cache
def compiled(source: Source, shared_bytes: int) -> ctypes.CDLL:
    """A library with the source's kernels and for each a function, `run_` and its name, that launches it.

    An array of dynamic shared memory becomes one of the size that the launch says.

    Raises:
        CompilerError: there is no C++ compiler, or it fails.
    """
    path = needed_compiler("the emulation of step 9's kernels")
    with tempfile.TemporaryDirectory() as folder:
        file, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        numbers = shared_bytes // 2  # of 16 bits
        text = re.sub(r"extern (__shared__ .*?\w+ \w+)\[\];", rf"\1[{numbers}];", source.text)
        names = KERNEL.findall(IFDEF.sub(lambda part: part[0] if part[1] in dict(source.macros) else "", text))
        launchers = [
            f'extern "C" const char* run_{name}(void** arguments, const int* sizes, int order) '
            f"{{ return emulated::launch({name}, arguments, sizes, order); }}"
            for name in names
        ]
        file.write_text("\n".join([text, *launchers, ""]))
        macros = [f"-D{macro}={value}" for macro, value in source.macros]
        if not any(macro == "HALF" for macro, _ in source.macros):  # the header's own functions need one
            macros.append("-DEMULATED_HALF=f16")
        includes = ["-include", f"{system_headers(path).name}/system.h", "-include", str(HEADER)]
        command = [path, *FLAGS, "-shared", f"-I{FOLDER}", *includes, *macros]
        succeed([*command, str(file), "-o", str(library)])
        loaded = ctypes.CDLL(str(library))
        for name in names:
            getattr(loaded, f"run_{name}").restype = ctypes.c_char_p
        return loaded


def launch(
    order: str,
    source: Source,
    name: str,
    grid: tuple[int, int],
    block: tuple[int, int],
    *given: Any,
    shared_bytes: int = 0,
) -> None:
    """Run all blocks of one launch, the threads in this order.

    Raises:
        EmulationError: the kernel did what no GPU allows.
    """
    assert all(x.is_contiguous() for x in given if isinstance(x, Tensor))
    values = [cuda_launch.as_c(x) for x in given]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
    run = getattr(compiled(source._replace(flags=()), shared_bytes), f"run_{name}")
    problem = run(pointers, (ctypes.c_int * 4)(*grid, *block), ORDERS[order])
    if problem is not None:
        raise EmulationError(problem.decode())


def run(
    text: str,
    name: str,
    grid: tuple[int, int],
    block: tuple[int, int],
    *given: Any,
    order: str = "forward",
    **macros: Any,
) -> None:
    """`launch` for a kernel of this text: tensors on the CPU, ints and floats are its arguments."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cu"
        file.write_text(text, encoding="utf-8")
        launch(order, source(str(file), **macros), name, grid, block, *given)


@contextmanager
def emulation(order: str = "forward") -> Iterator[None]:
    """Run step 9's launches here, on CPU tensors, the threads in this order."""
    before, cuda_launch.emulated = cuda_launch.emulated, functools.partial(launch, order)
    try:
        yield
    finally:
        cuda_launch.emulated = before
