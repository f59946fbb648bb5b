"""The launch of forward for queries, keys and values of 8 bits."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....call import eight_bit
from ....call.call import Call, Tensors, lse_shape, new_rows
from ....call.device import describe_device
from ...gpu.captured import needs_wide_offsets
from ...gpu.kernel import Kernel
from ...gpu.pairs import pair_pointers, pair_scalars, with_contiguous_keys
from ...gpu.pointers import Described
from ...gpu.replay import Recorder
from ...replays import Results
from ...scalars import head_strides, head_terms, rows_last, score_units, window_numbers
from ..tile_config import ALIGN, MMA_M, PAGE_COLUMNS, EightBitForward, HeadDim
from . import KERNELS
from .block_lists import NO_LISTS, NO_POINTERS, mask_states, row_lists
from .descriptors import dense_descriptor, is_tma_aligned, pages_descriptor, ragged_descriptor
from .formulas import NO_INPUTS, formulas_of, launch_with, score_mod_functions
from .forward import ForwardResults, combine_splits, new_results, page_scalars, paged_seqlens
from .scheduler_args import query_group, scheduler_args
from .semaphores import tile_count_semaphore

FORWARD = Kernel(f"{KERNELS}.eight_bit.forward", "eight_bit_forward_kernel")


def launch_forward(recorder: Recorder, config: EightBitForward, call: Call) -> Results:
    """Record the launch of a forward pass."""
    t = Tensors.from_flat(recorder.inputs)
    call = call._replace(tensors=t)
    out = t.out
    if out is None or not is_tma_aligned(out) or (config.splits > 1 and any(n % ALIGN for n in out.stride()[:-1])):
        out = recorder.new(new_rows(t.q, t.q.shape[1], t.v.shape[-1], call.out_dtype))
    lse = recorder.new(t.q.new_empty(lse_shape(t.q), dtype=torch.float32))
    if t.q.numel() > 0:
        results = ForwardResults(out, lse, None)
        partials = results if config.splits == 1 else new_results(recorder, t.q, config, results)
        launch_tiles(recorder, config, call, partials)
        if config.splits > 1:
            combine_splits(recorder, config, partials, results)
    if t.out is None or t.out is out:
        return out, lse
    recorder.effect(Tensor.copy_, t.out, out)
    return t.out, lse


def launch_tiles(recorder: Recorder, config: EightBitForward, call: Call, results: ForwardResults) -> None:
    """Launch the kernel, for the results of all splits. Only whole rows have lists."""
    call = with_contiguous_keys(recorder, call)
    lists, of_lists = {**NO_POINTERS}, {**NO_LISTS}
    if config.splits == 1:
        lists, of_lists = row_lists(recorder, call, config.block_m, config.block_n, mask_states(recorder, call))
    masked = lists["mask_bits"] is None  # by a function in the kernel or a tensor
    t = call.tensors if masked else call.tensors._replace(mask=None)
    q, k, v = (recorder.op(rows_last, x) for x in t[:3])
    packed, paged = t.cu_seqlens_q is not None, t.page_table is not None
    make_descriptor = ragged_descriptor if packed else dense_descriptor
    describe_keys = pages_descriptor if paged else make_descriptor
    scales, strides = descales(call)
    pointers = {
        "q_desc": Described(q, make_descriptor, (MMA_M, config.head_dim.box)),
        "k_desc": Described(k, describe_keys, box_of_keys(config, config.head_dim)),
        "v_desc": Described(v, describe_keys, box_of_keys(config, config.head_dim_v)),
        "out_desc": Described(
            results.out, make_descriptor, (MMA_M, min(config.value_columns, config.epilogue_columns))
        ),
        "lse": results.lse,
        "tile_count_semaphore": recorder.op(partial(tile_count_semaphore, q.device, packed)),
        **{symbol: recorder.contiguous(x) for symbol, x in head_terms(t).items()},
        "sinks": recorder.contiguous(t.sinks),
        "cu_seqlens_q": recorder.contiguous(t.cu_seqlens_q),
        "cu_seqlens_k": None if paged else recorder.contiguous(t.cu_seqlens_k),
        "seqused_k": recorder.contiguous(paged_seqlens(recorder, t) if paged else t.seqused_k),
        "page_table": None if t.page_table is None else recorder.op(rows_last, t.page_table),
        **scales,
        **lists,
        **pair_pointers(t),
    }
    pairs = pair_scalars(t, 1)
    scheduling = scheduler_args(call, config)
    scheduling["num_tiles"] *= config.splits
    scalars: dict[str, Any] = {
        **scheduling,
        "stride_lse": scheduling["seqlen_q"],
        **score_units(call),
        **window_numbers(call),
        **head_strides(t, absent=0),
        **strides,
        **page_scalars(t),
        **of_lists,
        **{name: x for name, x in pairs.items() if name != "pair_align"},
        "num_heads": t.q.shape[1],
        "group": query_group(call),
        "num_splits": config.splits if config.splits > 1 else None,
        "CONFIG": config.compiled,
        "num_warps": 4,
    }
    programs = min(describe_device(t.q.device).cores, scheduling["num_tiles"])
    formula, mask = formulas_of(call)
    if formula is None or not masked:
        recorder.launch(FORWARD, pointers, programs, scalars | NO_INPUTS)
        return
    tensors = t.score_mod_tensors
    wide = any(needs_wide_offsets(x) for x in tensors)
    contiguous = tuple(x.dim() > 0 and (x.stride(-1) == 1 or x.shape[-1] <= 1) for x in tensors)
    functions = score_mod_functions(formula, mask, partial=False, wide=wide, contiguous=contiguous)
    launch_with(recorder, call, FORWARD, pointers, programs, scalars, functions)


def box_of_keys(config: EightBitForward, head_dim: HeadDim) -> tuple[int, int]:
    """Rows and columns of a box of k or v. In pages, a panel of shared memory has twice the columns of 16 bits."""
    if config.page_rows:
        return config.page_rows, min(head_dim.box, 2 * PAGE_COLUMNS)
    return config.block_n, head_dim.box


def descales(call: Call) -> tuple[dict[str, Tensor | None], dict[str, int | None]]:
    """Pointers and strides of the scales of heads."""
    t = call.tensors
    batch = t.q.shape[0] if t.cu_seqlens_q is None else t.cu_seqlens_q.shape[0] - 1
    heads = t.k.shape[-2 if call.layout != "dense" else 1]
    pointers: dict[str, Tensor | None] = {}
    strides: dict[str, int | None] = {}
    for name in ("q_descale", "k_descale", "v_descale"):
        x = getattr(t, name)
        pointers[name] = x
        strides |= {f"{name}_b": None, f"{name}_h": None}
        if x is not None:
            of_queries = name == "q_descale"
            view = (
                eight_bit.query_scales(x, t.q, heads, batch)
                if of_queries
                else eight_bit.key_scales(x, t.k, batch, call.layout)
            )
            assert view is not None  # `call.check` refuses others
            place = 1 if of_queries else 3
            strides[f"{name}_b"] = view.stride(0) if view.shape[0] > 1 else 0
            strides[f"{name}_h"] = view.stride(place)
    return pointers, strides
