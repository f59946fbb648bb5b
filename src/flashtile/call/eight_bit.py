"""Keys and values of 8 bits: their dtypes, the layouts of their scales, and how new ones are quantized.

A scale multiplies a number of the cache: `k = k_cache * k_descale`, in the accumulation dtype.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
DTYPES_IN_WORDS = ", ".join(str(dtype).removeprefix("torch.") for dtype in FORMATS)
DESCALES = ("k_descale", "v_descale")
QUERIES = torch.float8_e4m3fn  # the dtype of queries of 8 bits
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # dtypes of the result of such queries


class EightBit(NamedTuple):
    """What a plan depends on of keys and values of 8 bits."""

    format: str  # "e4m3", "e5m2", "int8", or "packed" for latent rows of 656 bytes
    k_by_key: bool  # scales differ from key to key, or from page to page
    v_by_key: bool
    q_by_row: bool | None = None  # scales of queries differ from row to row; None of queries of 16 bits or more


PACKED = EightBit("packed", False, False)
READS_A_COPY = "of latent rows of 656 bytes it reads a copy in q's dtype"


def is_eight_bit(x: Tensor) -> bool:
    return x.dtype in FORMATS


def describe(
    q: Tensor, k: Tensor, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None
) -> EightBit | None:
    """Of keys of 8 bits and the views of scales (`query_scales`, `key_scales`); `None` of other keys."""
    if k.dtype is torch.uint8:
        return PACKED
    if not is_eight_bit(k):
        return None
    k_by_key, v_by_key = (is_by_key(x) for x in (k_descale, v_descale))
    q_by_row = (q_descale is not None and q_descale.shape[2] > 1) if is_eight_bit(q) else None
    return EightBit(FORMATS[k.dtype], k_by_key, v_by_key, q_by_row)


def is_by_key(view: Tensor | None) -> bool:
    """Whether scales `[B|1, num_pages|1, page_size|1, Hkv]` differ from key to key, or from page to page."""
    return view is not None and (view.shape[1] > 1 or view.shape[2] > 1)


def shapes_in_words(*, paged: bool) -> str:
    of_keys = "[num_pages, Hkv], [num_pages, page_size, Hkv]" if paged else "[B_cache, Hkv, S_max]"
    return f"float32 [Hkv], [B, Hkv], {of_keys}"


def query_scales(x: Tensor, q: Tensor, heads_kv: int, batch: int) -> Tensor | None:
    """A caller's scales of queries as a view `[B|1, Hkv or Hq, rows|1]`; `None` for a shape that is not accepted. Rows
    are a sequence's, or all packed tokens. A view of this form is its own.
    """
    packed, heads_q = q.dim() == 3, q.shape[1]
    rows = q.shape[0 if packed else 2]
    match tuple(x.shape):
        case (h,) if h == heads_kv:
            return x[None, :, None]
        case (b, h) if (b, h) == (batch, heads_kv):
            return x[:, :, None]
        case (h, t) if packed and (h, t) == (heads_q, rows):
            return x[None]
        case (b, h, t) if b in (1, batch) and h in (heads_kv, heads_q) and t in (1, rows):
            return None if packed and b > 1 and t > 1 else x
    return None


def key_scales(x: Tensor, k: Tensor, batch: int, layout: str) -> Tensor | None:
    """A caller's scales of keys or values as a view `[B|1, num_pages|1, page_size|1, Hkv]`; `None` for a shape that is
    not accepted. A dense sequence is one page, and a packed token is one.
    """
    if layout != "varlen":
        return scales_of_pages(x, k, batch, paged=layout == "paged")
    tokens, heads = k.shape[:2]
    match tuple(x.shape):
        case (b, t, 1, h) if b in (1, batch) and t in (1, tokens) and h == heads:
            return x
        case (h, t) if (h, t) == (heads, tokens):
            return x.t()[None, :, None]
        case (b, h) if (b, h) == (batch, heads):
            return x[:, None, None]
        case (h,) if h == heads:
            return x[None, None, None]
    return None


def is_by_token(descale: Tensor, cache: Tensor) -> bool:
    """Whether there is a scale for each token and head. An append computes and writes the scales of new tokens."""
    return descale.shape == cache.shape[:3]


def scales_of_pages(descale: Tensor, cache: Tensor, batch: int, *, paged: bool) -> Tensor | None:
    """A caller's scales as a view `[B|1, num_pages|1, page_size|1, Hkv]`, in which a dense cache has one page for each
    row; `None` for a shape that is not accepted. A view of this form is its own.
    """
    pages = cache.shape[0]
    heads = cache.shape[2 if paged else 1]
    if descale.dim() == 4:
        full = batch, pages, cache.shape[1 if paged else 2], heads
        return descale if all(n in (1, m) for n, m in zip(descale.shape, full, strict=True)) else None
    if descale.dim() == 3 and is_by_token(descale, cache):
        return descale[None] if paged else descale.transpose(1, 2)[None]
    match tuple(descale.shape):
        case (h,) if h == heads:
            return descale[None, None, None]
        case (b, h) if h == heads and b == batch:
            return descale[:, None, None]
        case (p, h) if h == heads and paged and p == pages:
            return descale[None, :, None]
        case (p, 1, h) if h == heads and paged and p == pages:
            return descale[None]
    return None


def is_ambiguous(descale: Tensor, cache: Tensor, batch: int, *, paged: bool) -> bool:
    """Whether `[n, Hkv]` may be scales of n sequences or of n pages."""
    return paged and descale.dim() == 2 and descale.shape[0] == cache.shape[0] == batch > 1


def quantize(x: Tensor, descale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """`x / descale`, both float32, to the nearest number of 8 bits, ties to even; larger ones become the largest. NaN
    stays NaN, and is 0 in int8.
    """
    largest = LARGEST[dtype]
    scaled = x.float() / descale
    if dtype is torch.int8:
        scaled = scaled.nan_to_num(0.0, posinf=largest, neginf=-largest).round()
    return scaled.clamp(-largest, largest).to(dtype)


def own_scales(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of each token and head of `x [..., D]`: the largest becomes the largest number of 8 bits. Scales of
    zeros are 1; NaN and infinities, which no scale serves, count as 0 and as the largest float32.
    """
    largest = x.float().abs().nan_to_num(0.0).amax(dim=-1)
    scale = largest / torch.full_like(largest, LARGEST[dtype])  # a GPU multiplies by the reciprocal of a number
    return torch.where(scale > 0, scale, 1.0)


def bits(x: Tensor) -> Tensor:
    """The elements as integers, for operations that 8-bit dtypes do not have; a view."""
    return x.view(torch.uint8) if x.dtype.is_floating_point and is_eight_bit(x) else x


def number(descale: Tensor | None, sequence: Tensor, page: Tensor, slot: Tensor) -> Tensor | float:
    """The scales of tokens in the pages of their sequences, `[..., Hkv]`."""
    if descale is None:
        return 1.0
    index = (x if n > 1 else torch.zeros_like(x) for x, n in zip((sequence, page, slot), descale.shape, strict=False))
    return descale[tuple(index)]
