"""Rows that see NaN and infinities, alone and together: a maximum over scores may drop them, sums must not."""

import torch
from torch import Tensor

from flashtile.testing.case import Case

INF, NAN = torch.inf, torch.nan
SCORES = (  # added to those of the first keys, and to all others
    ((NAN,), NAN),
    ((NAN,), 0.0),
    ((NAN, INF), 0.0),
    ((INF, *(40 * (0.0,)), NAN), 0.0),
    ((*(40 * (-INF,)), NAN), -INF),
    ((0.5, NAN), -INF),
    ((INF,), 0.0),
    ((INF,), -INF),
    ((-INF,), -INF),
    ((0.0,), 0.0),
)
SINKS = (0.5, -INF, INF)


def infinite_case(seqlen_k: int, num_splits: int, device: str) -> Case:
    """A decoding call, because its keys are split: a sequence for each of SCORES, a head for each of SINKS."""
    generator = torch.Generator().manual_seed(seqlen_k)

    def randn(*shape: int) -> Tensor:
        return torch.randn((len(SCORES), len(SINKS), *shape), generator=generator).to(device)

    bias = torch.tensor([rest for _, rest in SCORES]).repeat(seqlen_k, 1).t().contiguous()  # [B, Sk]
    for row, (first, _) in zip(bias, SCORES, strict=True):
        row[: len(first)] = torch.tensor(first)[:seqlen_k]
    arguments = {
        "q": randn(1, 16),
        "k_cache": randn(seqlen_k, 16),
        "v_cache": randn(seqlen_k, 16),
        "cache_seqlens": torch.full((len(SCORES),), seqlen_k, dtype=torch.int32, device=device),
        "bias": bias[:, None, None].to(device),
        "sinks": torch.tensor(SINKS, device=device),
        "num_splits": num_splits,
    }
    return Case("attention_with_kvcache", arguments)
