"""The launch of forward for queries, keys and values of 8 bits."""

from dataclasses import replace

import torch
from torch import Tensor

from ....call import eight_bit
from ....call.call import Call, Tensors, lse_shape, new_rows
from ...gpu.kernel import Kernel
from ...gpu.pairs import pair_pointers, pair_scalars, row_align, with_contiguous_keys
from ...gpu.replay import Recorder
from ...replays import Results
from ..tile_config import ALIGN, EightBitForward
from . import KERNELS
from .block_lists import NO_LISTS, NO_POINTERS, mask_states, row_lists
from .descriptors import is_tma_aligned
from .formulas import launch_with_formulas
from .forward import ForwardResults, combine_splits, launch_scalars, new_results, page_scalars, tile_pointers

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
    scales, strides = descales(call)
    pointers = tile_pointers(recorder, call, config, results, config.value_columns)
    programs, scalars = launch_scalars(call, config)
    pairs = {**pair_scalars(t, row_align(t))}
    if (align := pairs.pop("pair_align")) > 1:
        scalars["CONFIG"] = replace(scalars["CONFIG"], pair_align=align)
    scalars |= {**strides, **page_scalars(t), **of_lists, **pairs}
    pointers |= {**scales, **lists, **pair_pointers(t)}
    launch_with_formulas(recorder, call, FORWARD, pointers, programs, scalars)


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
