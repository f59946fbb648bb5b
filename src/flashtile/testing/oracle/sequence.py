"""One sequence's part of a call, and its visible pairs (docs/contract.md, section "Visibility")."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..case import ExactSides


@dataclass(frozen=True)
class Sequence:
    """One sequence. Floating tensors are float64; tensors "like scores" broadcast to [Hq, Sq, Sk]."""

    q: Tensor  # [Hq, Sq, D]
    k: Tensor  # [Hkv, Sk, D]
    v: Tensor  # [Hkv, Sk, Dv]
    batch: int  # b
    scale: float
    causal: bool | str
    window: tuple[int | None, int | None] | None
    chunk: int | None  # positions that see each other only
    mask: Tensor | None  # bool, like scores
    softcap: float | None
    bias: Tensor | None  # like scores
    alibi_slopes: Tensor | None  # [Hq]
    sinks: Tensor | None  # [Hq]
    score_fn: Callable[..., Tensor] | None
    score_tensors: tuple[Tensor, ...]
    keep: Tensor | None  # dropout's factor of each probability, like scores
    dout: Tensor | None  # [Hq, Sq, Dv]; None: no products with it, which could be NaN
    dlse: Tensor  # [Hq, Sq]
    q_either: Tensor | None = None  # [Hq, Sq, D] distance of two roundings that are both right
    k_either: Tensor | None = None  # [Hkv, Sk, D]

    @property
    def group(self) -> int:
        """Query heads that read one head of keys and values."""
        return self.q.shape[0] // self.k.shape[0]


def relative_position(x: Sequence) -> Tensor:
    """i + Sk - Sq - j, int64 [Sq, Sk]: distance of key j from row i's diagonal, bottom-right aligned."""
    seqlen_q, seqlen_k = x.q.shape[1], x.k.shape[1]
    return torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - torch.arange(seqlen_k)


def visible_pairs(x: Sequence) -> Tensor:
    """Visible pairs, bool [Hq, Sq, Sk]."""
    (num_heads_q, seqlen_q, _), seqlen_k = x.q.shape, x.k.shape[1]
    relative = relative_position(x)
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if x.causal == "top_left":
        visible &= torch.arange(seqlen_k) <= torch.arange(seqlen_q)[:, None]
    elif x.causal:
        visible &= relative >= 0
    left, right = x.window or (None, None)
    unlimited = None if isinstance(x.window, ExactSides) else -1
    if left is not None and left != unlimited:
        visible &= relative <= left
    if right is not None and right != unlimited:
        visible &= relative >= -right
    if x.chunk:
        position = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
        visible &= position.div(x.chunk, rounding_mode="floor") == torch.arange(seqlen_k) // x.chunk
    if x.mask is not None:
        visible = visible & x.mask
    return visible.expand(num_heads_q, seqlen_q, seqlen_k)
