"""Calls below the public functions: tensors and normalized settings."""

from typing import Any

import torch
from checking import offsets
from torch import Tensor

import flashtile
from flashtile.api.normalize import normalize
from flashtile.call.call import Call

B, HQ, HKV, SQ, SK, D, DV = 2, 4, 2, 7, 9, 8, 6
MODIFIERS = ("mask", "bias", "alibi_slopes", "sinks")


def dense_call(dtype: torch.dtype = torch.float32, **keywords: Any) -> Call:
    shapes = {"q": (B, HQ, SQ, D), "k": (B, HKV, SK, D), "v": (B, HKV, SK, DV)}
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    return call_of(tensors | {name: keywords.pop(name, None) for name in MODIFIERS}, keywords)


def varlen_call(**keywords: Any) -> Call:
    lengths_q, lengths_k = (4, 0, 3), (5, 2, 1)
    tensors = {"q": torch.randn(8, HQ, D), "k": torch.randn(9, HKV, D), "v": torch.randn(9, HKV, DV)}
    tensors |= {"cu_seqlens_q": offsets(*lengths_q), "cu_seqlens_k": offsets(*lengths_k)}
    return call_of(tensors | {name: keywords.pop(name, None) for name in MODIFIERS}, keywords)


def paged_call() -> Call:
    call = varlen_call()
    pages = {"k": torch.randn(6, 2, HKV, D), "v": torch.randn(6, 2, HKV, DV), "cu_seqlens_k": None}
    pages |= {
        "page_table": torch.arange(6, dtype=torch.int32).reshape(3, 2),
        "seqused_k": torch.tensor([4, 2, 1]).int(),
    }
    return call._replace(tensors=call.tensors._replace(**pages))


def call_of(tensors: dict[str, Any], keywords: dict[str, Any]) -> Call:
    defaults = dict.fromkeys(("window", "scale", "softcap", "score_mod", "dropout_seed", "deterministic"))
    return normalize(
        "attention" if "cu_seqlens_q" not in tensors else "attention_varlen",
        tensors,
        **defaults | {"causal": False, "dropout_p": 0.0, "backend": "auto"} | keywords,
    )


def everything() -> dict[str, Any]:
    return {
        "mask": torch.rand(B, 1, SQ, SK) < 0.8,
        "bias": torch.randn(1, HQ, SQ, SK),
        "alibi_slopes": torch.rand(B, HQ),
        "sinks": torch.randn(HQ),
        "score_mod": flashtile.ScoreMod(all_indices, (torch.randn(B, HQ),)),
        "window": (4, 3),
        "dropout_p": 0.3,
        "dropout_seed": 8,
    }


def all_indices(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, weight: Tensor) -> Tensor:
    return score * weight[b, h] + 0.1 * ((i * 3 + j * 5 + h * 7 + b * 11) % 13)
