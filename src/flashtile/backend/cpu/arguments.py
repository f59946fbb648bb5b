"""From a call to a kernel variant and an argument block: strides, scalars and addresses, 8 bytes each."""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...call import eight_bit
from ...call.call import HEAD_TERMS, Call, Needs, Tangents, Tensors, split_row_stats
from ...call.formulas import mask_formula, score_formula
from ...call.problem import accumulation_dtype
from ...expression import Formula
from ...expression.derivative import Load
from ...expression.program import TensorType, joined, type_of
from ..scalars import finite_softcap, head_strides, keep_scale, rows_last, strides_of, threshold
from . import targets
from .tables import GRADIENT_DIMENSIONS, UNLIMITED, stored_dtype
from .targets import Target
from .tile_config import TileConfig
from .variant import CAPTURED, FIELDS, REALS, Variant
from .workspace import CACHE_LINE

# Behind the fields: counters of tasks and of threads, each on a cache line of its own, since every thread adds to them.
# Behind those, where keys are split: the number of finished splits of each tile.
COUNTERS_INDEX = len(FIELDS) + CACHE_LINE // 8
ArgumentBlock = ctypes.c_int64 * (COUNTERS_INDEX + 2 * CACHE_LINE // 8)
LARGEST_OFFSET = 2**31 - 1
ZEROS = dict.fromkeys(FIELDS, 0)
# Optional inputs by field name, with their places among the tensors of a call.
PAIR_INPUTS = [(name, Tensors._fields.index(name)) for name in ("mask", "bias")]
HEAD_INPUTS = [*HEAD_TERMS.items(), ("sinks", Tensors._fields.index("sinks"))]
FIELD_INDEX = {name: n for n, name in enumerate(FIELDS)}
DTYPE_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def variant_of(call: Call, target: Target, rows: int) -> Variant:
    """The kernel variant for tasks of `rows` query rows. One vector is enough where the rows fit into it."""
    t, s = call.tensors, call.settings
    size = 8 if t.q.dtype is torch.float64 else 4
    needed = -(-rows * size // target.vector_bytes)
    return Variant(
        dtype=DTYPE_NAMES[t.q.dtype],
        vectors=1 if needed <= 1 else target.vectors,
        softcap=s.softcap is not None,
        bias=None if t.bias is None else DTYPE_NAMES[t.bias.dtype],
        head_terms=tuple([symbol for symbol, n in HEAD_TERMS.items() if t[n] is not None]),
        mask=t.mask is not None,
        formula=score_formula(call),
        mask_mod=mask_formula(call),
        wide=needs_wide_offsets(t.score_mod_tensors),
        dropout=s.dropout_p > 0,
        chunk=s.attention_chunk is not None,
        keys=eight_bit.FORMATS.get(t.k.dtype),
    )._replace(**scale_kinds(call))


def descales(call: Call) -> dict[str, Tensor]:
    """The scales of keys and values of 8 bits, as views `[B|1, num_pages|1, page_size|1, Hkv]`."""
    t, found = call.tensors, {}
    for name, x in (("k_descale", t.k_descale), ("v_descale", t.v_descale)):
        if x is not None and t.page_table is not None:
            view = eight_bit.scales_of_pages(x, t.k, t.page_table.shape[0], paged=True)
            assert view is not None
            found[name] = view
    return found


def scale_kinds(call: Call) -> dict[str, str]:
    """The fields `k_scales` and `v_scales` of a variant."""
    found = descales(call).items()
    return {f"{name[0]}_scales": "key" if x.shape[1] > 1 or x.shape[2] > 1 else "head" for name, x in found}


def scale_strides(call: Call) -> dict[str, int]:
    """Strides of scales; 0 of dimensions that a scale does not depend on."""
    return {
        f"{name}_{dim}": 0 if n == 1 else stride
        for name, x in descales(call).items()
        for dim, n, stride in zip("bpnh", x.shape, x.stride(), strict=True)
    }


def with_derivative(variant: Variant, call: Call, needs: Needs) -> Variant:
    """The variant for backward, whose formula has the score, its partial derivative by the unmodified score, and for
    each load with a gradient the partial derivative by the element, and its indices. Behind the captured tensors are
    the gradients that are requested.
    """
    formula, wanted = variant.formula, wanted_gradients(needs)
    if formula is None:
        return variant
    partials = formula.partials([n in wanted for n in range(len(formula.tensors))])
    types = [TensorType(variant.real_dtype, GRADIENT_DIMENSIONS + formula.tensors[n].ndim) for n in wanted]
    loads = [
        Load(len(formula.tensors) + wanted.index(x.tensor), 1 + x.partial, tuple(1 + n for n in x.indices))
        for x in partials.loads
    ]
    differentiated = Formula(joined(formula.program, partials.program), (*formula.tensors, *types))
    wide = variant.wide or any(call.tensors.score_mod_tensors[n].numel() > LARGEST_OFFSET for n in wanted)
    return variant._replace(formula=differentiated, loads=tuple(loads), wide=wide)


def with_tangents(variant: Variant, call: Call, tangents: Tangents) -> Variant:
    """The variant for forward mode, whose formula has the results of `pushforward`."""
    of_tensors = [x is not None for x in tangents.score_mod_tensors]
    moving = [name for name in ("q", "k", "v", "bias", "sinks") if getattr(tangents, name) is not None]
    moving += [symbol for symbol, n in HEAD_TERMS.items() if getattr(tangents, Tensors._fields[n]) is not None]
    moving += [CAPTURED] if any(of_tensors) else []
    formula = variant.formula
    return variant._replace(
        tangents=tuple(moving),
        formula=formula if formula is None else formula.pushforward(of_tensors),
        wide=variant.wide or needs_wide_offsets([x for x in tangents.score_mod_tensors if x is not None]),
    )


def wanted_gradients(needs: Needs) -> list[int]:
    """The numbers of the score_mod's tensors whose gradients are requested."""
    return [n for n, needed in enumerate(needs.score_mod_tensors) if needed]


def needs_wide_offsets(tensors: Sequence[Tensor]) -> bool:
    """Whether an element of a tensor has an offset of more than 32 bits."""
    return any(extent(x) > LARGEST_OFFSET for x in tensors)


def extent(x: Tensor) -> int:
    """The largest offset of an element, in elements."""
    return sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def decode_target(call: Call, tile: TileConfig) -> Target | None:
    """The target of the decode kernel, with the widest vectors that features fill, narrower ones than the processor's
    if need be; `None` if a task's query rows would fill more than half of such a vector.
    """
    if not tile.decodes:
        return None
    host, size = targets.host(), accumulation_dtype(call.tensors.q.dtype).itemsize
    width = host.vector_bytes
    while width >= targets.NARROWEST and 2 * tile.rows * size <= width:
        if all(x.shape[-1] * size % width == 0 for x in (call.tensors.q, call.tensors.v)):
            return host._replace(vector_bytes=width)
        width //= 2
    return None


def uses_matrix_tiles(call: Call, tile: TileConfig) -> bool:
    """Whether the forward kernel for such tasks multiplies matrix tiles."""
    t = call.tensors
    has_tiles = targets.host().tiles is not None and t.q.dtype is t.k.dtype is torch.bfloat16
    return has_tiles and decode_target(call, tile) is None


def whole_vectors(call: Call, x: Tensor) -> bool:
    """Whether a row of `x` is a whole number of vectors, in the accumulation dtype."""
    return x.shape[-1] % vector_lanes(call) == 0


def vector_lanes(call: Call) -> int:
    """Lanes of a vector in the accumulation dtype."""
    return targets.host().vector_bytes // accumulation_dtype(call.tensors.q.dtype).itemsize


def heads_kv(call: Call) -> int:
    return call.tensors.k.shape[1 if call.layout == "dense" else -2]


# Strides --------------------------------------------------------------------------------------------------------------


def strides(name: str, x: Tensor, paged: bool = False) -> dict[str, int]:
    """Strides of `[B, H, S, D]`, `[T, H, D]` or pages `[P, page_size, H, D]`: sequences (or pages), heads and rows."""
    batch, head, row = strides_of(x, paged)
    return {f"{name}_b": batch, f"{name}_h": head, f"{name}_s": row}


def lse_strides(q: Tensor, row_stats: Tensor) -> dict[str, int]:
    """Strides of row statistics, contiguous `[B, H, S]` or `[H, T]`, or `[2, ...]` with the residual of lse."""
    lse, residual = split_row_stats(q, row_stats)
    batch = lse.stride(0) if lse.dim() == 3 else 0
    strides = {"lse_b": batch, "lse_h": lse.stride(-2), "lse_s": 1, "seqlen_total": lse.numel()}
    return strides | {"residual": 0 if residual is None else row_stats.stride(0)}


def pair_strides(name: str, x: Tensor) -> dict[str, int]:
    """Strides of a mask or bias `[B|1, H|1, Sq|1, Sk|1]`: 0 along broadcast dimensions."""
    return {
        f"{name}_{dim}": 0 if n == 1 else stride for dim, n, stride in zip("bhij", x.shape, x.stride(), strict=True)
    }


# The argument block ---------------------------------------------------------------------------------------------------


def input_tensors(call: Call, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """The inputs by field name, in the dtypes that kernels read."""
    t: Any = call.tensors
    tensors = {"q": q, "k": k, "v": v}
    for name, n in PAIR_INPUTS:
        if (x := t[n]) is not None:
            tensors[name] = x
    for name, n in HEAD_INPUTS:
        if (x := t[n]) is not None:
            tensors[name] = x.detach().to(accumulation_dtype(q.dtype)).contiguous()
    if call.settings.dropout_p > 0 and t.dropout_seed is not None:
        tensors["seed"] = t.dropout_seed.to(torch.int64).contiguous()
    tensors |= descales(call)
    if t.page_table is not None:
        tensors["page_table"] = t.page_table.to(torch.int64).contiguous()
    return tensors


def captured_tensors(call: Call) -> list[Tensor]:
    """The tensors of the score_mod, in dtypes that kernels read."""
    return stored(call.tensors.score_mod_tensors)


def stored(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().to(getattr(torch, stored_dtype(type_of(x).dtype))) for x in tensors]


def tangent_tensors(call: Call, tangents: Tangents) -> dict[str, Tensor]:
    """The tangents of all inputs but captured tensors by field name, in the dtypes that kernels read."""
    given = {f"d{name}": getattr(tangents, name) for name in ("q", "k", "v", "bias")}
    found = {name: rows_last(x) if name != "dbias" else x for name, x in given.items() if x is not None}
    for name, n in HEAD_INPUTS:
        if (x := getattr(tangents, Tensors._fields[n])) is not None:
            found[f"d{name}"] = x.detach().to(accumulation_dtype(call.tensors.q.dtype)).contiguous()
    return found


def tangent_strides(call: Call, tensors: dict[str, Tensor]) -> dict[str, int]:
    """The strides of `tangent_tensors`."""
    paged, values = call.tensors.page_table is not None, dict[str, int]()
    for name, x in tensors.items():
        if name == "dbias":
            values |= pair_strides(name, x)
        elif name in ("dq", "dk", "dv"):
            values |= strides(name, x, paged and name != "dq")
        elif name != "dsinks":
            values[f"{name}_b"] = x.stride(0) if x.dim() == 2 else 0
    return values


def captured_table(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """The field with addresses, sizes and strides of the tensors of a score_mod (`captured.table_offsets`), if any. The
    tensors have to be named until the kernel returns.
    """
    entries = [n for x in tensors for n in (x.data_ptr(), *x.shape, *x.stride())]
    return {"captured": torch.tensor(entries)} if entries else {}


def call_scalars(call: Call, variant: Variant, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """The scalars that forward and backward share; the others are 0. They depend on shapes, strides and settings only,
    so that calls of one signature share an argument block.
    """
    t, s = call.tensors, call.settings
    paged, softcap = t.page_table is not None, finite_softcap(call)
    values = {
        **ZEROS,
        **strides("q", q),
        **strides("k", k, paged),
        **strides("v", v, paged),
        "num_heads_kv": heads_kv(call),
        "groups": q.shape[1] // heads_kv(call),
        "head_dim": q.shape[-1],
        "head_dim_v": v.shape[-1],
        "window_left": UNLIMITED if s.window_left is None else s.window_left,
        "window_right": UNLIMITED if s.window_right is None else s.window_right,
        "top_left": 0 if s.top_left else UNLIMITED,
        "attention_chunk": s.attention_chunk or 0,
        "diagonal": s.diagonal,
        "i0": s.i0,
        "j0": s.j0,
        "b0": s.b0,
        "h0": s.h0,
        "num_heads": call.num_heads,
        "page_size": 1,
        "factor": s.scale * variant.score_unit if softcap is None else s.scale / softcap,
        "scale": s.scale,
        "softcap_scale": 0 if softcap is None else softcap * variant.score_unit,
    }
    for name, x in (("mask", t.mask), ("bias", t.bias)):
        values |= {} if x is None else pair_strides(name, x)
    values |= {name.removeprefix("stride_"): stride for name, stride in head_strides(t, absent=0).items()}
    if s.dropout_p > 0:
        limit = threshold(s.dropout_p)
        values |= {"threshold": limit, "keep_scale": keep_scale(limit)}
    values |= scale_strides(call)
    if t.page_table is not None:
        values |= {"page_size": k.shape[1], "page_columns": t.page_table.shape[1]}
    return values


def pack(values: dict[str, Any]) -> Any:
    """The argument block with these scalars; addresses and counters are 0."""
    assert tuple(values) == FIELDS, f"no fields of the block: {values.keys() ^ set(FIELDS)}"
    for name in REALS.split():
        values[name] = struct.unpack("q", struct.pack("d", values[name]))[0]
    return ArgumentBlock(*values.values())


def with_fields(block: Any, values: dict[str, int]) -> Any:
    """A copy of the block with other values of some fields."""
    copy = copied(block)
    for name, x in values.items():
        copy[FIELD_INDEX[name]] = x
    return copy


def copied(block: Any) -> Any:
    return type(block).from_buffer_copy(block)


def with_counters(block: Any, count: int) -> Any:
    """A copy of the block with counters of the finished splits of `count` tiles."""
    copy = (ctypes.c_int64 * (len(ArgumentBlock()) + count))()
    ctypes.memmove(copy, block, ctypes.sizeof(ArgumentBlock))
    return copy
