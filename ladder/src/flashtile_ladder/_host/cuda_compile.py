"""Skip this file when you learn: it compiles step 9's sources while the program runs, by NVRTC or by nvcc.

Either compiles for a GPU that is not there: `cubin(source, arch=90)` needs no driver. NVRTC comes with PyTorch's CUDA
builds, and by itself with `pip install nvidia-cuda-nvrtc`; nvcc comes with the CUDA toolkit. The sources include no
header but their own, because NVRTC's wheel brings none.
"""

import contextlib
import ctypes
import ctypes.util
import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

FOLDER = Path(__file__).parents[1]
HEADER = "step09_instructions.cuh"


class CudaUnavailableError(RuntimeError):
    """Step 9 cannot run or compile here; the message says what is missing."""


class Source(NamedTuple):
    """A CUDA file of the package, by its path below it, and the choices made when it is compiled."""

    file: str
    macros: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()  # that NVRTC and nvcc both know
    replaced: tuple[str, str] | None = None  # a text of the file, and what takes its place: for showing bugs

    @property
    def text(self) -> str:
        text = (FOLDER / self.file).read_text(encoding="utf-8")
        if self.replaced is None:
            return text
        if text.count(self.replaced[0]) != 1:
            raise ValueError(f"{self.replaced[0]!r} is not there once in {self.file}")
        return text.replace(*self.replaced)

    @property
    def options(self) -> list[str]:
        return [*self.flags, *(f"-D{name}={value}" for name, value in self.macros)]


def source(file: str, *flags: str, replaced: tuple[str, str] | None = None, **macros: object) -> Source:
    """With these macros, and MINUS_INFINITY, which has no name without a header."""
    named = {name: str(value) for name, value in macros.items()} | {"MINUS_INFINITY": "__int_as_float(0xff800000)"}
    return Source(file, tuple(sorted(named.items())), flags, replaced)


@functools.cache
def cubin(source: Source, arch: int) -> bytes:
    """Machine code for compute capability `arch` / 10.

    Raises:
        CudaUnavailableError: there is no compiler, or it fails; the message has what it wrote.
    """
    if nvrtc() is not None:
        return by_nvrtc(source, arch)
    if nvcc() is not None:
        return by_nvcc(source, arch)
    raise CudaUnavailableError(
        "step 9 of the ladder compiles CUDA C++ and found no compiler: `pip install nvidia-cuda-nvrtc`, or a CUDA "
        "toolkit with nvcc on the PATH. All other steps run without."
    )


def by_nvrtc(source: Source, arch: int) -> bytes:
    library = nvrtc()
    assert library is not None
    program, text = ctypes.c_void_p(), source.text.encode()
    header = ctypes.c_char_p((FOLDER / HEADER).read_text(encoding="utf-8").encode())
    name = ctypes.c_char_p(HEADER.encode())
    succeed(
        library,
        library.nvrtcCreateProgram(
            ctypes.byref(program), text, source.file.encode(), 1, ctypes.byref(header), ctypes.byref(name)
        ),
    )
    try:
        options = [option.encode() for option in (f"--gpu-architecture=sm_{arch}", *source.options)]
        status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if status != 0:
            log = fetched(library, library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
            raise CudaUnavailableError(f"NVRTC did not compile {source.file}:\n{log.decode(errors='replace')}")
        return fetched(library, library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def fetched(library: ctypes.CDLL, size_of: Any, get: Any, program: ctypes.c_void_p) -> bytes:
    """A text of NVRTC's, by its two functions for one: the size, and the text."""
    size = ctypes.c_size_t()
    succeed(library, size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    succeed(library, get(program, buffer))
    return buffer.raw


def succeed(library: ctypes.CDLL, status: int) -> None:
    if status != 0:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CudaUnavailableError(f"NVRTC: {library.nvrtcGetErrorString(status).decode()}")


@functools.cache
def nvrtc() -> ctypes.CDLL | None:
    """The library, or `None`."""
    for path in nvrtc_paths():
        with contextlib.suppress(OSError):
            for builtins in Path(path).parent.glob("libnvrtc-builtins.so.*"):  # which NVRTC looks for by name alone
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(path)
    return None


def nvrtc_paths() -> Iterator[str]:
    """In Python's packages (PyTorch's CUDA builds require one of them), in a CUDA toolkit, in the system."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        found = sorted(map(str, Path(folder).glob("*/lib/libnvrtc.so.*")), reverse=True)
        major = (torch.version.cuda or "").partition(".")[0]  # the driver that is there takes this one's code
        yield from sorted(found, key=lambda path: not path.endswith(f".so.{major}"))
    for home in toolkits():
        yield from sorted(map(str, (home / "lib64").glob("libnvrtc.so.*")), reverse=True)
    found = ctypes.util.find_library("nvrtc")
    if found is not None:
        yield found


def toolkits() -> list[Path]:
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    return [Path(home) for home in homes if home]


def nvcc() -> str | None:
    """The path of the command, or `None`."""
    return shutil.which("nvcc") or next((found for h in toolkits() if (found := shutil.which(f"{h}/bin/nvcc"))), None)


def by_nvcc(source: Source, arch: int) -> bytes:
    path = nvcc()
    assert path is not None
    with tempfile.TemporaryDirectory(prefix="flashtile-ladder-") as folder:
        file, result = Path(folder) / Path(source.file).name, Path(folder) / "kernel.cubin"
        file.write_text(source.text, encoding="utf-8")
        command = [path, "-cubin", f"-arch=sm_{arch}", f"-I{FOLDER}", *source.options, "-o", str(result), str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise CudaUnavailableError(f"`{' '.join(command)}` failed:\n{done.stdout}{done.stderr}")
        return result.read_bytes()
