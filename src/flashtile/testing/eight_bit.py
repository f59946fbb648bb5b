"""Problems with caches or pages of 8 bits, made of those in q's dtype."""

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .case import Case
from .draw import RECORDED, Draw

PART = 0.15  # share of the problems with a cache or pages
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
ROTARY = ("rotary_cos", "rotary_sin", "rotary_interleaved", "rotary_start", "rotary_q_fixed")


def maybe_eight_bits(case: Case, draw: Draw) -> Case:
    """The problem, or one with keys and values of 8 bits."""
    choices = random.Random(f"eight bits of {draw.seed}")  # the same for all variations
    has_pages = case.function == "attention_with_kvcache" or case.arguments.get("page_table") is not None
    if choices.random() >= PART or not has_pages or draw.seed in RECORDED or "eight bits" in draw.left_out:
        return case
    of_k, of_v = (choices.choice(("none", "heads", "sequences", "pages", "tokens")) for _ in range(2))
    return with_eight_bits(case, choices.choice(FORMATS), of_k, of_v, draw.generator)


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
        if not cached or not paged:
            kind = "heads" if kind == "pages" and not paged else kind
        of_heads = x if paged else x.transpose(1, 2)  # [P, page_size, Hkv, D]
        scale = scales(of_heads.cpu(), dtype, kind, _batch(arguments), paged, generator).to(x.device)
        stored = quantized(of_heads.float() / by_token(scale, of_heads, kind)[..., None], dtype)
        stored = stored if paged else stored.transpose(1, 2)
        arguments[name] = (
            torch.empty_strided(x.shape, x.stride(), dtype=torch.uint8, device=x.device)
            .copy_(stored.view(torch.uint8))
            .view(dtype)
        )
        if kind != "none":
            arguments[f"{side}_descale"] = scale if paged or kind != "tokens" else scale.transpose(1, 2)
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
