"""Gluon is an experimental part of Triton: what differs between the versions that this backend runs on stands here."""

import inspect
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import tma

# Of all kernels, beside descriptors.
TENSORS = {
    "lse", "slopes", "sinks", "counter", "turns", "cu_seqlens_q", "cu_seqlens_k", "seqused_k",
    "out", "dout", "dlse", "start", "delta", "sums", "dq", "dk", "dv",
}  # fmt: skip

# Of the threads of one partition.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

# By the copy engine.
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_box = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@_core.builtin
def _add_box(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """What `tma.async_atomic_add` is, in versions that have the instruction and no name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


add_box = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _add_box


@_core.builtin
def same_memory(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Shared memory as if it had been allocated otherwise: a method whose name is private in some versions."""
    plain = _core._unwrap_if_constexpr
    return _semantic.memdesc_reinterpret(memory, plain(dtype), [plain(n) for n in shape], plain(layout))


def is_tensor(name: str) -> bool:
    return name in TENSORS or name.endswith("_desc")


def kernel(function: Any) -> Any:
    """`gluon.jit` whose numbers are plain numbers: a new length or stride never compiles a new kernel. What is `None`
    is compiled away.
    """
    return gluon.jit(function, do_not_specialize=numbers_of(function))


def triton_kernel(function: Any) -> Any:
    """The same in Triton's own language."""
    return triton.jit(function, do_not_specialize=numbers_of(function))


def numbers_of(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.annotation is not gl.constexpr and not is_tensor(p.name)]
