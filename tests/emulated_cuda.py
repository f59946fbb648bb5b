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

from flashtile.ladder import cuda_launch, step03_cpp
from flashtile.ladder.cuda_compile import FOLDER, Source

HEADER = Path(__file__).parent / "cuda_emulation" / "emulation.h"
ORDERS = {"forward": 0, "backward": 1, "shuffled": 2}
needs_compiler = pytest.mark.skipif(step03_cpp.compiler() is None, reason="there is no C++ compiler")


class EmulationError(RuntimeError):
    """The kernel did what no GPU allows: threads that wait for ever, an address that is not aligned, ..."""


@functools.cache
def compiled(source: Source, name: str, shared_bytes: int) -> ctypes.CDLL:
    """A library with the kernel and one function, `run`, that launches it.

    An array of dynamic shared memory becomes one of the size that the launch says.
    """
    path = step03_cpp.compiler()
    assert path is not None
    with tempfile.TemporaryDirectory() as folder:
        file, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        launcher = f"return emulated::launch({name}, arguments, sizes, order);"
        signature = 'extern "C" const char* run(void** arguments, const int* sizes, int order)'
        text = re.sub(
            r"extern (__shared__ .*?)(\w+ \w+)\[\];", rf"\1\2[{shared_bytes} / 2];", source.text
        )  # 16 bits each
        file.write_text(f"{text}\n{signature} {{ {launcher} }}\n")
        macros = [f"-D{macro}={value}" for macro, value in source.macros]
        if not any(macro == "HALF" for macro, _ in source.macros):  # the header's own functions need one
            macros.append("-DEMULATED_HALF=f16")
        command = [path, "-std=c++14", "-O1", "-w", "-fPIC", "-shared", f"-I{FOLDER}", "-include", str(HEADER), *macros]
        done = subprocess.run([*command, str(file), "-o", str(library)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        loaded = ctypes.CDLL(str(library))
        loaded.run.restype = ctypes.c_char_p
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
    library = compiled(source._replace(flags=()), name, shared_bytes)
    problem = library.run(pointers, (ctypes.c_int * 4)(*grid, *block), ORDERS[order])
    if problem is not None:
        raise EmulationError(problem.decode())


@contextmanager
def emulation(order: str = "forward") -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_launch, "unavailable", lambda device: None)
        patch.setattr(cuda_launch, "launch", functools.partial(launch, order))
        yield
