"""Calls in float8_e4m3fn, and how far their results may be from exact ones of the dequantized numbers."""

import math
from dataclasses import replace
from typing import Any

import paged_cases
import torch
from checking import offsets
from hopper_score_mods import decay, signed
from listed_masks import documents
from torch import Tensor

import flashtile
from flashtile.testing.case import Case, MaskFunction, ScoreFunction

FP8 = torch.float8_e4m3fn
ROUNDING = 2.0**-4  # of p, relative; another one of p's sum
LOST = 128 * 2.0**-10 / 2.0  # of a block: half of the smallest number for each key, of p that is 2 at least


def call_of(
    width: int,
    rows: Any,
    keys: Any,
    heads: tuple[int, int] = (2, 2),
    batch: int = 1,
    scales: float = 1.5,
    of_keys: torch.dtype = FP8,
    **more: Any,
) -> dict[str, Any]:
    """The arguments of a call; lists of lengths make a packed one, whose last tokens are outside of all sequences."""
    make = torch.Generator().manual_seed(width + heads[0])
    packed = not isinstance(rows, int)
    shapes = [(batch, h, n, width) for h, n in zip((heads[0], heads[1], heads[1]), (rows, keys, keys), strict=True)]
    if packed:
        batch = len(rows)
        shapes = [
            (sum(n) + 3, h, width) for h, n in zip((heads[0], heads[1], heads[1]), (rows, keys, keys), strict=True)
        ]
        more |= {"cu_seqlens_q": offsets(*rows), "cu_seqlens_k": offsets(*keys)}
    dtypes = FP8, of_keys, of_keys
    tensors = [torch.randn(x, generator=make).to(dtype) for x, dtype in zip(shapes, dtypes, strict=True)]
    given: dict[str, Any] = dict(zip("qkv", tensors, strict=True))
    given |= {"out_dtype": torch.float32, "return_lse": True} | more
    if scales:
        descales = (scales * torch.rand(batch, heads[1], generator=make) + 0.1 for _ in range(3))
        given |= dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    return given


CASES = {
    "full": call_of(64, 70, 200),
    "causal": call_of(128, 200, 300, causal=True),
    "causal 256": call_of(256, 130, 300, causal=True, out_dtype=torch.bfloat16),
    "a key after a block": call_of(128, 129, 129, scales=0),
    "top left of groups": call_of(128, 130, 130, (2, 1), causal="top_left"),
    "window of groups": call_of(64, 150, 257, (4, 2), 2, window=(60, 20)),
    "softcap": call_of(128, 100, 150, softcap=3.0, causal=True),
    "sinks": call_of(64, 130, 150, (3, 3), sinks=torch.tensor([3.0, -2.0, 300.0]), causal=True),
    "slopes": call_of(64, 100, 150, alibi_slopes=torch.tensor([1.0, 0.01]), causal=True),
    "narrower": call_of(96, 100, 150, causal=True),
    "rows without keys": call_of(80, 200, 100, causal=True, out_dtype=torch.float16),
    "negative scale": call_of(64, 70, 130, scale=-0.1),
    "e5m2": call_of(128, 70, 150, (2, 1), of_keys=torch.float8_e5m2, causal=True),
    "packed": call_of(64, (70, 0, 130), (100, 20, 257), (4, 2), causal=True),
    "packed, used": call_of(128, (70, 1, 130), (100, 20, 257), seqused_k=torch.tensor([50, 20, 0]).int()),
}


def tail(keys: int, place: int, bits: int, width: int = 64) -> tuple[dict[str, Any], float]:
    """A call in which the key at `place` is `2 ** bits` times as heavy as each other one, with a value of 0 where
    others have 1, and the result without the other keys of its block: rounding to 8 bits may lose them beside it.
    """
    given = call_of(width, 70, keys, (1, 1), scales=0, scale=bits * math.log(2) / width)
    for name, number in (("q", 1.0), ("k", 0.0), ("v", 1.0)):
        given[name] = torch.full(given[name].shape, number)
    given["k"][..., place, :] = 1
    given["v"][..., place, :] = 0
    first = place // 128 * 128
    others = keys - (min(first + 128, keys) - first)
    return {name: x.to(FP8) if name in "qkv" else x for name, x in given.items()}, others / (keys - 1 + 2.0**bits)


PAGED: dict[str, dict[str, Any]] = {  # scales
    "8 keys a page": {},
    "16": {"q_descale": torch.tensor([0.5, 1.5]), "k_descale": torch.tensor([[0.5, 2.0], [1.0, 0.3], [1.5, 0.7]])},
    "24, hdim 96": {"v_descale": torch.tensor([0.5, 1.5])},
    "64, features": {},
    "192, hdim 256": {},
    "dense cache": {"v_descale": torch.tensor([[0.5, 2.0], [1.0, 0.3], [1.5, 0.7]])},
    "dense cache, packed": {},
}

IDS = torch.repeat_interleave(torch.tensor([3, 8, 9, 4]), torch.tensor([130, 71, 180, 219]))
DOCUMENTS = MaskFunction(documents, (IDS,))
PADDING = (torch.arange(300) < torch.tensor([[140], [300]])).view(2, 1, 1, 300)
ROWS = (torch.rand(1, 1, 250, 401, generator=torch.Generator().manual_seed(0)) < 0.5) & (torch.arange(401) > 140)
MASKS: dict[str, dict[str, Any]] = {
    "documents": call_of(128, 385, 385, mask=DOCUMENTS),
    "documents, causal": call_of(64, 513, 401, (4, 2), mask=DOCUMENTS, causal=True),
    "padding": call_of(128, 200, 300, batch=2, mask=PADDING, softcap=5.0),
    "rows": call_of(256, 250, 401, mask=ROWS),
}
BIAS = torch.randn(1, 2, 130, 300, generator=torch.Generator().manual_seed(0))
SIGNED = ScoreFunction(signed, (torch.tensor([0.7, -1.5]),))
FORMULAS: dict[str, dict[str, Any]] = {
    "bias, softcap": call_of(128, 130, 300, bias=BIAS.bfloat16(), softcap=4.0, causal=True),
    "bias of a row": call_of(64, 130, 300, bias=BIAS[:, :1, :1]),
    "decay, packed": call_of(64, (70, 130), (100, 257), score_mod=ScoreFunction(decay, (torch.tensor([0.1, 0.02]),))),
    "factors of heads": call_of(64, 70, 200, score_mod=SIGNED),
    "factors of heads, bias": call_of(256, 130, 300, score_mod=SIGNED, bias=BIAS, causal=True),
}


def mask_case(name: str, device: str) -> Case:
    """A problem with a mask, a bias or a score_mod."""
    given = {x: y for x, y in on(device, (MASKS | FORMULAS)[name]).items() if x != "return_lse"}
    for key in {"mask", "score_mod"} & given.keys():
        if isinstance(given[key], MaskFunction | ScoreFunction):
            given[key] = replace(given[key], tensors=tuple(x.to(device) for x in given[key].tensors))
    return Case("attention_varlen" if "cu_seqlens_q" in given else "attention", given, forward_only=True)


def paged_case(name: str, device: str) -> Case:
    """A problem with keys of 8 bits in pages."""
    case = replace(paged_cases.CASES[name], dtype=FP8).case(0, device)
    return replace(case, arguments=case.arguments | on(device, PAGED[name]))


def run(given: dict[str, Any], backend: str) -> tuple[Tensor, Tensor]:
    packed = "cu_seqlens_q" in given
    return (flashtile.attention_varlen if packed else flashtile.attention)(**given, backend=backend)  # type: ignore[return-value]


def on(device: str, given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}


def is_close(given: dict[str, Any], out: Tensor, lse: Tensor, of_products: float = 0.0) -> bool:
    """Whether results differ from exact ones by no more than the rounding of p, and `of_products` relative to sums of
    absolute values of products.
    """
    exact: dict[str, Any] = on("cpu", given) | {"out_dtype": torch.float32}
    expected, expected_lse = run(exact, "reference")
    size, _ = run(exact | {"v": exact["v"].float().abs().to(exact["v"].dtype)}, "reference")
    largest = exact["v"].float().abs().max() * (1 if "v_descale" not in exact else exact["v_descale"].max())
    score = of_products * largest_sum(exact)
    bound = 2 * (ROUNDING + score + of_products) * size + LOST * largest
    error = (out.cpu().float() - expected).abs()
    rms = error.square().mean().sqrt() / size.square().mean().sqrt()
    same_lse = torch.allclose(lse.cpu(), expected_lse, rtol=1e-5, atol=1e-5 + score)
    within = bool((error <= bound + torch.finfo(out.dtype).eps * size).all())
    return within and bool(rms < ROUNDING / 4 + score) and same_lse


def largest_sum(given: dict[str, Any]) -> float:
    """The largest sum of a score's absolute products, at most."""
    scale = abs(given.get("scale", given["q"].shape[-1] ** -0.5))
    for name in ("q_descale", "k_descale"):
        scale *= float(given[name].max()) if name in given else 1.0
    q, k = (given[name].float().square().sum(-1).sqrt().max() for name in "qk")
    return float(scale * q * k)
