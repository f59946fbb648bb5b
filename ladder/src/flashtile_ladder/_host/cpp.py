"""Skip this file when you learn: it compiles step03_cpp.cpp and calls it.

Needs a C++ compiler: the one that CXX names, or c++, g++ or clang++ on the PATH. `attention` compiles on first use.
"""

import atexit
import ctypes
import functools
import math
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).parents[1] / "step03_cpp.cpp"
O2, O3 = ("-O2",), ("-O3", "-march=native")


class CompilerError(RuntimeError):
    """There is no C++ compiler, or it did not compile; the message says which."""


def compiler() -> str | None:
    """The path of the system's C++ compiler, or `None`."""
    return next((path for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if (path := found(name))), None)


def needed_compiler(what: str) -> str:
    """`compiler`, where there is no doing without."""
    path = compiler()
    if path is None:
        raise CompilerError(
            f"{what} compiles C++ and found no compiler: install one (c++, g++ or clang++ on the PATH), "
            "or name it in the environment variable CXX. All other steps run without."
        )
    return path


def found(name: str | None) -> str | None:
    return shutil.which(name) if name else None


@functools.cache
def library(flags: tuple[str, ...], text: str | None = None) -> ctypes.CDLL:
    """step03_cpp.cpp, or another text, compiled with these flags into a directory that goes when the process does.

    Raises:
        CompilerError: no compiler is found, or it fails.
    """
    path = needed_compiler("step 3 of the ladder")
    directory = tempfile.mkdtemp(prefix="flashtile-ladder-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    binary = Path(directory) / "step03.so"
    command = [path, "-std=c++17", *flags, "-fPIC", "-shared", "-x", "c++", "-", "-o", str(binary)]
    text = SOURCE.read_text(encoding="utf-8") if text is None else text
    result = subprocess.run(command, input=text, capture_output=True, text=True)
    if result.returncode != 0:
        raise CompilerError(f"`{' '.join(command)}` failed:\n{result.stderr}")
    return ctypes.CDLL(str(binary))


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, *,
    flags: tuple[str, ...] = O3, graph: bool = False, text: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`[N, d]` float32 tensors on the CPU to out `[N, d]` and lse `[N]`; by another text of the step's file, if given.

    Raises:
        CompilerError: there is no working C++ compiler.
        TypeError, ValueError: the tensors are not float32 on the CPU, or not of one shape.
    """
    q, k, v = (float32(x, q.shape) for x in (q, k, v))  # [N, d]
    n, d = q.shape
    out, lse = torch.full_like(q, math.nan), q.new_full((n,), math.nan)  # [N, d], [N]; what is not written shows
    size = c_size(n, d, causal, scale)
    if graph:
        library(flags, text).attention_graph(*pointers(q, k, v), *size, *pointers(out, lse, None, None, None, None))
    else:
        library(flags, text).attention_raw(*pointers(q, k, v), *size, *pointers(out, lse))
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, causal: bool = False,
    scale: float | None = None, *, flags: tuple[str, ...] = O3, graph: bool = False, text: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv `[N, d]`. With `graph=True` forward runs again, and its graph is walked back."""
    n, d = q.shape
    q, k, v, out, dout = (float32(x, q.shape) for x in (q, k, v, out, dout))  # [N, d]
    lse = float32(lse, q.shape[:1])  # [N]
    dq, dk, dv = (torch.zeros_like(q) for _ in range(3))  # [N, d]
    size = c_size(n, d, causal, scale)
    if graph:
        again = torch.empty_like(out), torch.empty_like(lse)
        library(flags, text).attention_graph(*pointers(q, k, v), *size, *pointers(*again, dout, dq, dk, dv))
    else:
        library(flags, text).backward_raw(*pointers(q, k, v, out, lse, dout), *size, *pointers(dq, dk, dv))
    return dq, dk, dv


def c_size(n: int, d: int, causal: bool, scale: float | None) -> tuple[Any, ...]:
    scale = 1 / math.sqrt(d) if scale is None else scale
    return ctypes.c_int64(n), ctypes.c_int64(d), int(causal), ctypes.c_float(scale)


def float32(x: Tensor, shape: torch.Size) -> Tensor:
    """Contiguous, and what the C++ code takes it for: it cannot tell."""
    if x.dtype is not torch.float32 or x.device.type != "cpu":
        raise TypeError(f"step 3 takes float32 tensors on the CPU; one is {x.dtype} on {x.device}")
    if x.shape != shape:
        raise ValueError(f"step 3 takes q, k, v of one shape [N, d]; q says {list(shape)}, one is {list(x.shape)}")
    return x.detach().contiguous()


def pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(None if x is None else x.data_ptr()) for x in tensors]
