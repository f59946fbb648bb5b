"""Skip this file when you learn: it loads step 9's machine code and launches it on PyTorch's stream.

The CUDA driver, `libcuda.so.1`, is called through ctypes. It comes with every GPU, so nothing has to be installed.
"""

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cuda_compile import CudaUnavailableError, Source, cubin

LEAST_CAPABILITY = (7, 5)  # of the compilers of CUDA 13, for kernels of float32
LEAST_CAPABILITY_16_BITS = (8, 0)  # for cp.async, products of 16 x 8 x 16, and conversions of pairs
MOST_HEADS = 65535  # blocks along y
emulated: Callable[..., None] | None = None  # takes launches in the driver's place: see emulation.py


def unavailable(device: torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    """Why kernels of this dtype do not run on the device; `None` if they do. (A compiler is asked for after.)"""
    if emulated is not None and device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"the tensors are on {device}: move them to an NVIDIA GPU, or run the emulation (--emulate)"
    if torch.version.hip is not None:
        return "this is a PyTorch for AMD GPUs"
    capability = torch.cuda.get_device_capability(device)
    least = LEAST_CAPABILITY if dtype is torch.float32 else LEAST_CAPABILITY_16_BITS
    if capability < least:
        return f"the GPU has compute capability {capability}, and kernels of {dtype} need {least}"
    return None


def gpu() -> torch.device:
    """The GPU that a program measures; without one it ends here."""
    problem = "there is no GPU" if not torch.cuda.is_available() else unavailable(torch.device("cuda"))
    if problem is not None:
        raise SystemExit(f"cannot run: {problem}")
    return torch.device("cuda")


class Call(NamedTuple):
    """Arguments of all kernels of step 9; heads of all sequences lie one after the other."""

    q: Tensor  # [heads, N, d], contiguous; or [N, d]
    k: Tensor  # [heads / group, N, d]
    v: Tensor
    out: Tensor  # as q
    lse: Tensor  # [heads, N], float32
    heads: int
    group: int  # query heads that share a key head
    scale: float
    causal: bool

    @property
    def n(self) -> int:
        return self.q.shape[-2]

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v, self.out, self.lse, self.group, self.n, self.scale, int(self.causal)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, *,
    head_dims: tuple[int, ...], dtypes: tuple[torch.dtype, ...],
) -> Call:  # fmt: skip
    """Check and allocate: q `[N, d]` with k, v of its shape, or q `[B, H, N, d]` with k, v `[B, H / group, N, d]`.

    Raises:
        CudaUnavailableError: the tensors are not on a GPU that runs these kernels.
        ValueError: shapes or dtypes that this step does not take.
    """
    reason = unavailable(q.device, q.dtype)
    if reason is not None:
        raise CudaUnavailableError(f"step 9 of the ladder is CUDA C++, which cannot run this call: {reason}")
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if q.ndim not in (2, 4) or k.shape != v.shape or k.ndim != q.ndim or q.shape[-2:] != k.shape[-2:]:
        raise ValueError(f"q, k, v are {shapes}; step 9 takes [N, d], or [B, heads, N, d], with one N for all")
    n, d = q.shape[-2:]
    if d not in head_dims or n == 0:
        raise ValueError(f"q, k, v are {shapes}; this kernel takes d in {head_dims}, N at least 1")
    batch, heads, heads_kv = (q.shape[0], q.shape[1], k.shape[1]) if q.ndim == 4 else (1, 1, 1)
    if q.ndim == 4 and (k.shape[0] != batch or heads_kv == 0 or heads % heads_kv):
        raise ValueError(f"q, k, v are {shapes}; query heads have to be a multiple of key heads, in one batch")
    if not 0 < batch * heads <= MOST_HEADS:
        raise ValueError(f"{batch} x {heads} heads; step 9 takes 1 to {MOST_HEADS} in all")
    found = {x.dtype for x in (q, k, v)}
    if len(found) != 1 or q.dtype not in dtypes:
        raise ValueError(f"q, k, v are {found}; this kernel takes one of {dtypes} for all")
    q, k, v = (aligned(x.detach().contiguous()) for x in (q, k, v))
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    scale = 1 / math.sqrt(d) if scale is None else float(scale)  # which tells `as_c` its type
    return Call(q, k, v, torch.empty_like(q), lse, batch * heads, heads // heads_kv, scale, causal)


def aligned(x: Tensor) -> Tensor:
    """At an address that is a multiple of 16, as `cp.async` wants it; a part of another tensor may not be."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


class Kernel(NamedTuple):
    """A compiled function on one GPU, and what it takes of it."""

    function: ctypes.c_void_p
    context: ctypes.c_void_p
    registers: int  # for each thread
    spilled_bytes: int  # for each thread: what found no room in registers
    shared_bytes: int  # for each block


@functools.cache
def driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaUnavailableError(f"step 9 of the ladder needs NVIDIA's driver: {error}") from error
    return library


def succeed(status: int) -> None:
    if status != 0:
        words = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(words))
        raise RuntimeError(f"CUDA: {words.value.decode() if words.value else status}")


@functools.cache
def kernel(source: Source, name: str, index: int) -> Kernel:
    """The function `name` of the source, compiled for GPU `index` and loaded there; once."""
    major, minor = torch.cuda.get_device_capability(index)
    code = cubin(source, 10 * major + minor)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    succeed(driver().cuInit(0))
    succeed(driver().cuDeviceGet(ctypes.byref(device), index))
    succeed(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))  # the one that PyTorch uses
    succeed(driver().cuCtxSetCurrent(context))
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    succeed(driver().cuModuleLoadData(ctypes.byref(module), code))
    succeed(driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    shared, local, registers = (attribute(function, number) for number in (1, 3, 4))
    return Kernel(function, context, registers, local, shared)


def attribute(function: ctypes.c_void_p, number: int) -> int:
    value = ctypes.c_int()
    succeed(driver().cuFuncGetAttribute(ctypes.byref(value), number, function))
    return value.value


STATIC_LIMIT = 48 * 1024  # bytes of shared memory that a block has without asking
MAX_DYNAMIC_SHARED_SIZE, MAX_SHARED_PER_BLOCK_OPTIN = 8, 97  # numbers of attributes, of a function and of a device


def launch(
    source: Source, name: str, grid: tuple[int, int], block: tuple[int, int], *arguments: Tensor | int | float,
    shared_bytes: int = 0,
) -> None:  # fmt: skip
    """Queue one launch on the current stream of the first argument's GPU.

    `shared_bytes` are those of the kernel's `extern __shared__` array.

    Raises:
        ValueError: more shared memory than the GPU allows a block.
    """
    device = next(x.device for x in arguments if isinstance(x, Tensor))
    if emulated is not None and device.type == "cpu":
        emulated(source, name, grid, block, *arguments, shared_bytes=shared_bytes)
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    loaded = kernel(source, name, index)
    values = [as_c(x) for x in arguments]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
    stream = ctypes.c_void_p(torch.cuda.current_stream(index).cuda_stream)
    succeed(driver().cuCtxSetCurrent(loaded.context))
    if loaded.shared_bytes + shared_bytes > STATIC_LIMIT:
        allow(loaded, shared_bytes, index)
    succeed(driver().cuLaunchKernel(loaded.function, *grid, 1, *block, 1, shared_bytes, stream, pointers, None))


def allow(loaded: Kernel, shared_bytes: int, index: int) -> None:
    """Ask for more than 48 KB of shared memory; a launch with it fails otherwise."""
    total, most = loaded.shared_bytes + shared_bytes, most_shared_bytes(torch.device("cuda", index))
    if total > most:
        raise ValueError(f"a block needs {total:,} bytes of shared memory, and this GPU allows it {most:,}")
    succeed(driver().cuFuncSetAttribute(loaded.function, MAX_DYNAMIC_SHARED_SIZE, shared_bytes))


def most_shared_bytes(device: torch.device) -> int:
    """Shared memory that a block of this GPU may ask for."""
    index = torch.cuda.current_device() if device.index is None else device.index
    ordinal, most = ctypes.c_int(), ctypes.c_int()
    succeed(driver().cuInit(0))
    succeed(driver().cuDeviceGet(ctypes.byref(ordinal), index))
    succeed(driver().cuDeviceGetAttribute(ctypes.byref(most), MAX_SHARED_PER_BLOCK_OPTIN, ordinal))
    return most.value


def as_c(x: Tensor | int | float) -> Any:
    """As the kernel declares it: a pointer, an int or a float."""
    if isinstance(x, Tensor):
        return ctypes.c_void_p(x.data_ptr())
    return ctypes.c_int(x) if isinstance(x, int) else ctypes.c_float(x)


def blocks(n: int, block: int) -> int:
    return (n + block - 1) // block
