"""Step 9's kernels without a GPU: compiled as C++ with cuda_emulation/emulation.h, run block by block on CPU tensors.

`emulation` puts this in the place of step 9's compiler and driver, so that `attention` of a step runs as it stands.
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

import pytest
from torch import Tensor

from flashtile_ladder._host import cpp as step03_cpp
from flashtile_ladder._host import cuda_launch
from flashtile_ladder._host.cuda_compile import FOLDER, Source

HEADER = Path(__file__).parent / "cuda_emulation" / "emulation.h"
KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\(.*?\) )?(\w+)\(")
IFDEF = re.compile(r"#ifdef (\w+)\n.*?#endif", re.DOTALL)  # of a macro that not all kernels of a file have
FLAGS = ("-std=c++14", "-O1", "-w", "-fPIC")
ORDERS = {"forward": 0, "backward": 1, "shuffled": 2}
needs_compiler = pytest.mark.skipif(step03_cpp.compiler() is None, reason="there is no C++ compiler")


class EmulationError(RuntimeError):
    """The kernel did what no GPU allows: threads that wait for ever, an address that is not aligned, ..."""


@functools.cache
def system_headers(path: str) -> tempfile.TemporaryDirectory[str]:
    """The system's headers that the emulation includes, precompiled: a third of the time of each kernel's."""
    folder = tempfile.TemporaryDirectory(prefix="flashtile-emulation-")
    header = Path(folder.name) / "system.h"
    header.write_text(
        "\n".join(line for line in HEADER.read_text().splitlines() if line.startswith("#include <")) + "\n"
    )
    done = subprocess.run([path, *FLAGS, "-x", "c++-header", header, "-o", f"{header}.gch"], capture_output=True)
    assert done.returncode == 0, done.stderr
    return folder


@functools.cache
def compiled(source: Source, shared_bytes: int) -> ctypes.CDLL:
    """A library with the source's kernels and for each a function, `run_` and its name, that launches it.

    An array of dynamic shared memory becomes one of the size that the launch says.
    """
    path = step03_cpp.compiler()
    assert path is not None
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
        done = subprocess.run([*command, str(file), "-o", str(library)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
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
    assert all(x.is_contiguous() for x in given if isinstance(x, Tensor))
    values = [cuda_launch.as_c(x) for x in given]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
    run = getattr(compiled(source._replace(flags=()), shared_bytes), f"run_{name}")
    problem = run(pointers, (ctypes.c_int * 4)(*grid, *block), ORDERS[order])
    if problem is not None:
        raise EmulationError(problem.decode())


@contextmanager
def emulation(order: str = "forward") -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_launch, "unavailable", lambda device, dtype=None: None)
        patch.setattr(cuda_launch, "launch", functools.partial(launch, order))
        yield
