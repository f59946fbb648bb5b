"""The launches of latent attention: all query heads and queries of a sequence are rows of its only key head."""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ....call.call import Call, Tensors, lse_shape, new_rows
from ....call.eight_bit import is_by_key, scales_of_pages
from ....call.latent_rows import E4M3, LATENT, ROPE, SCALES
from ...gpu.kernel import Kernel
from ...gpu.pointers import Described, TmaDescriptor
from ...gpu.replay import Recorder
from ...replays import Results
from ...scalars import rows_last, score_units, strides, window_numbers
from ..tile_config import ALIGN, MMA_M, LatentBytesForward, LatentForward
from . import KERNELS, forward
from .descriptors import dense_descriptor, is_tma_aligned, pages_descriptor, tma_aligned
from .scheduler_args import room_for_keys

FORWARD = Kernel(f"{KERNELS}.latent.forward", "latent_forward_kernel")
BYTES = Kernel(f"{KERNELS}.latent_bytes.forward", "latent_bytes_kernel")
MERGE = Kernel(f"{KERNELS}.latent.merge", "merge_kernel")
MERGED_COLUMNS, MERGED_SPLITS = 128, 16  # columns of a program, and splits that it reads at once


def launch_forward(recorder: Recorder, config: LatentForward, call: Call) -> Results:
    """Record the launches of a forward pass."""
    t = Tensors.from_flat(recorder.inputs)
    call = call._replace(tensors=t)
    out = t.out
    if out is None or not is_tma_aligned(out):
        out = recorder.new(new_rows(t.q, t.q.shape[1], t.v.shape[-1], t.q.dtype))
    lse = recorder.new(t.q.new_empty(lse_shape(t.q), dtype=torch.float32))
    results = forward.ForwardResults(out, lse, None)
    rows = results if config.splits == 1 else forward.new_results(recorder, t.q, config, results)
    if t.k.dtype.itemsize == 1:
        launch_bytes(recorder, cast(LatentBytesForward, config), call, rows)
    else:
        launch_tiles(recorder, config, call, rows)
    if config.splits > 1:
        merge_splits(recorder, config, rows, results)
    if t.out is None or t.out is out:
        return out, lse
    recorder.effect(Tensor.copy_, t.out, out)
    return t.out, lse


def launch_tiles(recorder: Recorder, config: LatentForward, call: Call, results: forward.ForwardResults) -> None:
    """Launch the kernel, whose programs are a tile each, or a part of a tile's keys."""
    t, (batch, heads, seqlen_q, _) = call.tensors, call.tensors.q.shape
    q = recorder.op(partial(rows_of_all_heads, heads_inside(t.q)), t.q)
    k = recorder.op(rows_last, t.k)
    box = config.head_dim.box
    assert t.page_table is not None
    pointers = {
        "q_desc": Described(q, dense_descriptor, (MMA_M, box)),
        "k_desc": Described(k, pages_descriptor, (MMA_M, box)),
        "out": results.out,
        "lse": results.lse,
        "seqused_k": recorder.contiguous(forward.paged_seqlens(recorder, t)),
        "page_table": recorder.op(rows_last, t.page_table),
    }
    num_blocks = -(-heads * seqlen_q // MMA_M)
    scalars = {
        **scalars_of(config, call, results, num_blocks),
        "query_step": heads if heads_inside(t.q) else 1,
        "head_step": 1 if heads_inside(t.q) else seqlen_q,
    }
    recorder.launch(FORWARD, pointers, num_blocks * batch * config.splits, scalars)


def scalars_of(config: LatentForward, call: Call, results: forward.ForwardResults, num_blocks: int) -> dict[str, Any]:
    """The scalar arguments of both kernels."""
    batch, heads, seqlen_q, _ = call.tensors.q.shape
    units, window = score_units(call), window_numbers(call)
    return {
        **strides("out", results.out, ALIGN),
        **forward.page_scalars(call.tensors),
        "seqlen_q": seqlen_q,
        "seqlen_k": room_for_keys(call),
        "num_heads": heads,
        "num_blocks": num_blocks,
        "num_splits": config.splits if config.splits > 1 else None,
        "batch": batch,
        "window_right": window["window_right"],
        "diagonal": window["diagonal"],
        "factor": units["factor"],
        "multiplier": units["multiplier"],
        "CONFIG": config.compiled,
        "num_warps": 4,
    }


def launch_bytes(recorder: Recorder, config: LatentBytesForward, call: Call, results: forward.ForwardResults) -> None:
    """`launch_tiles` over rows of 8 bits."""
    t, (batch, heads, seqlen_q, _) = call.tensors, call.tensors.q.shape
    assert t.page_table is not None
    q, k = recorder.op(rows_last, t.q), t.k
    if config.packed:
        k = recorder.op(partial(Tensor.view, dtype=E4M3), k)
    scales = {"k_descale": t.k_descale, "v_descale": t.v_descale}
    views = {name: None if x is None else scales_of_pages(x, t.k, batch, paged=True) for name, x in scales.items()}
    config = replace(config, k_scales=kind_of(views["k_descale"]), v_scales=kind_of(views["v_descale"]))
    rest = (MMA_M, 2 * ROPE if config.packed else ROPE)
    pointers = {
        "q": q,
        "k_desc": Described(k, pages_descriptor, (MMA_M, LATENT // 4)),
        "rest_desc": Described(k, pages_descriptor, rest),
        "scales_desc": Described(k, row_by_row, (MMA_M, 4 * SCALES)) if config.packed else None,
        **scales,
        "out": results.out,
        "lse": results.lse,
        "seqused_k": recorder.contiguous(forward.paged_seqlens(recorder, t)),
        "page_table": recorder.op(rows_last, t.page_table),
    }
    num_blocks = -(-heads * seqlen_q // config.block_m)
    scalars = {
        **strides("q", q, ALIGN),
        **scale_strides(views),
        **scalars_of(config, call, results, num_blocks),
        "query_step": heads,
        "head_step": 1,
    }
    recorder.launch(BYTES, pointers, num_blocks * batch * config.splits, scalars)


def kind_of(view: Tensor | None) -> str:
    """ "head" or "key": what a scale is for."""
    return "" if view is None else "key" if is_by_key(view) else "head"


def scale_strides(views: dict[str, Tensor | None]) -> dict[str, int | None]:
    """Strides of scales `[B|1, num_pages|1, page_size|1, 1]`; 0 of dimensions that a scale does not depend on."""
    return {
        f"stride_{name}_{dim}": None if x is None else x.stride(n) if x.shape[n] > 1 else 0
        for name, x in views.items()
        for n, dim in enumerate("bpn")
    }


def row_by_row(x: Tensor, box: tuple[int, int]) -> TmaDescriptor:
    """`pages_descriptor` of boxes that are not swizzled."""
    return pages_descriptor(x, box)._replace(swizzled=False)


def merge_splits(
    recorder: Recorder,
    config: LatentForward,
    partials: forward.ForwardResults,
    results: forward.ForwardResults,
) -> None:
    """Launch the kernel that merges the splits' results."""
    batch, heads, seqlen_q, width = results.out.shape
    pointers = {"out": results.out, "lse": results.lse, "partial_out": partials.out, "partial_lse": partials.lse}
    scalars: dict[str, Any] = {
        **strides("out", results.out, ALIGN),
        "num_heads": heads,
        "seqlen_q": seqlen_q,
        "total_rows": batch * heads * seqlen_q,
        "num_splits": config.splits,
        "WIDTH": width,
        "COLUMNS": MERGED_COLUMNS,
        "SPLITS": MERGED_SPLITS,
        "ALIGN": ALIGN,
        "num_warps": 4,
    }
    recorder.launch(MERGE, pointers, batch * heads * seqlen_q * width // MERGED_COLUMNS, scalars)


def heads_inside(q: Tensor) -> bool:
    """Whether the heads of a position of `q [B, H, S, D]` follow each other in memory."""
    return q.shape[2] > 1 and q.stride(1) < q.stride(2)


def rows_of_all_heads(inside: bool, q: Tensor) -> Tensor:
    """`[B, 1, rows, D]` of `q [B, H, S, D]`, in the order in which memory has them: a view, if rows are equally far
    apart and aligned.
    """
    return tma_aligned((q.transpose(1, 2) if inside else q).flatten(1, 2).unsqueeze(1))
