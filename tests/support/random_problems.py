"""Random problems of 16 and 32 bits on GPUs, with the features that plans ask about."""

import random
from dataclasses import replace
from typing import Any

import torch

from flashtile.call.call import NO_FEATURES, Call, Features
from flashtile.call.device import Device
from flashtile.call.problem import Pages, Problem
from flashtile.call.window import UNLIMITED, Window
from flashtile.prebuilt.launches import call_of as standard_call
from flashtile.prebuilt.standard import StandardCall, empty

H100 = Device("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132)
OTHERS = (
    Device("cuda", "NVIDIA A100", "sm_80", 108, 1410.0, 2.0e6), Device("cuda", "NVIDIA L4", "sm_89", 58, 2040.0, 3.0e5),
    Device("cuda", "NVIDIA RTX 5090", "sm_120", 170, 2400.0, 1.8e6),
    Device("cuda", "AMD Instinct MI300X", "gfx942", 304, 2100.0, 5.3e6),
)  # fmt: skip
WIDTHS = (16, 32, 40, 64, 64, 72, 80, 96, 128, 128, 128, 192, 256)
FEATURES: tuple[dict[str, Any], ...] = (
    {"softcap": True}, {"dropout": True}, {"features": NO_FEATURES._replace(alibi_slopes=True)},
    {"features": NO_FEATURES._replace(bias=(True, False, False, False))},
    {"features": NO_FEATURES._replace(mask=(False, True, False, False))},
)  # fmt: skip
WINDOWS = (UNLIMITED, UNLIMITED, UNLIMITED, Window(None, 0), Window(None, 0), Window(255, 0), Window(100, 60))


def random_problem(seed: int, *, longest: int = 2**14, **changes: Any) -> Problem:
    """A problem of one layout, width, and feature in four, of lengths up to `longest`."""
    draw = random.Random(seed)
    width = draw.choice(WIDTHS)
    heads_kv, group = draw.choice((1, 2, 4, 8, 12, 16, 25)), draw.choice((1, 1, 1, 2, 4, 8))
    rows = draw.choice((1, 1, 4, 16)) if draw.random() < 0.2 else length(draw, longest)
    plain = Problem(
        layout="dense", dtype=draw.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)),
        batch=int(2 ** draw.uniform(0, 6)), num_heads_q=heads_kv * group, num_heads_kv=heads_kv,
        seqlen_q=rows, seqlen_k=rows if draw.random() < 0.5 and rows > 16 else length(draw, longest), head_dim=width,
        head_dim_v=128 if width == 192 else width, pages=None, window=draw.choice(WINDOWS), seqused_q=False,
        leftpad_k=False, softcap=False, features=Features(), score_mod=None, mask_mod=None, dropout=False,
        deterministic=draw.random() < 0.1, alignment=16,
    )  # fmt: skip
    if draw.random() < 0.1:
        plain = replace(plain, layout="varlen")
    elif draw.random() < 0.1:
        size = draw.choice((16, 64, 256))
        keys = max(2, -(-plain.seqlen_k // size)) * size
        plain = replace(plain, layout="paged", pages=Pages(size, True, True), seqlen_k=keys)
    elif draw.random() < 0.25:
        plain = replace(plain, **draw.choice(FEATURES))
    return replace(plain, **changes)


def length(draw: random.Random, longest: int) -> int:
    return int(2 ** draw.uniform(4, longest.bit_length() - 1))


def call_of(p: Problem) -> Call:
    """A call on meta tensors with such a problem."""
    if p.layout == "dense":
        q, k, v = (empty(p.batch, heads, n, width, dtype=p.dtype) for heads, n, width in sizes_of(p))
        return standard_call(StandardCall("attention", {"q": q, "k": k, "v": v} | features_of(p)))
    q, k, v = (empty(p.batch * n, heads, width, dtype=p.dtype) for heads, n, width in sizes_of(p))
    offsets = empty(p.batch + 1, dtype=torch.int32)
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": p.seqlen_q}
    if p.pages is None:
        arguments = {"q": q, "k": k, "v": v, "max_seqlen_k": p.seqlen_k} | packed
        return standard_call(StandardCall("attention_varlen", arguments | features_of(p)))
    columns = -(-p.seqlen_k // p.pages.size)
    k, v = (
        empty(p.batch * columns, p.pages.size, p.num_heads_kv, width, dtype=p.dtype)
        for width in (p.head_dim, p.head_dim_v)
    )
    table = {"page_table": empty(p.batch, columns, dtype=torch.int32), "seqused_k": empty(p.batch, dtype=torch.int32)}
    arguments = {"q": q, "k": k, "v": v} | packed | {"cu_seqlens_k": None} | table
    return standard_call(StandardCall("attention_varlen", arguments | features_of(p)))


def sizes_of(p: Problem) -> tuple[tuple[int, int, int], ...]:
    """Heads, positions and features of q, k and v."""
    return (
        (p.num_heads_q, p.seqlen_q, p.head_dim), (p.num_heads_kv, p.seqlen_k, p.head_dim),
        (p.num_heads_kv, p.seqlen_k, p.head_dim_v),
    )  # fmt: skip


def features_of(p: Problem) -> dict[str, Any]:
    """Arguments by name."""
    found: dict[str, Any] = {"deterministic": p.deterministic, "window": (p.window.left, p.window.right)}
    pairs = p.batch, p.num_heads_q, p.seqlen_q, p.seqlen_k
    for name, dtype in (("bias", p.dtype), ("mask", torch.bool)):
        if (broadcast := getattr(p.features, name)) is not None:
            shape = [1 if one else n for one, n in zip(broadcast, pairs, strict=True)]
            found[name] = empty(*shape, dtype=dtype)
    found |= {"alibi_slopes": empty(p.num_heads_q)} if p.features.alibi_slopes else {}
    found |= {"softcap": 20.0} if p.softcap else {}
    return found | ({"dropout_p": 0.1, "dropout_seed": 3} if p.dropout else {})
