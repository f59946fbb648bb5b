"""Ready score modifications: each returns a `ScoreMod` for the argument `score_mod`, and each is a pattern for others.

Tensors of parameters get gradients if they require them.
"""

import math

import torch
from torch import Tensor

from .expression import ScoreMod

__all__ = ["alibi", "decay", "relative_table", "softcap", "t5_buckets", "tanh_gate", "temperature"]


def alibi(slopes: Tensor, offset: int | Tensor = 0) -> ScoreMod:
    """Linear biases for distances, `slopes [H]`, as the argument `alibi_slopes` (Press et al., "Train Short, Test
    Long", 2022, section 3). `offset`, a number or an integer tensor without dimensions, is added to the queries'
    positions; the argument's is `Sk - Sq`.
    """

    def fn(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, slopes: Tensor) -> Tensor:
        return score - slopes[h] * (q_idx + offset - k_idx).abs()

    return ScoreMod(fn, (slopes,))


def decay(rate: Tensor) -> ScoreMod:
    """Weights that fall by the factor `rate [H]`, in (0, 1), with each position between query and key (Sun et al.,
    "Retentive Network", 2023, section 2.1; here inside the softmax).
    """
    return ScoreMod(lambda score, b, h, q_idx, k_idx, rate: score + torch.log(rate[h]) * (q_idx - k_idx).abs(), (rate,))


def relative_table(table: Tensor) -> ScoreMod:
    """A bias for each head and distance, `table [H, 2 * R + 1]`; distances are clipped to -R and R, as in Shaw et al.,
    "Self-Attention with Relative Position Representations", 2018, section 3.2.
    """

    def fn(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, table: Tensor) -> Tensor:
        last = table.shape[1] - 1
        return score + table[h, (q_idx - k_idx + last // 2).clamp(0, last)]

    return ScoreMod(fn, (table,))


def softcap(cap: float) -> ScoreMod:
    """Scores between -cap and cap, as the argument `softcap` (Gemma Team, "Gemma 2", 2024, section 2)."""
    return ScoreMod(lambda score, b, h, q_idx, k_idx: cap * torch.tanh(score / cap))


def t5_buckets(table: Tensor, max_distance: int = 128, bidirectional: bool = True) -> ScoreMod:
    """A bias for each bucket of distances and head, `table [num_buckets, H]`: a bucket for each distance of near keys,
    and logarithmic ones up to `max_distance` (Raffel et al., "T5", 2020, section 2.1). Unless `bidirectional`, keys of
    the future share the bucket of distance 0.
    """
    buckets = table.shape[0] // 2 if bidirectional else table.shape[0]
    near = buckets // 2
    per_log = (buckets - near) / math.log(max_distance / near)

    def fn(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, table: Tensor) -> Tensor:
        distance = (q_idx - k_idx).abs() if bidirectional else (q_idx - k_idx).clamp(min=0)
        far = near + (torch.log(distance.clamp(min=1) / near) * per_log).int()
        bucket = torch.where(distance < near, distance, far.clamp(0, buckets - 1))
        return score + table[torch.where(k_idx > q_idx, bucket + buckets, bucket) if bidirectional else bucket, h]

    return ScoreMod(fn, (table,))


def tanh_gate(gate: Tensor) -> ScoreMod:
    """Scores times tanh of a gate, `gate [H]`: a head whose gate is 0 attends to all keys alike. The gate comes from
    Alayrac et al., "Flamingo", 2022, section 2.2.
    """
    return ScoreMod(lambda score, b, h, q_idx, k_idx, gate: score * torch.tanh(gate[h]), (gate,))


def temperature(value: Tensor) -> ScoreMod:
    """Scores divided by a temperature, `value [H]`."""
    return ScoreMod(lambda score, b, h, q_idx, k_idx, value: score / value[h], (value,))
