"""The standard set: calls whose kernels an archive has. A new kernel gets a call here, or a line in `LEFT_OUT`.

Keys of compiled kernels do not depend on lengths, batch or heads, as long as tiles, splits and the types of strides are
the same: the calls here stand for all others like them.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backend.hopper.plan.widths import WIDTHS

DTYPES = (torch.bfloat16, torch.float16)
USUAL_LENGTHS = (16, 48, 64, 100, 128, 200, 256, 384, 512, 700, 1024, 1500, 2048, 3000, 4096, 6000)
USUAL_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
LEFT_OUT = {  # kernels that are compiled at first use only
    "triton.kernels.dcaptured:dcaptured_kernel": "the gradient of a score_mod's tensors: one kernel for each function",
    "triton.kernels.second:second_rows_kernel": "second derivatives are rare",
    "triton.kernels.second:second_keys_kernel": "second derivatives are rare",
    "triton.kernels.row_products:row_products_kernel": "second derivatives are rare",
    "triton.kernels.second_weights:second_weights_kernel": "second derivatives are rare",
    "triton.kernels.second_weights:complete_weights_kernel": "second derivatives are rare",
    "triton.kernels.second_products:weighted_keys_kernel": "second derivatives are rare",
    "triton.kernels.second_products:weighted_rows_kernel": "second derivatives are rare",
    "triton.kernels.decode:decode_kernel": "is for batch-invariant decoding alone",
    "hopper.kernels.distance_table:distance_table_kernel": "is made for each score_mod",
    "hopper.kernels.visible_blocks:key_summaries_kernel": "is made for each mask function",
}
TINY, FEW, SHORT, MIDDLE, LONG, VERY_LONG = 64, 320, 512, 1024, 8192, 2**17  # lengths with different tiles
PLAIN: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"causal": True, "window": (4095, 0)})
UNALIGNED = (1020, 1022, 1023)  # lengths of rows of a bias whose addresses 8, 4 and 2 bytes divide
FILLING = (64, 64)  # query and key heads: enough tiles for a GPU, so that no keys and no rows are split
GROUPED = (64, 8)  # the same in groups
OVER_A_WAVE = (
    (16, 1100),
    (16, 2101),
    (17, 3001),
    (11, 5001),
    (3, 9001),
    (6, 20001),
)  # heads and lengths, with different tiles
FEW_HEADS = ((2, 2), (8, 8), (8, 1))
NARROWER = ((40, 40), (88, 88), (104, 104), (176, 176), (224, 224))  # head dimensions that do not fill a kernel's width
RARER = ((32, 32), (72, 72), (80, 80), (160, 160))  # vision and diffusion models: dense calls, full and causal
COMMON = tuple(dims for dims in WIDTHS if dims not in RARER)
SMALL_DIMS = (16, 32, 48, 64, 96, 128)  # short sequences, for which Triton's kernels are faster
FLOAT32_DIMS = (32, 64, 128)
WIDE_FLOAT32_DIMS, WIDE_DIMS = (160, 256, 512), (512,)  # calls whose products PyTorch computes
DECODE_HEADS = ((8, 8), (32, 8), (64, 8), (16, 2))  # query and key heads: groups of 1, 4 and 8
BATCHES = (1, 2, 4, 8, 16, 32, 64)  # with different splits of the keys
LATENT_HEADS = (16, 128)  # query heads of DeepSeek's models
PAGE_SIZES = (16, 256)
EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)  # caches
CHUNK = 1024  # rows of a prompt that servers compute at once


class StandardCall(NamedTuple):
    """A call of a public function, forward or also backward; gradients of q, k and v and of `differentiated`. With
    `along`, also in forward mode, where q, k and v move.
    """

    function: str
    arguments: dict[str, Any]
    backward: bool = False
    differentiated: tuple[str, ...] = ()
    along: bool = False


def standard_calls() -> Iterator[StandardCall]:
    """All calls; their tensors have no memory."""
    yield from queries_of_eight_bits()
    for dtype in DTYPES:
        yield from usual(dtype)
        yield from plain(dtype)
        yield from long(dtype)
        yield from short(dtype)
        yield from windows(dtype)
        yield from few(dtype)
        yield from just_over_a_wave(dtype)
        yield from with_features(dtype)
        yield from decoding(dtype)
        yield from decoding_eight_bits(dtype)
        yield from decoding_latent(dtype)
        yield from decoding_packed_rows(dtype)
        yield from paged_prefill(dtype)
        yield from moving(dtype)
        yield from wide(WIDE_DIMS, dtype)
    yield from float32()
    yield from wide(WIDE_FLOAT32_DIMS, torch.float32)


def usual(dtype: torch.dtype) -> Iterator[StandardCall]:
    """Training of usual models, at lengths and batches that do not fill a GPU either: decoders with grouped heads,
    encoders of padded batches, images.
    """
    for seqlen, batch in itertools.product(USUAL_LENGTHS, USUAL_BATCHES):
        if batch <= 2:
            q, k, v = dense((32, 8), seqlen, seqlen, (128, 128), dtype, batch)
            yield StandardCall("attention", {"q": q, "k": k, "v": v, "causal": True}, backward=True)
        for odd in (0, 1) if batch <= 4 or seqlen <= 512 else ():  # lengths whose rows begin at any address, too
            length = seqlen + odd
            if length <= 513:
                q, k, v = dense((12, 12), length, length, (64, 64), dtype, batch)
                mask = empty(batch, 1, 1, length, dtype=torch.bool)
                yield StandardCall("attention", {"q": q, "k": k, "v": v, "mask": mask}, backward=True)
            for dim in (64, 80) if batch <= 4 else ():
                q, k, v = dense((16, 16), length, length, (dim, dim), dtype, batch)
                yield StandardCall("attention", {"q": q, "k": k, "v": v}, backward=True)


def plain(dtype: torch.dtype) -> Iterator[StandardCall]:
    """Dense calls without features at every width of the Hopper kernels, and packed ones at common widths."""
    for dims, features, seqlen in itertools.product(RARER, PLAIN[:2], (SHORT, MIDDLE, LONG)):
        q, k, v = dense(FILLING, seqlen, seqlen, dims, dtype)
        yield StandardCall("attention", {"q": q, "k": k, "v": v, **features}, backward=True)
    for dims, features, seqlen in itertools.product(COMMON + NARROWER, PLAIN, (SHORT, MIDDLE, LONG)):
        q, k, v = dense(FILLING, seqlen, seqlen, dims, dtype)
        for deterministic in (None, True):
            scalars = {**features, "deterministic": deterministic}
            yield StandardCall("attention", {"q": q, "k": k, "v": v, **scalars}, backward=True)
            if dims in COMMON:
                yield StandardCall("attention_varlen", {**packed(q, k, v), **scalars}, backward=True)
    for dim in (64, 128):
        q, k, v = dense(FILLING, FEW, FEW, (dim, dim), dtype)
        yield StandardCall("attention", {"q": q, "k": k, "v": v})


def long(dtype: torch.dtype) -> Iterator[StandardCall]:
    """Rows that backward visits in several launches, and long calls of few heads."""
    for dims in WIDTHS + NARROWER:
        q, k, v = dense(FILLING, VERY_LONG, LONG, dims, dtype)
        yield StandardCall("attention", {"q": q, "k": k, "v": v}, backward=True)
    for dims, seqlen, causal in itertools.product(COMMON, (2 * LONG, 8 * LONG), (False, True)):
        q, k, v = dense((2, 2), seqlen, seqlen, dims, dtype)
        yield StandardCall("attention", {"q": q, "k": k, "v": v, "causal": causal}, backward=True)


def short(dtype: torch.dtype) -> Iterator[StandardCall]:
    """Many short sequences, few queries, and few keys."""
    lengths = ((16, 16), (TINY, TINY), (144, 144), (TINY, SHORT), (TINY, LONG // 2), (SHORT, TINY))
    for dim, (rows, keys), causal in itertools.product(SMALL_DIMS, lengths, (False, True)):
        q, k, v = dense(FILLING, rows, keys, (dim, dim), dtype, batch=8)
        yield StandardCall("attention", {"q": q, "k": k, "v": v, "causal": causal}, backward=True)


def windows(dtype: torch.dtype) -> Iterator[StandardCall]:
    """Packed windows of vision models."""
    count = 64
    for dim in (64, 80):
        q, k, v = dense(FILLING, count * TINY, count * TINY, (dim, dim), dtype)
        sequences = {"cu_seqlens_q": offsets(count), "cu_seqlens_k": offsets(count)}
        lengths = {"max_seqlen_q": TINY, "max_seqlen_k": TINY}
        yield StandardCall("attention_varlen", {**packed(q, k, v), **sequences, **lengths}, backward=True)


def few(dtype: torch.dtype) -> Iterator[StandardCall]:
    """Few heads, rows or keys, so that several programs share the keys of a row or the rows of a key."""
    lengths = ((SHORT, SHORT), (MIDDLE, MIDDLE), (4 * MIDDLE, 4 * MIDDLE), (SHORT, 8 * LONG), (LONG, TINY))
    for dims, features, (rows, keys), heads in itertools.product(COMMON, PLAIN[:2], lengths, FEW_HEADS):
        q, k, v = dense(heads, rows, keys, dims, dtype)
        for deterministic in (None, True):
            yield StandardCall("attention", {"q": q, "k": k, "v": v, **features, "deterministic": deterministic}, True)
    for dim, rows in itertools.product((64, 128), (SHORT, MIDDLE)):
        q, k, v = dense((8, 8), rows, rows, (dim, dim), dtype)
        for causal, deterministic in itertools.product((False, True), (None, True)):
            masked = {"mask": empty(1, 1, 1, rows, dtype=torch.bool), "causal": causal, "deterministic": deterministic}
            yield StandardCall("attention", {"q": q, "k": k, "v": v, **masked}, True)


def just_over_a_wave(dtype: torch.dtype) -> Iterator[StandardCall]:
    """A few blocks of keys more than a GPU has multiprocessors, or than twice as many: several programs share each, and
    the last tiles of rows of the last head. With odd lengths, its lse begins at an unaligned address.
    """
    for dims, (heads, seqlen) in itertools.product((*COMMON, *RARER), OVER_A_WAVE):
        q, k, v = dense((heads, heads), seqlen, seqlen, dims, dtype)
        yield StandardCall("attention", {"q": q, "k": k, "v": v}, backward=True)


def moving(dtype: torch.dtype) -> Iterator[StandardCall]:
    """Forward mode, as of flow models: full and causal."""
    for dim, seqlen, causal in itertools.product((64, 128, 256), (MIDDLE, LONG), (False, True)):
        q, k, v = dense(FILLING, seqlen, seqlen, (dim, dim), dtype)
        yield StandardCall("attention", {"q": q, "k": k, "v": v, "causal": causal}, along=True)
        if dim < 256:
            yield StandardCall("attention_varlen", {**packed(q, k, v), "causal": causal}, along=True)


def float32() -> Iterator[StandardCall]:
    """Dense calls without features in float32."""
    lengths = ((FILLING, TINY), (FILLING, SHORT), (FILLING, LONG), ((24, 24), 700))
    for dim, (heads, seqlen), causal in itertools.product(FLOAT32_DIMS, lengths, (False, True)):
        q, k, v = dense(heads, seqlen, seqlen, (dim, dim), torch.float32)
        yield StandardCall("attention", {"q": q, "k": k, "v": v, "causal": causal}, backward=True)


def wide(dims: Iterable[int], dtype: torch.dtype) -> Iterator[StandardCall]:
    """Dense calls of wide heads, full and causal with grouped heads."""
    for dim, seqlen in itertools.product(dims, (MIDDLE, 4 * MIDDLE, LONG, 2 * LONG)):
        for heads, causal in ((FILLING, False), (GROUPED, True)):
            q, k, v = dense(heads, seqlen, seqlen, (dim, dim), dtype)
            yield StandardCall("attention", {"q": q, "k": k, "v": v, "causal": causal}, backward=True)


def with_features(dtype: torch.dtype) -> Iterator[StandardCall]:
    """Features of current models, in training and inference."""
    for dim, layout in itertools.product((64, 128), (dense, packed)):
        q, k, v = dense(FILLING, LONG, LONG, (dim, dim), dtype)
        heads = FILLING[0]
        tensors = {"q": q, "k": k, "v": v} if layout is dense else packed(q, k, v)
        function = "attention" if layout is dense else "attention_varlen"
        for features in PLAIN[1:]:
            yield StandardCall(function, {**tensors, **features, "softcap": 30.0}, backward=True)
            yield StandardCall(function, {**tensors, **features, "sinks": empty(heads, dtype=dtype)}, True, ("sinks",))
        slopes = {"alibi_slopes": empty(heads)}
        yield StandardCall(function, {**tensors, "causal": True, **slopes}, backward=True)
        yield StandardCall(function, {**tensors, "causal": True, **slopes}, True, ("alibi_slopes",))
        for causal in (False, True):
            dropout = {"causal": causal, "dropout_p": 0.1, "dropout_seed": 1}
            yield StandardCall(function, {**tensors, **dropout}, backward=True)
        if layout is packed:
            continue
        for causal, rows in itertools.product((False, True), (1, LONG)):
            masked = {**tensors, "causal": causal, "mask": empty(1, 1, rows, LONG, dtype=torch.bool)}
            yield StandardCall(function, masked, backward=True)
        fewer = dict(zip("qkv", dense(FILLING, MIDDLE, MIDDLE, (dim, dim), dtype), strict=True))  # too few for lists
        for rows in (1, MIDDLE):
            masked = {**fewer, "mask": empty(1, 1, rows, MIDDLE, dtype=torch.bool)}
            yield StandardCall(function, masked, backward=True)
        bias = empty(1, heads, LONG, LONG, dtype=dtype)
        yield StandardCall(function, {**tensors, "causal": True, "bias": bias}, True, ("bias",))
        for length in UNALIGNED:
            shorter = dict(zip("qkv", dense(FILLING, length, length, (dim, dim), dtype), strict=True))
            yield StandardCall(function, {**shorter, "bias": empty(1, 1, length, length, dtype=dtype)}, backward=True)


def decoding(dtype: torch.dtype) -> Iterator[StandardCall]:
    """One new token for each sequence: over dense tensors, and over caches that are dense or have pages."""
    for dim, heads, batch, seqlen in itertools.product(
        (64, 128), DECODE_HEADS, BATCHES, (SHORT, MIDDLE, LONG, 8 * LONG)
    ):
        q, k, v = dense(heads, 1, seqlen, (dim, dim), dtype, batch)
        yield StandardCall("attention", {"q": q, "k": k, "v": v})
        for causal in (False, True):
            yield from cached(q, k, v, {}, {"causal": causal})
        for page_size in PAGE_SIZES if dim == 128 else ():
            pages = {"page_table": empty(batch, seqlen // page_size, dtype=torch.int32)}
            k, v = (empty(batch * seqlen // page_size, page_size, heads[1], dim, dtype=dtype) for _ in range(2))
            yield from cached(q, k, v, pages, {"causal": True})


def decoding_eight_bits(dtype: torch.dtype) -> Iterator[StandardCall]:
    """One new token for each sequence, over dense caches and pages of 8 bits, read and appended to."""
    for of_cache, heads, batch, page_size in itertools.product(EIGHT_BITS, ((8, 8), (32, 8)), (1, 8, 64), (None, 16)):
        if page_size is None:
            shape, pages = (batch, heads[1], LONG, 128), {}
        else:
            shape = batch * LONG // page_size, page_size, heads[1], 128
            pages = {"page_table": empty(batch, LONG // page_size, dtype=torch.int32)}
        arguments = {f"{x}_cache": empty(*shape, dtype=of_cache) for x in "kv"}
        arguments |= {
            "q": empty(batch, heads[0], 1, 128, dtype=dtype),
            "cache_seqlens": empty(batch, dtype=torch.int32),
        }
        new = {x: empty(batch, heads[1], 1, 128, dtype=dtype) for x in "kv"}
        for of_scales, more in itertools.product((heads[1:], shape[:3]), ({}, new)):
            scales = {f"{x}_descale": empty(*of_scales) for x in "kv"}
            yield StandardCall("attention_with_kvcache", arguments | pages | scales | more | {"causal": True})


def queries_of_eight_bits() -> Iterator[StandardCall]:
    """Queries, keys and values of 8 bits: dense, packed, and one row and a chunk of a prompt over pages."""
    numbers = torch.float8_e4m3fn
    for width, heads, causal in itertools.product((64, 128, 256), ((8, 8), (32, 8)), (False, True)):
        q, k, v = dense(heads, LONG, LONG, (width, width), numbers)
        scales = {f"{x}_descale": empty(1, heads[1]) for x in "qkv"}
        yield StandardCall("attention", {"q": q, "k": k, "v": v, "causal": causal} | scales)
        rows = {name: x[0].transpose(0, 1).contiguous() for name, x in (("q", q), ("k", k), ("v", v))}
        ends = {f"cu_seqlens_{x}": empty(2, dtype=torch.int32) for x in "qk"}
        longest = {f"max_seqlen_{x}": LONG for x in "qk"}
        yield StandardCall("attention_varlen", rows | ends | longest | {"causal": causal} | scales)
        pages = {f"{x}_cache": empty(LONG // 16, 16, heads[1], width, dtype=numbers) for x in "kv"}
        pages |= {"page_table": empty(1, LONG // 16, dtype=torch.int32), "cache_seqlens": empty(1, dtype=torch.int32)}
        for rows in (1, CHUNK) if causal else (1,):
            yield StandardCall("attention_with_kvcache", {"q": q[:, :, :rows], "causal": causal} | pages | scales)


def decoding_latent(dtype: torch.dtype) -> Iterator[StandardCall]:
    """One or two new tokens over latent rows in dense caches and pages, read and appended to."""
    for heads, rows, batch, page_size in itertools.product(LATENT_HEADS, (1, 2), (1, 8, 128), (None, 64)):
        pages = {} if page_size is None else {"page_table": empty(batch, LONG // page_size, dtype=torch.int32)}
        shape = (batch, 1, LONG, 576) if page_size is None else (batch * LONG // page_size, page_size, 1, 576)
        arguments = {
            "q": empty(batch, heads, rows, 576, dtype=dtype),
            "k_cache": empty(*shape, dtype=dtype),
            "v_cache": None,
            "v_dim": 512,
            "cache_seqlens": empty(batch, dtype=torch.int32),
        }
        for new in ({}, {"k": empty(batch, 1, rows, 576, dtype=dtype)}):
            yield StandardCall("attention_with_kvcache", arguments | pages | new | {"causal": True})


def decoding_packed_rows(dtype: torch.dtype) -> Iterator[StandardCall]:
    """One or two new tokens over latent rows of 8 bits with a scale for each head, and of 656 bytes, in pages of 64."""
    kinds = ((torch.float8_e4m3fn, 576), (torch.uint8, 656))
    for heads, rows, batch, (of_cache, width) in itertools.product(LATENT_HEADS, (1, 2), (1, 8, 128), kinds):
        arguments = {
            "q": empty(batch, heads, rows, 576, dtype=dtype),
            "k_cache": empty(batch * LONG // 64, 64, 1, width, dtype=of_cache),
            "v_cache": None,
            "v_dim": 512,
            "cache_seqlens": empty(batch, dtype=torch.int32),
            "page_table": empty(batch, LONG // 64, dtype=torch.int32),
            "causal": True,
        }
        scales = {"k_descale": empty(1)} if width == 576 else {}
        yield StandardCall("attention_with_kvcache", arguments | scales)


def cached(
    q: Tensor, k: Tensor, v: Tensor, pages: dict[str, Tensor], features: dict[str, Any]
) -> Iterator[StandardCall]:
    """Calls with a KV cache: reading, appending, and appending with rotary positions."""
    batch, heads = q.shape[0], k.shape[1] if not pages else k.shape[2]
    lengths = empty(batch, dtype=torch.int32)
    arguments = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths, **pages, **features}
    new = {name: empty(batch, heads, 1, q.shape[-1], dtype=q.dtype) for name in ("k", "v")}
    rotary = {name: empty(k.shape[2], q.shape[-1] // 2, dtype=q.dtype) for name in ("rotary_cos", "rotary_sin")}
    for more in ({}, new, new | rotary, new | rotary | {"rotary_interleaved": False}):
        yield StandardCall("attention_with_kvcache", arguments | more)


def paged_prefill(dtype: torch.dtype) -> Iterator[StandardCall]:
    """Packed queries over pages, as servers run prompts and decoding together."""
    for batch, rows, page_size in itertools.product((1, 4, 16, 64), (1, SHORT), PAGE_SIZES):
        pages = LONG // page_size
        arguments: dict[str, Any] = {
            "q": empty(batch * rows, 32, 128, dtype=dtype),
            "cu_seqlens_q": offsets(batch),
            "cu_seqlens_k": None,
            "seqused_k": empty(batch, dtype=torch.int32),
            "page_table": empty(batch, pages, dtype=torch.int32),
            "max_seqlen_q": rows,
            "causal": True,
        }
        arguments |= {name: empty(pages, page_size, 8, 128, dtype=dtype) for name in ("k", "v")}
        yield StandardCall("attention_varlen", arguments)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def dense(
    heads: tuple[int, int], seqlen_q: int, seqlen_k: int, dims: tuple[int, int], dtype: torch.dtype, batch: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v `[B, H, S, D]`."""
    q = empty(batch, heads[0], seqlen_q, dims[0], dtype=dtype)
    k, v = (empty(batch, heads[1], seqlen_k, dim, dtype=dtype) for dim in dims)
    return q, k, v


def packed(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """Arguments of the same call, packed as one sequence."""
    tensors = {
        name: empty(x.shape[2], x.shape[1], x.shape[3], dtype=x.dtype) for name, x in zip("qkv", (q, k, v), strict=True)
    }
    one = offsets(1)
    return {**tensors, "cu_seqlens_q": one, "cu_seqlens_k": one, "max_seqlen_q": q.shape[2], "max_seqlen_k": q.shape[2]}


def offsets(batch: int) -> Tensor:
    return empty(batch + 1, dtype=torch.int32)
