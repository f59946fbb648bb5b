"""The forward pass of float32, and rows in bfloat16 parts for the kernels of both passes."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....call.call import Call, Tensors, lse_shape, new_rows
from ....call.device import describe_device
from ...gpu.kernel import Kernel
from ...gpu.pointers import Described, Pointers
from ...gpu.precision import allows_tf32
from ...gpu.replay import Recorder, Results
from ...scalars import score_units, strides, window_numbers
from ..tile_config import ALIGN, MMA_M, OVERLAPPING, Constexpr, Float32Forward, HeadDim
from . import KERNELS
from .descriptors import dense_descriptor, is_tma_aligned, ragged_descriptor, tma_aligned
from .scheduler_args import query_group, scheduler_args
from .semaphores import tile_count_semaphore

FORWARD = Kernel(f"{KERNELS}.float32.forward", "float32_forward_kernel")
SPLIT = Kernel(f"{KERNELS}.float32.split_rows", "split_rows_kernel")
PARTS, PARTS_IF_TF32 = 3, 2  # parts of a number; fewer where PyTorch allows TF32, which has 11 bits: two have 16


@dataclass(frozen=True)
class SplitRows(Constexpr):
    """Kernel that splits `block_m` rows a program."""

    head_dim: HeadDim
    block_m: int = 32
    align: int = ALIGN


def launch_forward(recorder: Recorder, config: Float32Forward, call: Call) -> Results:
    """Record the launches of a forward pass."""
    t = Tensors.from_flat(recorder.inputs)
    q, k, v = t[:3]
    out = t.out
    if out is None or not is_tma_aligned(out):
        out = recorder.new(new_rows(t.q, q.shape[1], v.shape[-1], q.dtype))
    lse = recorder.new(q.new_empty(lse_shape(q), dtype=torch.float32))
    packed = t.cu_seqlens_q is not None
    describe = ragged_descriptor if packed else dense_descriptor
    config, box = config.with_parts(num_parts()), config.head_dim.box
    q_parts, k_parts, v_parts = split_rows(recorder, (q, k, v), config.head_dim)
    pointers = {
        "q_desc": Described(q_parts, describe, (MMA_M, box)),
        "k_desc": Described(k_parts, describe, (config.block_n, box)),
        "v_desc": Described(v_parts, describe, (config.block_n, box)),
        "out": out,
        "lse": lse,
        "tile_count_semaphore": recorder.op(partial(tile_count_semaphore, q.device, packed)),
        "cu_seqlens_q": recorder.contiguous(t.cu_seqlens_q),
        "cu_seqlens_k": recorder.contiguous(t.cu_seqlens_k),
        "seqused_k": recorder.contiguous(t.seqused_k),
    }
    scheduling = scheduler_args(call._replace(tensors=t), config)
    units = score_units(call)
    scalars = {
        **strides("out", out, ALIGN),
        **scheduling,
        "stride_lse": scheduling["seqlen_q"],
        **window_numbers(call),
        "factor": units["factor"],
        "multiplier": units["multiplier"],
        "columns": config.head_dim.columns_of(v),
        "num_heads": q.shape[1],
        "group": query_group(call._replace(tensors=t)),
        "CONFIG": config.compiled,
        "num_warps": 4,
        **OVERLAPPING,
    }
    programs = min(describe_device(q.device).cores, scheduling["num_tiles"])
    recorder.launch(FORWARD, pointers, programs, scalars)
    if t.out is None or t.out is out:
        return out, lse
    recorder.effect(Tensor.copy_, t.out, out)
    return t.out, lse


def num_parts() -> int:
    return PARTS_IF_TF32 if allows_tf32() else PARTS


def split_rows(recorder: Recorder, inputs: tuple[Tensor, ...], head_dim: HeadDim) -> tuple[Tensor, ...]:
    """The parts of the rows of q, k, v and, in backward, dout, side by side, each padded with zeros to the width."""
    rows = tuple(recorder.op(tma_aligned, x) for x in inputs)
    parts = tuple(recorder.new(new_parts(x, head_dim)) for x in rows)
    config = SplitRows(head_dim)
    pointers: Pointers = {"dout": None, "dout_parts": None}
    scalars: dict[str, Any] = dict.fromkeys(f"stride_dout_{dim}" for dim in "bhm")
    programs = 0
    for name, x, y in zip(("q", "k", "v", "dout"), rows, parts, strict=False):
        batch, heads, seqlen = sizes_of(x)
        pointers |= {name: x, f"{name}_parts": y}
        scalars |= strides(name, x, ALIGN)
        programs += batch * heads * -(-seqlen // config.block_m)
    (batch, num_heads_q, seqlen_q), (_, num_heads_k, seqlen_k) = sizes_of(rows[0]), sizes_of(rows[1])
    scalars |= {
        "batch": batch,
        "num_heads_q": num_heads_q,
        "num_heads_k": num_heads_k,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "columns": rows[0].shape[-1] // ALIGN,
        "columns_v": rows[2].shape[-1] // ALIGN,
        "CONFIG": config,
        "num_warps": 4,
    }
    recorder.launch(SPLIT, pointers, programs, scalars)
    return parts


def sizes_of(x: Tensor) -> tuple[int, int, int]:
    """Sequences, heads and rows of `[B, H, S, D]`, or of packed `[T, H, D]` as one sequence."""
    return (1, x.shape[1], x.shape[0]) if x.dim() == 3 else tuple(x.shape[:3])  # type: ignore[return-value]


def new_parts(x: Tensor, head_dim: HeadDim) -> Tensor:
    """Memory for the parts of rows; a head's parts follow each other."""
    parts = x.new_empty((*sizes_of(x), head_dim.parts * head_dim.width), dtype=torch.bfloat16)
    return parts[0].transpose(0, 1) if x.dim() == 3 else parts
