"""The CPU backend's entries: results are allocated, arguments packed, a kernel is run on PyTorch's threads."""

import ctypes
import functools

import torch
from torch import Tensor

from ...call import Call, new_rows
from ...plan import Plan
from ...problem import accumulation_dtype
from ..common.softmax import merge
from . import arguments as args
from . import forward as forward_pass
from . import targets, threads, workspace
from .jit import function_address
from .targets import Target
from .variant import Variant


@functools.lru_cache(maxsize=1024)
def forward_address(variant: Variant, target: Target) -> int:
    return function_address(forward_pass.source(variant, target), forward_pass.NAME, target)


def forward(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    q, k, v = (args.rows_last(x) for x in call.tensors[:3])
    real = accumulation_dtype(q.dtype)
    out = new_rows(q, q.shape[1], v.shape[-1], q.dtype)
    lse = q.new_empty(q.shape[:-1] if q.dim() == 4 else (q.shape[1], q.shape[0]), dtype=real)
    target = targets.host()
    variant = args.variant_of(call, target, plan.tile.rows)
    values, alive = args.inputs(call, variant, q, k, v)
    rows = variant.vectors * target.vector_bytes // (8 if real is torch.float64 else 4)
    panels = -(-plan.tile.rows // rows)
    lengths = args.lengths(call, values["num_heads_kv"], values["groups"], panels * rows)
    splits = call.settings.num_splits or plan.num_splits
    if splits > 1:
        partial_out, partial_lse = lse.new_empty((splits, *lse.shape, v.shape[-1])), lse.new_empty((splits, *lse.shape))
        values |= {"partial_out": partial_out.data_ptr(), "partial_lse": partial_lse.data_ptr()}
    work_size = workspace.size(variant.real, rows, panels, q.shape[-1], v.shape[-1])
    values |= {
        **args.strides("out", out),
        "out": out.data_ptr(),
        "lse": lse.data_ptr(),
        "lse_b": lse.stride(0) if lse.dim() == 3 else 0,
        "lse_h": lse.stride(-2),
        "lse_s": 1,
        "seqlen_total": lse.numel(),
        "sequences": lengths.table.ctypes.data,
        "tasks": lengths.tasks * splits,
        "batch": lengths.batch,
        "panels": panels,
        "splits": splits,
        "chunk": args.chunk(lengths.longest, splits),
        "work_size": work_size,
    }
    run(forward_address(variant, target), values)
    if splits > 1:
        merged, merged_lse = merge(partial_out.unbind(), partial_lse[..., None].unbind())
        out.copy_(merged if out.dim() == 4 else merged.transpose(0, 1))
        lse.copy_(merged_lse[..., 0])
    if q.dim() == 3 and lengths.covered < q.shape[0]:  # tokens of no sequence
        out[lengths.covered :] = 0
        lse[:, lengths.covered :] = -torch.inf
    del alive
    return out, lse


def run(address: int, values: dict) -> None:
    count = min(torch.get_num_threads(), values["tasks"])
    if count == 0:
        return
    memory = torch.empty(count * values["work_size"], dtype=torch.uint8)
    counters = (ctypes.c_int64 * 16)()  # of tasks taken and, on a cache line of its own, of threads
    values |= {"workspace": memory.data_ptr(), "counter": ctypes.addressof(counters)}
    block = args.block_of(values)
    threads.run(address, ctypes.addressof(block), count)
