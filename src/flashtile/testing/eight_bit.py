"""Problems with keys and values of 8 bits, and perhaps queries, made of those in q's dtype."""

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .case import Case
from .draw import RECORDED, Draw

PART = 0.15  # share of the problems with a cache or pages
PART_WITHOUT = 0.05  # share of the problems without
QUERIES = torch.float8_e4m3fn
OUT_DTYPES = (None, torch.bfloat16, torch.float16, torch.float32)
KINDS_OF_Q = ("none", "heads", "sequences", "tokens")
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
ROTARY = ("rotary_cos", "rotary_sin", "rotary_interleaved", "rotary_start", "rotary_q_fixed")


def maybe_eight_bits(case: Case, draw: Draw) -> Case:
    """The problem, or one with keys and values of 8 bits, and perhaps queries."""
    choices = random.Random(f"eight bits of {draw.seed}")  # the same for all variations
    has_pages = case.function == "attention_with_kvcache" or case.arguments.get("page_table") is not None
    part = PART if has_pages else PART_WITHOUT
    if choices.random() >= part or draw.seed in RECORDED or "eight bits" in draw.left_out:
        return case
    of_k, of_v = (choices.choice(("none", "heads", "sequences", "pages", "tokens")) for _ in range(2))
    case = with_eight_bits(case, choices.choice(FORMATS), of_k, of_v, draw.generator)
    of_q, out_dtype, wanted = choices.choice(KINDS_OF_Q), choices.choice(OUT_DTYPES), choices.random() < 0.5
    if not wanted or not takes_queries(case):
        return case
    return with_queries(case, of_q, out_dtype, draw.generator)


def takes_queries(case: Case) -> bool:
    """Whether a problem with keys of 8 bits may have such queries: none with dropout, or that appends to a cache."""
    given = case.arguments
    appends = given.get("k_cache") is not None and (given.get("k") is not None or given.get("rotary_cos") is not None)
    return not given.get("dropout_p") and not appends


def with_queries(
    case: Case, kind: str, out_dtype: torch.dtype | None = None, generator: torch.Generator | None = None
) -> Case:
    """The problem with queries of 8 bits and scales of this kind: "none", "heads", "sequences" or "tokens"."""
    arguments = dict(case.arguments)
    q, keys = arguments["q"], arguments["k_cache" if "k_cache" in arguments else "k"]
    packed, paged = q.ndim == 3, arguments.get("page_table") is not None
    heads_kv = keys.shape[2 if paged else 1]
    if packed and not paged and "k_cache" not in arguments:
        heads_kv = keys.shape[1]
    per_token = (q.shape[1], q.shape[0]) if packed else q.shape[:3]
    shape = {"heads": (heads_kv,), "sequences": (_batch(arguments), heads_kv), "tokens": per_token}.get(kind, ())
    if packed and kind == "sequences" and shape == per_token:  # which may be either
        shape = (heads_kv,)
    size = float(q.float().nan_to_num(0.0).abs().max()) if q.numel() else 1.0
    scale = (size or 1.0) / torch.finfo(QUERIES).max * (0.5 + torch.rand(shape, generator=generator))
    largest = torch.finfo(QUERIES).max
    stored = (q.float() / (size or 1.0) * largest).clamp(-largest, largest).to(QUERIES)
    arguments["q"] = in_layout(stored, q)
    arguments |= {} if kind == "none" else {"q_descale": scale.to(q.device)}
    if kind == "none":
        arguments["scale"] = (arguments.get("scale") or q.shape[-1] ** -0.5) * (size or 1.0) / largest
    arguments |= {} if out_dtype is None else {"out_dtype": out_dtype}
    return replace(case, arguments=arguments, dout=None, dlse=None, description="")


def in_layout(stored: Tensor, like: Tensor) -> Tensor:
    """8-bit numbers with the strides of another tensor, unless its elements share memory."""
    if any(n > 1 and stride == 0 for n, stride in zip(like.shape, like.stride(), strict=True)):
        return stored.contiguous()
    return (
        torch.empty_strided(like.shape, like.stride(), dtype=torch.uint8, device=like.device)
        .copy_(stored.view(torch.uint8))
        .view(stored.dtype)
    )


def with_eight_bits(
    case: Case, dtype: torch.dtype, kind_k: str, kind_v: str, generator: torch.Generator | None = None
) -> Case:
    """The problem with keys and values of 8 bits and scales of these kinds: "none", "heads", "sequences", "pages" or
    "tokens". Without rotary positions of new keys: which of two neighbors a rotated number becomes may be open.
    """
    arguments, cached = dict(case.arguments), case.function == "attention_with_kvcache"
    if arguments.get("k_cache") is not None and arguments.get("k") is not None:
        arguments = {name: x for name, x in arguments.items() if name not in ROTARY}
    paged = arguments.get("page_table") is not None
    for side, kind in (("k", kind_k), ("v", kind_v)):
        name = f"{side}_cache" if cached else side
        x = arguments[name]
        kind = "heads" if kind == "pages" and not paged else kind
        packed = x.ndim == 3
        of_heads = x if paged else x[:, None] if packed else x.transpose(1, 2)  # [P, page_size, Hkv, D]
        if packed and kind == "sequences" and (_batch(arguments), x.shape[1]) == (x.shape[1], x.shape[0]):
            kind = "heads"  # scales of sequences may be those of tokens
        scale = scales(of_heads.cpu(), dtype, kind, _batch(arguments), paged, generator).to(x.device)
        stored = quantized(of_heads.float() / by_token(scale, of_heads, kind)[..., None], dtype)
        stored = stored if paged else stored[:, 0] if packed else stored.transpose(1, 2)
        arguments[name] = in_layout(stored, x)
        if kind != "none":
            of_tokens = kind == "tokens" and not paged
            scale = scale[:, 0].t() if of_tokens and packed else scale.transpose(1, 2) if of_tokens else scale
            arguments[f"{side}_descale"] = scale
    return replace(case, arguments=arguments, dout=None, dlse=None, description="")


def _batch(arguments: dict[str, Any]) -> int:
    starts = arguments.get("cu_seqlens_q")
    return len(arguments["q"]) if starts is None else len(starts) - 1


def quantized(x: Tensor, dtype: torch.dtype) -> Tensor:
    """NaN, as memory that no call may read, becomes a NaN, and in int8 a number that no other becomes."""
    if dtype == torch.int8:
        return x.clamp(-127, 127).nan_to_num(-128.0).round().to(dtype)
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def scales(
    x: Tensor, dtype: torch.dtype, kind: str, batch: int, paged: bool, generator: torch.Generator | None
) -> Tensor:
    """Scales of pages `x [P, page_size, Hkv, D]`, typical of their numbers."""
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    size = x.float().abs().nan_to_num(0.0, posinf=0.0)
    pages, page_size, heads, _ = x.shape
    shape = {"sequences": (batch, heads), "pages": (pages, heads), "tokens": (pages, page_size, heads)}.get(
        kind, (heads,)
    )
    typical = float(size.max()) / largest if size.numel() else 1.0
    scale = (typical or 1.0) * (0.5 + torch.rand(shape, generator=generator))
    if kind == "tokens":
        scale = scale.where(~x.isnan().all(-1), torch.nan)  # slots without a key
    if kind == "pages" and pages == batch:
        scale = scale[:, None]
    return torch.ones(heads) if kind == "none" else scale


def by_token(scale: Tensor, x: Tensor, kind: str) -> Tensor:
    """A scale for each token, to quantize by. One of sequences stands for the first one's: pages have no sequence."""
    if kind == "sequences":
        scale = scale[0] if len(scale) else scale.new_ones(x.shape[2])
    if scale.ndim == 2:
        scale = scale[:, None]
    return scale.expand(x.shape[:3])
