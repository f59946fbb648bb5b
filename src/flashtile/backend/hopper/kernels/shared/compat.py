"""Differences between the supported versions of Triton, in which Gluon is experimental; and the kernel decorators."""

import inspect
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import tma

from .....call.call import HEAD_TERMS

# Pointer arguments of all kernels; descriptors are named `*_desc`. `None` arguments are compiled away.
POINTERS = {
    "lse", "sinks", "tile_count_semaphore", "tile_count_semaphore_2", "dq_semaphore", "cu_seqlens_q", "cu_seqlens_k",
    "seqused_k", "partial_out", "partial_lse", "partial_residual", "residual", "out", "dout", "dlse", "neg_lse",
    "neg_residual", "neg_delta", "dq_accum", "dq", "dk", "dv",
    "splits", "dx", "lists", "table", "states", "bias", "mask", "mask_bits", "distance_table", "page_table",
    "seed", "dslopes",
    *HEAD_TERMS,
}  # fmt: skip

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


def is_pointer(name: str) -> bool:
    """Whether a kernel argument is a pointer or a TMA descriptor."""
    return name in POINTERS or name.endswith("_desc")


def kernel(function: Any) -> Any:
    """`gluon.jit` that does not specialize on scalars, so that new lengths or strides need no new compilation."""
    return gluon.jit(function, do_not_specialize=scalar_names(function))


def triton_kernel(function: Any) -> Any:
    """The same for kernels in Triton's own language."""
    return triton.jit(function, do_not_specialize=scalar_names(function))


def scalar_names(function: Any) -> list[str]:
    """Names of a kernel's arguments that are neither constexpr nor pointers."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.annotation is not gl.constexpr and not is_pointer(p.name)]
