"""The launch that appends and rotates the new tokens of a KV-cache call."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ....call.cache import writes_descales
from ....call.cache_tensors import CacheTensors, RotarySettings
from ....call.call import Call, new_rows
from ....call.eight_bit import FORMATS
from ....call.problem import power_of_two
from ...gpu.kernel import Kernel
from ...gpu.replay import Recorder
from ...scalars import rows_last, strides
from ..constants import AppendConstants
from . import KERNELS, eight_bit
from . import arguments as args

APPEND = Kernel(f"{KERNELS}.append", "append_kernel")


def append_and_rotate(recorder: Recorder, call: Call, cache: CacheTensors, rotary: RotarySettings) -> Call:
    """Record the launch of `append_kernel`: `flashtile.call.cache.append_and_rotate` in one kernel. Tensors belong to
    the recorder.
    """
    t = call.tensors
    assert t.page_table is not None
    q = recorder.op(rows_last, t.q)
    given = (cache.k, cache.v, cache.rotary_cos, cache.rotary_sin)
    new_k, new_v, cos, sin = (None if x is None else recorder.op(rows_last, x) for x in given)
    rotated_q = None if cos is None else recorder.new(new_rows(t.q, q.shape[1], q.shape[-1], q.dtype))
    pointers = {
        "q": q,
        "rotated_q": rotated_q,
        "k_cache": eight_bit.key_pointer(t.k),
        "v_cache": eight_bit.key_pointer(t.v),
        "new_k": new_k,
        "new_v": new_v,
        "cos": cos,
        "sin": sin,
        "rotary_start": None if cos is None else cache.rotary_start,
        "lengths": cache.cache_seqlens,
        "totals": t.seqused_k if new_k is not None and t.cu_seqlens_q is None else None,
        "page_table": recorder.op(rows_last, t.page_table),
        "cu_seqlens_q": t.cu_seqlens_q,
        "seqused_q": None,
        **eight_bit.scale_pointers(t),
    }
    scalars = append_scalars(call, pointers) | append_constants(call, cache, rotary)
    programs = scalars["num_tiles"] * (scalars["num_heads_q"] + scalars["num_heads_k"]) * args.dense_batch(q)
    recorder.launch(APPEND, pointers, programs, scalars)
    return call if rotated_q is None else call._replace(tensors=t._replace(q=rotated_q))


def append_scalars(call: Call, given: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars of `append_kernel`. Keys and values of `call` are pages, also in a dense cache."""
    t = call.tensors
    packed = t.cu_seqlens_q is not None
    q, table, cos, sin, new_k = given["q"], given["page_table"], given["cos"], given["sin"], given["new_k"]
    assert q is not None
    assert table is not None
    queries = q.shape[0] if packed else q.shape[2]
    appended = 0 if new_k is None else queries if packed else new_k.shape[2]
    batch = table.shape[0]
    return {
        **strides("q", q, 1),
        **optional_strides("rotated_q", given["rotated_q"]),
        **optional_strides("new_k", new_k),
        **optional_strides("new_v", given["new_v"]),
        **{f"stride_k_cache_{dim}": n for dim, n in zip(("page", "slot", "h"), t.k.stride()[:3], strict=True)},
        **{f"stride_v_cache_{dim}": n for dim, n in zip(("page", "slot", "h"), t.v.stride()[:3], strict=True)},
        "cos_stride": None if cos is None else cos.stride(0),
        "sin_stride": None if sin is None else sin.stride(0),
        "rotary_positions": None if cos is None else cos.shape[0],
        "stride_page_table_b": table.stride(0),
        "num_tiles": args.num_tiles(call, 1) if packed else max(queries, appended),
        "batch": batch,
        "num_heads_q": q.shape[1],
        "num_heads_k": args.num_heads_k(call),
        "total_q": queries if packed else max(queries, appended),
        "queries": queries,
        "appended": appended,
        "page_size": t.k.shape[1],
        "num_pages": t.k.shape[0],
        "num_columns": table.shape[1],
        **eight_bit.scale_strides(eight_bit.descales(t)),
    }


def append_constants(call: Call, cache: CacheTensors, rotary: RotarySettings) -> dict[str, Any]:
    """The compile-time constants of `append_kernel`, and Triton's options."""
    t, cos, written = call.tensors, cache.rotary_cos, writes_descales(cache)
    k_scales, v_scales = (
        "" if x is None else "token" if writes else "given"
        for x, writes in zip((t.k_descale, t.v_descale), written, strict=True)
    )
    compiled = AppendConstants(
        D=t.q.shape[-1],
        DV=t.v.shape[-1],
        BLOCK_D=power_of_two(t.q.shape[-1]),
        BLOCK_DV=power_of_two(t.v.shape[-1]),
        HALF=0 if cos is None else cos.shape[1],
        INTERLEAVED=cos is not None and rotary.interleaved,
        Q_FIXED=cos is not None and rotary.q_fixed,
        BLOCK_B=args.block_b(call),
        KEY_FORMAT=FORMATS.get(t.k.dtype, ""),
        K_SCALES=k_scales,
        V_SCALES=v_scales,
    )
    return {"CONFIG": compiled, "num_warps": 1}


def optional_strides(name: str, x: Tensor | None) -> dict[str, Any]:
    return {f"stride_{name}_{dim}": None for dim in "bhm"} if x is None else strides(name, x, 1)
