"""Gluon is an experimental part of Triton: what differs between the versions that this backend runs on stands here."""

import inspect
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Of all kernels, beside descriptors.
TENSORS = {"lse", "slopes", "sinks", "counter", "cu_seqlens_q", "cu_seqlens_k", "seqused_k"}

# Of the threads of one partition.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

# By the copy engine.
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_box = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


def is_tensor(name: str) -> bool:
    return name in TENSORS or name.endswith("_desc")


def kernel(function: Any) -> Any:
    """`gluon.jit` whose numbers are plain numbers: a new length or stride never compiles a new kernel. What is `None`
    is compiled away.
    """
    parameters = inspect.signature(function).parameters.values()
    numbers = [p.name for p in parameters if p.annotation is not gl.constexpr and not is_tensor(p.name)]
    return gluon.jit(function, do_not_specialize=numbers)
