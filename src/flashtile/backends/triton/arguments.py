"""From a call to the arguments of a kernel: pointers, strides, lengths and numbers, by the kernels' names for them."""

import math
from typing import Any

import torch
from torch import Tensor

from ...cache import CacheTensors
from ...call import Call
from ...problem import power_of_two
from .support import LONGEST
from .tables import Launch

LOG2E = math.log2(math.e)


def rows_last(x: Tensor) -> Tensor:
    """The tensor with contiguous features, which costs a copy if they were not."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def alignment(tensors: list[Tensor]) -> int:
    """The largest number of elements, up to 16 bytes, that divides every stride between rows."""
    bits = 16 // tensors[0].element_size()
    for x in tensors:
        for stride in x.stride()[:-1]:
            bits |= stride
    return bits & -bits


def inputs(call: Call, q: Tensor, k: Tensor, v: Tensor, align: int) -> dict[str, Any]:
    """What forward and backward kernels have in common. `q`, `k` and `v` have contiguous features."""
    paged = call.tensors.page_table is not None
    return {
        **rows("q", q, align),
        **rows("k", k, align, keys=True, paged=paged),
        **rows("v", v, align, keys=True, paged=paged),
        **features(call),
        **sequences(call),
        **chunks("D", q.shape[-1]),
        **chunks("DV", v.shape[-1]),
        "num_heads_q": q.shape[1],
        "num_heads_k": num_heads_k(call),
        "ALIGN": align,
        "PRECISION": precision(q.dtype),
    }


def tiled(launch: Launch, tiles: int) -> dict[str, int]:
    return {
        "num_tiles": tiles,
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
    }


def rows(name: str, x: Tensor, align: int, *, keys: bool = False, paged: bool = False) -> dict[str, Any]:
    """A tensor `[B, H, S, D]`, `[T, H, D]` or pages `[P, page_size, H, D]` with its strides between sequences (or
    pages), heads and rows, in units of `align`.
    """
    if paged:
        batch, row, head = x.stride()[:3]
    elif x.dim() == 4:
        batch, head, row = x.stride()[:3]
    else:
        batch, (row, head) = 0, x.stride()[:2]
    of = {"b": batch, "h": head, "n" if keys else "m": row}
    return {name: x} | {f"stride_{name}_{dim}": stride // align for dim, stride in of.items()}


def lse_rows(name: str, x: Tensor | None) -> dict[str, Any]:
    """One number a row: contiguous `[B, H, S]` or `[H, T]`."""
    if x is None:
        return {name: None, "stride_lse_b": None, "stride_lse_h": None}
    return {name: x, "stride_lse_b": x.stride(0) if x.dim() == 3 else 0, "stride_lse_h": x.stride(-2)}


def number_rows(x: Tensor) -> dict[str, Any]:
    """Two numbers a row, `[B, H, S, 2]` or `[H, T, 2]` as fp32, or one integer that holds both; strides in units of two
    rows, which lie on 16 bytes.
    """
    *batch, head, _, _ = x.stride()
    row_pair = 2 * x.shape[-1]
    batch_stride = batch[0] // row_pair if batch else 0
    return {"numbers": x, "stride_numbers_b": batch_stride, "stride_numbers_h": head // row_pair}


def lse_gradient(dlse: Tensor | None) -> dict[str, Any]:
    """A gradient of lse, with any strides."""
    if dlse is None:
        return {"dlse": None, "stride_dlse_b": None, "stride_dlse_h": None, "stride_dlse_m": None}
    *batch, head, row = dlse.stride()
    return {"dlse": dlse, "stride_dlse_b": batch[0] if batch else 0, "stride_dlse_h": head, "stride_dlse_m": row}


def chunks(prefix: str, width: int) -> dict[str, int]:
    """A width as one or two powers of two from 32 on: 96 is 64 + 32; 120 is better taken as 128. (16 columns would do,
    but ptxas miscompiles some matrix products that narrow on Hopper; `tests/offline` looks for that.)
    """
    least = 32
    first = max(least, 1 << (width.bit_length() - 1))
    rest = 0 if width <= first else max(least, power_of_two(width - first))
    if rest == first:
        first, rest = 2 * first, 0
    return {prefix: width, f"{prefix}0": first, f"{prefix}1": rest}


def pairs(name: str, x: Tensor | None) -> dict[str, Any]:
    """A mask or bias; broadcast rows and columns have no stride, broadcast sequences and heads one of 0."""
    if x is None:
        return {name: None} | {f"stride_{name}_{dim}": None for dim in "bhmn"}
    given = dict(zip("bhmn", zip(x.shape, x.stride(), strict=True), strict=True))
    found: dict[str, Any] = {name: x.view(torch.uint8) if x.dtype is torch.bool else x}
    for dim, (n, stride) in given.items():
        found[f"stride_{name}_{dim}"] = stride if n > 1 else None if dim in "mn" else 0
    return found


def features(call: Call) -> dict[str, Any]:
    """Everything that modifies scores, with the softmax's units (`scores`, `softmax`)."""
    t, s = call.tensors, call.settings
    # The softmax can take the scale where nothing stands between the product and the exponential.
    folded = t.bias is None and t.alibi_slopes is None and s.softcap is None and s.scale > 0
    slopes = t.alibi_slopes
    dropped = round(s.dropout_p * 65536)
    rows = next((x.shape[2] for x in (t.bias, t.mask) if x is not None and x.shape[2] > 1), 1)
    return {
        **pairs("mask", t.mask),
        **pairs("bias", t.bias),
        "rows_of_pairs": rows,
        "slopes": None if slopes is None else slopes.contiguous(),
        "stride_slopes_b": None if slopes is None else (slopes.shape[1] if slopes.dim() == 2 else 0),
        "factor": s.scale * LOG2E if folded else LOG2E,
        "multiplier": None if folded else s.scale,
        "softcap": s.softcap,
        "seed": t.dropout_seed if s.dropout_p > 0 else None,
        "threshold": dropped if s.dropout_p > 0 else None,
        "keep_scale": 65536 / max(65536 - dropped, 1) if s.dropout_p > 0 else None,
        "window_left": None if s.window_left is None else min(s.window_left, LONGEST),
        "window_right": None if s.window_right is None else min(s.window_right, LONGEST),
        "top_left": s.i0 - s.j0 if s.top_left else None,
        "diagonal": s.diagonal + s.i0 - s.j0,
        "i0": s.i0,
        "j0": s.j0,
        "b0": s.b0,
        "h0": s.h0,
        "num_heads": call.num_heads,
    }


def sequences(call: Call) -> dict[str, Any]:
    """Lengths: where sequences lie, how many positions each can have at most."""
    t, s = call.tensors, call.settings
    paged = t.page_table is not None
    packed = t.cu_seqlens_q is not None
    if t.cu_seqlens_q is not None:
        batch, total_q = t.cu_seqlens_q.shape[0] - 1, t.q.shape[0]
    else:
        batch, total_q = t.q.shape[0], t.q.shape[2]
    if t.page_table is not None:
        total_k = min(t.page_table.shape[1] * t.k.shape[1], LONGEST) if t.k.shape[0] > 0 else 0
    else:
        total_k = t.k.shape[0] if packed else t.k.shape[2]
    several_pages = t.page_table is not None and t.page_table.shape[1] > 1
    return {
        "cu_seqlens_q": t.cu_seqlens_q,
        "cu_seqlens_k": t.cu_seqlens_k if not paged else None,
        "seqused_k": used_keys(call) if paged else t.seqused_k,
        "page_table": None if t.page_table is None else rows_last(t.page_table),
        "stride_table_b": None if t.page_table is None else rows_last(t.page_table).stride(0),
        "PAGE_SIZE": t.k.shape[1] if several_pages else 0,
        "num_pages": t.k.shape[0] if paged else None,
        "leftpad_k": t.leftpad_k,
        "batch": batch,
        "total_q": total_q,
        "total_k": total_k,
        "longest_k": total_k if s.max_seqlen_k is None else min(s.max_seqlen_k, LONGEST),
        "SEQUENCES": power_of_two(batch + 1) if packed else 1,
    }


def new_tokens(call: Call, cache: CacheTensors, q: Tensor, turned: Tensor | None) -> dict[str, Any]:
    """What `append.append_kernel` takes. Keys and values of `call` are pages, also of a dense cache."""
    t = call.tensors
    assert t.page_table is not None
    packed = t.cu_seqlens_q is not None
    new_k, new_v, cos, sin = (None if x is None else rows_last(x) for x in (cache.k, cache.v, cache.rotary_cos, cache.rotary_sin))
    batch = cache.cache_seqlens.shape[0]
    total_q = q.shape[0] if packed else q.shape[2]
    total_new = 0 if new_k is None else total_q if packed else new_k.shape[2]
    table = rows_last(t.page_table)
    return {
        **rows("q", q, 1),
        **optional_rows("turned", turned),
        **optional_rows("new_k", new_k),
        **optional_rows("new_v", new_v),
        "k_cache": t.k,
        "v_cache": t.v,
        **{f"stride_{dim}_k": stride for dim, stride in zip(("page", "slot", "head"), t.k.stride(), strict=False)},
        **{f"stride_{dim}_v": stride for dim, stride in zip(("page", "slot", "head"), t.v.stride(), strict=False)},
        "cos": cos,
        "sin": sin,
        "stride_cos": None if cos is None else cos.stride(0),
        "stride_sin": None if sin is None else sin.stride(0),
        "rotary_positions": None if cos is None else cos.shape[0],
        "lengths": cache.cache_seqlens,
        "page_table": table,
        "stride_table_b": table.stride(0),
        "cu_seqlens_q": t.cu_seqlens_q,
        "num_tiles": num_tiles(call, 1) if packed else max(total_q, total_new),
        "batch": batch,
        "num_heads_q": q.shape[1],
        "num_heads_k": num_heads_k(call),
        "total_q": total_q if packed else max(total_q, total_new),
        "queries": total_q,
        "appended": total_new,
        "page_size": t.k.shape[1],
        "num_pages": t.k.shape[0],
        "num_columns": table.shape[1],
        "D": q.shape[-1],
        "WIDTH": power_of_two(q.shape[-1]),
        "DV": t.v.shape[-1],
        "WIDTH_V": power_of_two(t.v.shape[-1]),
        "HALF": 0 if cos is None else cos.shape[1],
        "SEQUENCES": power_of_two(batch + 1) if packed else 1,
    }


def optional_rows(name: str, x: Tensor | None) -> dict[str, Any]:
    return {name: None} | {f"stride_{name}_{dim}": None for dim in "bhm"} if x is None else rows(name, x, 1)


def used_keys(call: Call) -> Tensor:
    """Keys of each paged sequence."""
    t = call.tensors
    if t.seqused_k is not None:
        return t.seqused_k
    assert t.cu_seqlens_k is not None
    return t.cu_seqlens_k.diff()


def num_tiles(call: Call, block: int, pack: int = 1) -> int:
    """Blocks of query rows: of each dense sequence, or of all packed ones and the tokens that belong to none."""
    t = call.tensors
    if t.cu_seqlens_q is None:
        return -(-t.q.shape[2] * pack // block)
    return -(-t.q.shape[0] * pack // block) + t.cu_seqlens_q.shape[0]


def num_key_tiles(call: Call, block: int) -> int:
    """Blocks of keys, likewise; one more where dropout makes blocks start before the first key."""
    t = call.tensors
    more = 1 if call.settings.dropout_p > 0 and call.settings.j0 % 8 else 0
    if call.layout == "varlen":
        assert t.cu_seqlens_k is not None
        return -(-t.k.shape[0] // block) + t.cu_seqlens_k.shape[0] * (1 + more)
    total = t.k.shape[2] if t.page_table is None else t.page_table.shape[1] * t.k.shape[1]
    return -(-total // block) + more


def num_heads_k(call: Call) -> int:
    return call.tensors.k.shape[1 if call.layout == "dense" else -2]


def dense_batch(x: Tensor) -> int:
    """Sequences that the grid counts; packed ones are found by the programs."""
    return x.shape[0] if x.dim() == 4 else 1


def lse_shape(q: Tensor) -> tuple[int, ...]:
    return tuple(q.shape[:-1]) if q.dim() == 4 else (q.shape[1], q.shape[0])


def pairs_shape(call: Call) -> tuple[int, int, int, int]:
    """`[B, H, Sq, Sk]` that a bias broadcasts to."""
    t, s = call.tensors, call.settings
    given = sequences(call)
    seqlen_q = t.q.shape[2] if t.cu_seqlens_q is None else t.q.shape[0] if s.max_seqlen_q is None else s.max_seqlen_q
    return given["batch"], t.q.shape[1], seqlen_q, min(given["longest_k"], given["total_k"])


def precision(dtype: torch.dtype) -> str:
    """How fp32 products are formed; PyTorch's own setting for matrix products decides."""
    exact = dtype is not torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"
