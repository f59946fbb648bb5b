"""From a call to a kernel's variant and argument block."""

import ctypes
import functools
import math
import struct
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...call.call import Call, Needs
from ...call.problem import accumulation_dtype
from ..scalars import keep_scale, slopes_stride, strides_of, threshold
from .kernels.formats import ITEM_SIZES
from .kernels.tiles import SEQUENCE_FIELDS, UNLIMITED
from .targets import Target
from .variant import FIELDS, REALS, Variant
from .workspace import BLOCK_N, CACHE_LINE

COUNTERS_INDEX = (
    len(FIELDS) + CACHE_LINE // 8
)  # of tasks taken and of threads, behind a block on cache lines of their own
ArgumentBlock = ctypes.c_int64 * (COUNTERS_INDEX + 2 * CACHE_LINE // 8)
DTYPE_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def variant_of(call: Call, target: Target, rows: int) -> Variant:
    t, s = call.tensors, call.settings
    size = 8 if t.q.dtype is torch.float64 else 4
    needed = -(-rows * size // target.vector_bytes)
    return Variant(
        dtype=DTYPE_NAMES[t.q.dtype],
        vectors=1 if needed <= 1 else target.vectors,
        softcap=s.softcap is not None,
        bias=None if t.bias is None else DTYPE_NAMES[t.bias.dtype],
        alibi=t.alibi_slopes is not None,
        mask=t.mask is not None,
        dropout=s.dropout_p > 0,
    )


def heads_kv(call: Call) -> int:
    return call.tensors.k.shape[1 if call.layout == "dense" else -2]


def fits_decode(call: Call, variant: Variant, target: Target, rows: int) -> bool:
    """Whether a sequence's rows fill few lanes, and its features whole vectors (`decode`)."""
    lanes = target.vector_bytes // ITEM_SIZES[variant.real_dtype]
    widths = (call.tensors.q.shape[-1], call.tensors.v.shape[-1])
    return variant.vectors == 1 and 2 * rows <= lanes and all(n % lanes == 0 for n in widths)


MIN_BACKWARD_TASKS = 16  # tasks of a backward pass: with fewer, keys are split
WORK_PER_THREAD = 2**21  # products of two numbers: some 30 microseconds
MIN_SPLIT_KEYS = 256  # of a split
ZEROS = dict.fromkeys(FIELDS, 0)
FIELD_INDEX = {name: n for n, name in enumerate(FIELDS)}


class Lengths(NamedTuple):
    """The table of sequences (`tiles.SEQUENCE`), and what follows from it."""

    table: np.ndarray
    batch: int
    tasks: int
    max_seqlen_k: int  # keys
    max_rows: int  # of a sequence, packed
    used_tokens: int  # tokens of packed queries that belong to a sequence


def lengths(call: Call, heads_kv: int, groups: int, rows: int) -> Lengths:
    if call.layout == "dense":
        q, k = call.tensors.q, call.tensors.k
        return dense_lengths(q.shape[0], q.shape[2], k.shape[2], heads_kv, groups, rows)
    return packed_lengths(call, heads_kv, groups, rows)


def chunk(max_seqlen_k: int, splits: int) -> int:
    """Keys of a split, in whole blocks."""
    return -(-max_seqlen_k // (splits * BLOCK_N)) * BLOCK_N if splits > 1 else UNLIMITED


@functools.lru_cache(maxsize=256)
def dense_lengths(batch: int, seqlen_q: int, seqlen_k: int, heads_kv: int, groups: int, rows: int) -> Lengths:
    tiles = -(-seqlen_q * groups // rows)
    table = np.zeros((batch + 1, len(SEQUENCE_FIELDS)), dtype=np.int64)
    table[:, SEQUENCE_FIELDS.index("first_task")] = np.arange(batch + 1) * (tiles * heads_kv)
    table[:, SEQUENCE_FIELDS.index("seqlen_q")] = seqlen_q
    table[:, SEQUENCE_FIELDS.index("seqlen_k")] = seqlen_k
    return Lengths(table, batch, batch * tiles * heads_kv, seqlen_k, seqlen_q * groups, 0)


def packed_lengths(call: Call, heads_kv: int, groups: int, rows: int) -> Lengths:
    """Of packed or paged sequences; `cu_seqlens` and the rest are on the host, and checked."""
    t = call.tensors

    def to_numpy(x: Tensor) -> np.ndarray:
        return x.numpy().astype(np.int64)

    if t.cu_seqlens_q is None:  # a KV cache with dense queries
        batch = t.q.shape[0]
        q_first, seqlen_q = np.zeros(batch, dtype=np.int64), np.full(batch, t.q.shape[2], dtype=np.int64)
        used_tokens = 0
    else:
        bounds = to_numpy(t.cu_seqlens_q)
        q_first, seqlen_q, used_tokens = bounds[:-1], np.diff(bounds), int(bounds[-1])
        batch = len(q_first)
    k_first = np.zeros(batch, dtype=np.int64)
    seqlen_k = None if t.seqused_k is None else to_numpy(t.seqused_k)
    if t.cu_seqlens_k is not None and t.page_table is None:
        bounds = to_numpy(t.cu_seqlens_k)
        k_first, room = bounds[:-1], np.diff(bounds)
        seqlen_k = room if seqlen_k is None else np.minimum(seqlen_k, room)
    elif seqlen_k is None:
        assert t.cu_seqlens_k is not None
        seqlen_k = np.diff(to_numpy(t.cu_seqlens_k))
    tasks = -(-seqlen_q * groups // rows) * heads_kv
    table = np.zeros((batch + 1, len(SEQUENCE_FIELDS)), dtype=np.int64)
    table[1:, 0] = np.cumsum(tasks)
    columns = {"q_first": q_first, "k_first": k_first, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    if t.leftpad_k is not None:
        columns["leftpad"] = to_numpy(t.leftpad_k)
    for name, column in columns.items():
        table[:-1, SEQUENCE_FIELDS.index(name)] = column
    max_rows = int(seqlen_q.max(initial=0)) * groups
    return Lengths(table, batch, int(table[-1, 0]), int(seqlen_k.max(initial=0)), max_rows, used_tokens)


def max_threads(call: Call, lengths: Lengths, rows: int) -> int:
    """As many as have enough to do that waking them pays."""
    width = call.tensors.q.shape[-1] + call.tensors.v.shape[-1]
    return 1 + lengths.tasks * rows * lengths.max_seqlen_k * width // WORK_PER_THREAD


class TaskSplit(NamedTuple):
    """How backward is shared out: a task owns its keys' gradients, and all of a bias's elements that it adds to."""

    tasks: int
    splits: int  # of the keys
    share_b: int  # 1 if one task goes through all sequences
    share_h: int


def split_tasks(call: Call, needs: Needs, lengths: Lengths) -> TaskSplit:
    """The number of threads has no say: it would change the result."""
    t = call.tensors
    shared = [needs.bias and t.bias is not None and n == 1 for n in (t.bias.shape if t.bias is not None else ())]
    share_b, share_h, _, share_j = shared or (False,) * 4
    count = (1 if share_b else lengths.batch) * (1 if share_h else heads_kv(call))
    splits = 1 if share_j else max(1, min(MIN_BACKWARD_TASKS // max(count, 1), lengths.max_seqlen_k // MIN_SPLIT_KEYS))
    return TaskSplit(count * splits if lengths.batch else 0, splits, int(share_b), int(share_h))


def pairs_per_bias_element(call: Call, bias: Tensor, lengths: Lengths) -> int:
    """The largest number of pairs that share an element of the bias."""
    heads = call.tensors.q.shape[1]
    rows = lengths.max_rows * heads_kv(call) // heads
    sizes = (lengths.batch, heads, rows, lengths.max_seqlen_k)
    return math.prod(size for n, size in zip(bias.shape, sizes, strict=True) if n == 1)


def strides(name: str, x: Tensor, paged: bool = False) -> dict[str, int]:
    """Of `[B, H, S, D]`, `[T, H, D]` or pages `[P, page_size, H, D]`: between sequences (or pages), heads and rows."""
    batch, head, row = strides_of(x, paged)
    return {f"{name}_b": batch, f"{name}_h": head, f"{name}_s": row}


def lse_strides(lse: Tensor) -> dict[str, int]:
    """Of one number a row: contiguous `[B, H, S]` or `[H, T]`."""
    batch = lse.stride(0) if lse.dim() == 3 else 0
    return {"lse_b": batch, "lse_h": lse.stride(-2), "lse_s": 1, "seqlen_total": lse.numel()}


def pair_strides(name: str, x: Tensor) -> dict[str, int]:
    """Of a mask or bias, with 0 along what is broadcast."""
    return {
        f"{name}_{dim}": 0 if n == 1 else stride for dim, n, stride in zip("bhij", x.shape, x.stride(), strict=True)
    }


def input_tensors(call: Call, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """The tensors of a call as a kernel reads them, by the names of its argument block."""
    t, real = call.tensors, accumulation_dtype(q.dtype)
    tensors = {"q": q, "k": k, "v": v}
    for name, x, dtype in (
        ("mask", t.mask, None),
        ("bias", t.bias, None),
        ("slopes", t.alibi_slopes, real),
        ("sinks", t.sinks, real),
        ("seed", t.dropout_seed if call.settings.dropout_p > 0 else None, torch.int64),
        ("page_table", t.page_table, torch.int64),
    ):
        if x is not None:
            tensors[name] = x if dtype is None else x.detach().to(dtype).contiguous()
    return tensors


class TensorSpec(NamedTuple):
    """How a result lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> "TensorSpec":
        return cls(x.shape, x.stride(), x.dtype)

    def new(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")


def call_scalars(call: Call, variant: Variant, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """What every kernel is told of a call beside that; it follows from shapes, strides and settings alone."""
    t, s = call.tensors, call.settings
    paged = t.page_table is not None
    values = {
        **ZEROS,
        **strides("q", q),
        **strides("k", k, paged),
        **strides("v", v, paged),
        "num_heads_kv": heads_kv(call),
        "groups": q.shape[1] // heads_kv(call),
        "head_dim": q.shape[-1],
        "head_dim_v": v.shape[-1],
        "window_left": UNLIMITED if s.window_left is None else min(s.window_left, UNLIMITED),
        "window_right": UNLIMITED if s.window_right is None else min(s.window_right, UNLIMITED),
        "top_left": 0 if s.top_left else UNLIMITED,
        "diagonal": s.diagonal,
        "i0": s.i0,
        "j0": s.j0,
        "b0": s.b0,
        "h0": s.h0,
        "num_heads": call.num_heads,
        "page_size": 1,
        "factor": s.scale / s.softcap if s.softcap is not None else s.scale * variant.score_unit,
        "scale": s.scale,
        "softcap_scale": 0 if s.softcap is None else s.softcap * variant.score_unit,
    }
    for name, x in (("mask", t.mask), ("bias", t.bias)):
        values |= {} if x is None else pair_strides(name, x)
    if t.alibi_slopes is not None:
        values["slopes_b"] = slopes_stride(t.alibi_slopes)
    if s.dropout_p > 0:
        limit = threshold(s.dropout_p)
        values |= {"threshold": limit, "keep_scale": keep_scale(limit)}
    if t.page_table is not None:
        values |= {"page_size": k.shape[1], "page_columns": t.page_table.shape[1]}
    return values


def pack(values: dict[str, Any]) -> Any:
    """The argument block, 8 bytes for each of `FIELDS`."""
    assert tuple(values) == FIELDS, f"no fields of the block: {values.keys() ^ set(FIELDS)}"
    for name in REALS.split():
        values[name] = struct.unpack("q", struct.pack("d", values[name]))[0]
    return ArgumentBlock(*values.values())  # and zeros


def bind(block: Any, tensors: dict[str, Tensor]) -> Any:
    """A copy of the block with the addresses of these, and counters of its own at 0."""
    copy = ArgumentBlock.from_buffer_copy(block)
    for name, x in tensors.items():
        copy[FIELD_INDEX[name]] = x.data_ptr()
    copy[FIELD_INDEX["counter"]] = ctypes.addressof(copy) + COUNTERS_INDEX * 8
    return copy
