"""The arguments that forward and backward kernels share, by flat name: pointers, scalars and constants."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....call.call import Call
from ....call.eight_bit import is_eight_bit
from ....call.problem import LONGEST, power_of_two
from ....call.problem import alignment as byte_alignment
from ...gpu.captured import captured_pointers, captured_scalars
from ...gpu.pairs import ALIGN, pair_align, pair_pointers, pair_scalars
from ...gpu.pointers import Described
from ...gpu.precision import allows_tf32
from ...gpu.replay import Recorder
from ...scalars import (
    head_strides,
    head_terms,
    keep_scale,
    lse_strides,
    rows_last,
    score_units,
    strides,
    threshold,
    window_numbers,
)
from ..constants import MAX_HEAD_DIM, MAX_LATENT_DIM, TRANSPOSED_ROWS, Constants, HeadDim
from ..plan.few_rows import most_parts
from ..tile_config import KernelConfig
from . import eight_bit

MAX_BIAS_SPLITS = 16  # partial gradients of a bias, summed at the end
MAX_BIAS_PROGRAMS = 1024
HEADS_AT_ONCE = 16  # whose blocks take turns: of each, several blocks run together and share what they read


def alignment(tensors: list[Tensor]) -> int:
    """The largest number of elements, up to 16 bytes, that divides every stride between rows."""
    bits = 16 // tensors[0].element_size()
    for x in tensors:
        for stride, n in zip(x.stride()[:-1], x.shape[:-1], strict=True):
            if n > 1:  # or else no address depends on it
                bits |= stride
    return bits & -bits


def shared_scalars(
    call: Call, q: Tensor, k: Tensor, v: Tensor, align: int, key_align: int | None = None
) -> dict[str, Any]:
    """The scalars of `parameters.Inputs`. `q`, `k` and `v` have contiguous features. With 8 bits, strides of keys have
    a unit of their own.
    """
    paged = call.tensors.page_table is not None
    of_keys = align if key_align is None else key_align
    return {
        **strides("q", q, align),
        **strides("k", k, of_keys, keys=True, paged=paged),
        **strides("v", v, of_keys, keys=True, paged=paged),
        **feature_scalars(call),
        **captured_scalars(call.tensors.score_mod_tensors),
        **seqlen_scalars(call),
        "num_heads_q": q.shape[1],
        "num_heads_k": num_heads_k(call),
    }


def constants(
    call: Call,
    config: KernelConfig,
    align: int,
    pack_gqa: int = 1,
    splits: int = 1,
    key_align: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The compile-time constants of forward and backward kernels, with `more` of some, and Triton's options."""
    t = call.tensors
    split = takes_split(t.q.dtype, config)
    several_pages = t.page_table is not None and t.page_table.shape[1] > 1
    compiled = Constants(
        HEAD_DIM=head_dim(t.q.shape[-1], split, eight_bit.in_pairs(t.k, t.q.dtype)),
        HEAD_DIM_V=head_dim(t.v.shape[-1], split, eight_bit.in_pairs(t.v, t.q.dtype)),
        NATURAL=call.keeps_residual,
        COMPENSATED=t.q.dtype is torch.float32,
        PRECISION=precision(t.q.dtype, config),
        ALIGN=align,
        KEY_ALIGN=align if key_align is None else key_align,
        PAGE_SIZE=t.k.shape[1] if several_pages else 0,
        BLOCK_B=block_b(call),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        PACK_GQA=pack_gqa,
        SPLITS=splits,
        TRANSPOSED=config.block_m == TRANSPOSED_ROWS,
        NUM_WARPS=config.num_warps,
        STAGES=config.num_stages if config.mma else 1,
        **eight_bit.constants(t),
        LATENT=is_latent(call, config),
        EVEN=is_even(call, config),
        **more,
    )
    return {"CONFIG": compiled, "num_warps": config.num_warps, "num_stages": config.num_stages}


def is_latent(call: Call, config: KernelConfig) -> bool:
    """Whether the tile of values is a chunk of the tile of keys, or all of it, and is loaded once. Triton 3.6
    pipelines no loads of 8 bits whose numbers go into two products: there values are loaded again, from the L2 cache.
    """
    if call.settings.v_dim is None or is_eight_bit(call.tensors.k) or config.block_m <= TRANSPOSED_ROWS:
        return False
    width, width_v = head_dim(call.tensors.q.shape[-1]), head_dim(call.tensors.v.shape[-1])
    return width_v.WIDTH == width.CHUNK_0 or width_v == width


def reads_words(call: Call) -> bool:
    """Whether latent rows of 8 bits are read in words (`words.reads_words`)."""
    t, s = call.tensors, call.settings
    if t.k.dtype.itemsize != 1 or s.v_dim is None or t.page_table is None:
        return False
    aligned = byte_alignment(t.q, t.k, t.v) == 16
    if (t.q.shape[-1], t.v.shape[-1]) != (MAX_LATENT_DIM, MAX_HEAD_DIM) or t.q.dtype.itemsize != 2 or not aligned:
        return False
    return t.q.dtype is torch.bfloat16 or eight_bit.scale_kinds(eight_bit.descales(t))["V_SCALES"] != "key"


def is_even(call: Call, config: KernelConfig) -> bool:
    """Whether no block needs masks, of a dense call with a bias: its kernels then have no code for such blocks, which
    in short sequences takes 2 to 14% of the time even where it does not run (H200, 256 and 384 keys).
    """
    t, s = call.tensors, call.settings
    if s.batch_invariant:  # one kernel for all lengths
        return False
    absent = (t.mask, t.seqused_q, t.seqused_k, t.leftpad_k, s.mask_mod, s.attention_chunk)
    if t.bias is None or call.layout != "dense" or any(x is not None for x in absent) or s.dropout_p > 0:
        return False
    window = window_numbers(call)
    unlimited = all(window[name] is None for name in ("window_left", "window_right", "top_left"))
    return unlimited and t.q.shape[2] % config.block_m == 0 and t.k.shape[2] % config.block_n == 0


def block_b(call: Call) -> int:
    """Packed sequences and the tokens that belong to none, rounded up to a power of two."""
    cu_seqlens_q = call.tensors.cu_seqlens_q
    return 1 if cu_seqlens_q is None else power_of_two(cu_seqlens_q.shape[0])


def new_result(recorder: Recorder, call: Call, like: Tensor, fill: float) -> Tensor:
    """A tensor like `like` for values of rows. Kernels write the rows of every token, but those that `seqused_q` leaves
    out: these are filled.
    """
    if call.tensors.seqused_q is None:
        return recorder.new(like)
    return recorder.op(partial(torch.full, like.shape, fill, dtype=like.dtype, device=like.device))


def row_strides(name: str, x: Tensor | None) -> dict[str, Any]:
    """Strides of one value a row, contiguous: `[B, H, S]` or `[H, T]`."""
    return dict(zip((f"stride_{name}_b", f"stride_{name}_h"), lse_strides(x).values(), strict=True))


def row_stats_strides(x: Tensor) -> dict[str, int]:
    """Strides of two values a row, `[B, H, S, 2]` or `[H, T, 2]`, in units of two rows (16 bytes)."""
    *batch, head, _, _ = x.stride()
    return {"stride_row_stats_b": batch[0] // 4 if batch else 0, "stride_row_stats_h": head // 4}


def row_sums_shape(call: Call, config: KernelConfig) -> tuple[int, ...]:
    """Sums of dq by whole blocks of rows, `[B, H, rows, D]` or `[H, rows, D]` (`kernels.mma.from_sums`)."""
    t, block = call.tensors, config.block_m
    width = head_dim(t.q.shape[-1])
    columns = width.CHUNK_0 + width.CHUNK_1
    if t.cu_seqlens_q is not None:
        return t.q.shape[1], (t.q.shape[0] // block + t.cu_seqlens_q.shape[0]) * block, columns
    return *t.q.shape[:2], -(-t.q.shape[2] // block) * block, columns


def row_sums_strides(name: str, sums: Tensor) -> dict[str, int]:
    """Strides in units of 8 elements."""
    *batch, head, _, _ = sums.stride()
    return {f"stride_{name}_b": batch[0] // 8 if batch else 0, f"stride_{name}_h": head // 8}


def dbias_scalars(call: Call, bias: Tensor, config: KernelConfig) -> dict[str, int]:
    """The tiles of a bias and what shares them (`dbias.BiasTiles`), and the number of programs."""
    origin = call.settings.j0 % 8 if call.settings.dropout_p > 0 else 0
    batch, heads, seqlen_q, seqlen_k = bias_shape(call)
    counts = (batch, heads, -(-seqlen_q // config.block_m), -(-(seqlen_k + origin) // config.block_n))
    own = [1 if n == 1 else count for n, count in zip(bias.shape, counts, strict=True)]
    shared = [count // max(mine, 1) for mine, count in zip(own, counts, strict=True)]
    programs, sharing = math.prod(own), math.prod(shared)
    splits = max(1, min(MAX_BIAS_SPLITS, sharing, MAX_BIAS_PROGRAMS // max(programs, 1)))
    return {
        "programs": programs * splits if sharing > 0 else 0,
        "splits": splits,
        **{f"tiles_{dim}": n for dim, n in zip("hmn", own[1:], strict=True)},
        **{f"shared_{dim}": n for dim, n in zip("bhmn", shared, strict=True)},
    }


def dbias_strides(x: Tensor | None) -> dict[str, Any]:
    """Strides of contiguous `[splits, B, H, Sq, Sk]`, and their unit; a broadcast row or column has none."""
    if x is None:
        names = [f"stride_dbias_{dim}" for dim in ("split", *"bhmn")]
        return {**dict.fromkeys(names), "bias_rows": None, "bias_keys": None, "dbias_align": 1}
    unit = ALIGN if x.shape[-1] % ALIGN == 0 else 1
    found: dict[str, Any] = {"dbias_align": unit, "stride_dbias_split": x.stride(0) // unit}
    found |= {"bias_rows": x.shape[3], "bias_keys": x.shape[4]}
    for dim, n, stride in zip("bhmn", x.shape[1:], x.stride()[1:], strict=True):
        found[f"stride_dbias_{dim}"] = stride // (1 if dim == "n" else unit) if n > 1 or dim in "bh" else None
    return found


def head_dim(width: int, split: bool = False, pairs: bool = False) -> HeadDim:
    """A width as one or two powers of two, 16 or more: 96 is 64 + 32; 120 is better taken as 128. `pairs`: one power of
    two of at least 32 is its even and its odd features.
    """
    first = max(16, 1 << (width.bit_length() - 1))
    rest = 0 if width <= first else max(16, power_of_two(width - first))
    if rest == first:
        first, rest = 2 * first, 0
    if pairs and rest == 0 and first >= 32:
        return HeadDim(width, first // 2, first // 2, split, PAIRS=True)
    return HeadDim(width, first, rest, split)


def pointers(recorder: Recorder, call: Call, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor | Described | None]:
    """The pointers of `parameters.Inputs`."""
    t = call.tensors
    paged = t.page_table is not None
    return {
        "q": q,
        "k": eight_bit.key_pointer(k),
        "v": eight_bit.key_pointer(v),
        **pair_pointers(t),
        **{symbol: recorder.contiguous(x) for symbol, x in head_terms(t).items()},
        "sinks": None,  # for forward only
        "lists": None,  # for kernels that visit the blocks in a list
        "seed": t.dropout_seed if call.settings.dropout_p > 0 else None,
        "cu_seqlens_q": t.cu_seqlens_q,
        "cu_seqlens_k": None if paged else t.cu_seqlens_k,
        "seqused_q": t.seqused_q,
        "seqused_k": paged_seqlens(recorder, call) if paged else t.seqused_k,
        "page_table": None if t.page_table is None else recorder.op(rows_last, t.page_table),
        "leftpad_k": t.leftpad_k,
        **captured_pointers(t.score_mod_tensors),
    }


def feature_scalars(call: Call) -> dict[str, Any]:
    """Scalars of the features, with the units of scores (`scores`, `softmax`)."""
    t, s = call.tensors, call.settings
    limit = threshold(s.dropout_p) if s.dropout_p > 0 else None
    return {
        **pair_scalars(t, pair_align(t)),
        **score_units(call),
        **window_numbers(call),
        "attention_chunk": None if s.attention_chunk is None else min(s.attention_chunk, LONGEST),
        "chunk_origin": None if s.attention_chunk is None else s.j0,
        **head_strides(t),
        "threshold": limit,
        "keep_scale": None if limit is None else keep_scale(limit),
        "i0": s.i0,
        "j0": s.j0,
        "b0": s.b0,
        "h0": s.h0,
        "num_heads": call.num_heads,
        "score_mod": None,  # a kernel that has one is launched with another
        "mask_mod": None,
        **{f"stride_lists_{dim}": None for dim in "bhm"},
    }


def seqlen_scalars(call: Call) -> dict[str, Any]:
    """Scalars of the sequences: their number, and the tokens or positions that memory holds."""
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
    return {
        "stride_page_table_b": None if t.page_table is None else rows_last(t.page_table).stride(0),
        "num_pages": t.k.shape[0] if paged else None,
        "batch": batch,
        "total_q": total_q,
        "total_k": total_k,
        "max_seqlen_k": total_k if s.max_seqlen_k is None else min(s.max_seqlen_k, LONGEST),
    }


def part_scalars(call: Call, part_keys: int, programs: int) -> dict[str, Any]:
    """Scalars of decoding in parts of keys: programs of a tile, the most parts of a sequence, and its slots, `None` of
    packed keys.
    """
    return {
        "num_programs": programs,
        "most_parts": most_parts(num_heads_k(call)),
        "parts_of_sequence": None if call.layout == "varlen" else slots_of_sequence(call, part_keys),
    }


def slots_of_sequence(call: Call, part_keys: int) -> int:
    """Slots of one sequence's parts. The keys that it sees may begin and end within one; with dropout, the first part
    begins up to 7 keys before them.
    """
    given = seqlen_scalars(call)
    parts = -(-(min(given["total_k"], given["max_seqlen_k"]) + 7) // part_keys)
    return max(1, min(parts, most_parts(num_heads_k(call)) + 1))


def num_slots(call: Call, part_keys: int) -> int:
    """Slots of the parts of all sequences."""
    given = seqlen_scalars(call)
    if call.layout == "varlen":
        return given["total_k"] // part_keys + given["batch"] + 1  # type: ignore[no-any-return]
    return max(given["batch"], 1) * slots_of_sequence(call, part_keys)  # type: ignore[no-any-return]


def paged_seqlens(recorder: Recorder, call: Call) -> Tensor:
    """The number of keys of each paged sequence."""
    t = call.tensors
    if t.seqused_k is not None:
        return t.seqused_k
    assert t.cu_seqlens_k is not None
    return recorder.op(Tensor.diff, t.cu_seqlens_k)


def aligned_rows(x: Tensor) -> Tensor:
    """Rows that asynchronous copies of 16 bytes can read; a copy if they are not."""
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def is_aligned(x: Tensor) -> bool:
    """Whether 16 bytes divide the address of each row, whose features are contiguous."""
    return byte_alignment(x) == 16


def num_tiles(call: Call, block: int, pack_gqa: int = 1) -> int:
    """Blocks of query rows: of each dense sequence, or at most of all packed ones and tokens that belong to none."""
    t = call.tensors
    if t.cu_seqlens_q is None:
        return -(-t.q.shape[2] * pack_gqa // block)
    return -(-t.q.shape[0] * pack_gqa // block) + t.cu_seqlens_q.shape[0]


def num_key_tiles(call: Call, block: int) -> int:
    """Blocks of keys, as `num_tiles`; one more if dropout makes blocks start before the first key."""
    t = call.tensors
    more = 1 if call.settings.dropout_p > 0 and call.settings.j0 % 8 else 0
    if call.layout == "varlen":
        assert t.cu_seqlens_k is not None
        return -(-t.k.shape[0] // block) + t.cu_seqlens_k.shape[0] * (1 + more)
    total = t.k.shape[2] if t.page_table is None else t.page_table.shape[1] * t.k.shape[1]
    return -(-total // block) + more


def heads_at_once(call: Call, heads: int) -> int | None:
    """How many of a launch's heads take turns (`kernels.sequences.in_turns`); `None` where all blocks are as long."""
    if call.layout != "dense" or (call.settings.window.unlimited and call.settings.mask_mod is None):
        return None
    return max(n for n in range(1, HEADS_AT_ONCE + 1) if heads % n == 0)


def num_heads_k(call: Call) -> int:
    return call.tensors.k.shape[1 if call.layout == "dense" else -2]


def dense_batch(x: Tensor) -> int:
    """Sequences in the grid; programs find packed ones themselves."""
    return x.shape[0] if x.dim() == 4 else 1


def bias_shape(call: Call) -> tuple[int, int, int, int]:
    """`[B, H, Sq, Sk]` that a bias broadcasts to."""
    t, s = call.tensors, call.settings
    given = seqlen_scalars(call)
    seqlen_q = t.q.shape[2] if t.cu_seqlens_q is None else t.q.shape[0] if s.max_seqlen_q is None else s.max_seqlen_q
    return given["batch"], t.q.shape[1], seqlen_q, min(given["max_seqlen_k"], given["total_k"])


def precision(dtype: torch.dtype, config: KernelConfig) -> str:
    """Precision of float32 products: one TF32 product where PyTorch's setting allows it, else the configuration's
    (docs/design/exactness.md).
    """
    if dtype is not torch.float32:
        return "ieee"
    return "tf32" if allows_tf32() else config.precision


def takes_split(dtype: torch.dtype, config: KernelConfig) -> bool:
    """Whether a kernel of backward reads float32 rows in three parts (`split_rows`)."""
    return precision(dtype, config) == "bf16x6"
