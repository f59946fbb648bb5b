"""The launches of attention with a KV cache: append and rotate, then attention over pages."""

from functools import partial

import torch
from torch import Tensor

from ....call.cache import CacheCall, as_pages, descales_of_pages, paged_call, rows_in_order, rows_of_table
from ....call.cache_tensors import CacheTensors
from ....call.call import Call, Tensors
from ....call.latent_rows import is_packed
from ....call.plan import Plan
from ...gpu.replay import Recorder
from ...replays import Results
from .append import append_and_rotate
from .forward import launch_attention


def appendable(cache: CacheTensors, cu_seqlens_q: Tensor | None) -> bool:
    """Whether the kernel can write into the cache: its features are contiguous and not packed, it has sequences, and
    new keys are packed like the queries.
    """
    sizes = (*cache.cache_seqlens.shape, *(() if cache.page_table is None else cache.page_table.shape))
    contiguous = cache.k_cache.stride(-1) == 1 and cache.v_cache.stride(-1) == 1
    alike = cache.k is None or cache.k.dim() == (4 if cu_seqlens_q is None else 3)
    packed = cache.k is not None and is_packed(cache.k_cache)
    return contiguous and not packed and 0 not in sizes and alike and cache.cu_seqlens_k_new is None


def launch_append(recorder: Recorder, given: CacheCall) -> Results:
    """The queries, and the number of keys of each sequence after the call."""
    t = launch_before_attention(recorder, given).tensors
    return t.q, t.seqused_k


def attention_after(call: CacheCall, results: Results) -> Call:
    """The attention over pages that follows `launch_append`."""
    q, lengths = results
    assert q is not None
    batch = call.cache.cache_seqlens.shape[0]
    k, v, table = as_pages(call.cache, batch)
    k_descale, v_descale = descales_of_pages(call.cache, batch)
    tensors = call.tensors._replace(
        q=q, k=k, v=v, seqused_k=lengths, page_table=table, leftpad_k=call.cache.leftpad_k, k_descale=k_descale,
        v_descale=v_descale,
    )  # fmt: skip
    return Call(tensors, call.settings, is_plain_eager=call.is_plain_eager)


def launch_with_cache(recorder: Recorder, plan: Plan, given: CacheCall) -> Results:
    in_order = given.cache.page_table is None and given.cache.cache_batch_idx is None
    return launch_attention(recorder, plan, launch_before_attention(recorder, given), in_order=in_order)


def launch_before_attention(recorder: Recorder, given: CacheCall) -> Call:
    """Append and rotate; returns the attention that remains. Its tensors belong to the recorder."""
    here = len(Tensors._fields) - 1
    after = here + len(CacheTensors._fields)
    features = Tensors.from_flat((*recorder.inputs[:here], *recorder.inputs[after:]))
    cache = CacheTensors(*recorder.inputs[here:after])  # type: ignore[arg-type]
    call = paged_call(Call(features, given.settings), cache)
    t = call.tensors
    assert t.page_table is not None
    recorder.view(cache.k_cache, t.k)
    recorder.view(cache.v_cache, t.v)
    for base, view in ((cache.k_descale, t.k_descale), (cache.v_descale, t.v_descale)):
        if base is not None and view is not None:
            recorder.view(base, view)
    rows = cache.page_table if cache.page_table is not None else cache.cache_batch_idx
    if cache.page_table is not None and cache.cache_batch_idx is not None:
        t = t._replace(page_table=recorder.op(rows_of_table, cache.page_table, cache.cache_batch_idx))
    elif rows is not None:
        recorder.view(rows, t.page_table)
    else:
        batch, device = len(t.page_table), t.page_table.device
        t = t._replace(page_table=recorder.op(partial(rows_in_order, batch, device)))
    if cache.k is not None and features.cu_seqlens_q is not None:
        t = t._replace(seqused_k=recorder.op(total_of_packed, cache.cache_seqlens, features.cu_seqlens_q))
    elif cache.k is not None:
        t = t._replace(seqused_k=recorder.new(torch.empty_like(cache.cache_seqlens)))  # filled in by `append_kernel`
    call = call._replace(tensors=t)
    if cache.k is not None or cache.rotary_cos is not None:
        call = append_and_rotate(recorder, call, cache, given.rotary)
    return call


def total_of_packed(lengths: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """Keys of each sequence after the call: a packed call appends as many keys as it has queries."""
    return lengths + cu_seqlens_q.diff().long()
