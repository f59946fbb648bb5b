"""Differences between the supported versions of Triton, in which Gluon is experimental; and the kernel decorators."""

from typing import Any

import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import tma

from ....gpu import grouped
from ....gpu.grouped import Language

# Types of parameters, and the languages of kernels (`backend.gpu.grouped`).
Pointer, Scalar = gl.pointer_type, gl.tensor
GLUON = Language(gluon.jit, Pointer, Scalar, gl.constexpr)
TRITON = Language(triton.jit, Pointer, Scalar, gl.constexpr)

# Synchronizes the threads of one warp-specialized partition.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

# TMA transfers of one box.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@_core.builtin
def _tma_reduce_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """`tma.async_atomic_add` for versions that have the instruction but no function for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


tma_reduce_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _tma_reduce_add


@_core.builtin
def reinterpret_smem(smem: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """View shared memory with another dtype, shape and layout; the method is private in some versions."""
    unwrap = _core._unwrap_if_constexpr
    return _semantic.memdesc_reinterpret(smem, unwrap(dtype), [unwrap(n) for n in shape], unwrap(layout))


def kernel(function: Any) -> Any:
    """Make the kernel to launch of a function in Gluon whose parameters are grouped in NamedTuples."""
    return grouped.kernel(function, GLUON)


def triton_kernel(function: Any) -> Any:
    """The same for kernels in Triton's own language."""
    return grouped.kernel(function, TRITON)
