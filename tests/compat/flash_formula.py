"""Attention in FlashAttention's conventions, from its formula: `[B, S, H, D]`, bottom-right, lse +inf of empty rows."""

import torch
from torch import Tensor

FP64 = torch.float64


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    first_key: int = 0,
    keep: Tensor | None = None,
    sinks: Tensor | None = None,
    chunk: int = 0,
    negative: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`out [B, Sq, Hq, D]`, `lse [B, Hq, Sq]` and the weights `[B, Hq, Sq, Sk]` of float64 tensors. `keep` multiplies
    the weights of `out`; keys before `first_key` do not exist. Negative sides of a window are unlimited, or meant as
    they stand if `negative`.
    """
    batch, seqlen_q, heads, width = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (width**-0.5 if scale is None else scale)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    offset = i + seqlen_k - seqlen_q - j
    if alibi_slopes is not None:
        slopes = alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes[None]
        s = s - slopes[..., None, None] * offset.abs()
    left, right = window_size
    hidden = j < first_key
    hidden = hidden | (offset < 0) if causal else hidden.expand(seqlen_q, seqlen_k)
    hidden = hidden | (offset > left) if negative or left >= 0 else hidden
    hidden = hidden | (offset < -right) if negative or right >= 0 else hidden
    hidden = hidden | ((offset + j).div(chunk, rounding_mode="floor") != j // chunk) if chunk else hidden
    s = s.masked_fill(hidden, -torch.inf)
    scores = s if sinks is None else torch.cat((s, sinks[:, None, None].expand(batch, -1, seqlen_q, 1)), dim=-1)
    empty = (scores == -torch.inf).all(dim=-1)
    safe = scores.masked_fill(empty[..., None], 0)
    p = safe.softmax(dim=-1).masked_fill(empty[..., None], 0)[..., :seqlen_k]
    lse = safe.logsumexp(dim=-1).masked_fill(empty, torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", p if keep is None else p * keep, v)
    return out, lse, p


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """`x [B, S, H, D]` multiplied by the rotation of each pair of features, as a complex number. positions `[B, S]`."""
    half, step = cos.shape[1], 2 if interleaved else 1
    first = slice(0, 2 * half if interleaved else half, step)
    second = slice(1 if interleaved else half, 2 * half, step)
    turned = torch.complex(x[..., first], x[..., second]) * torch.complex(cos[positions], sin[positions])[:, :, None]
    result = x.clone()
    result[..., first], result[..., second] = turned.real, turned.imag
    return result


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape)), dtype=FP64)


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach().clone().requires_grad_() for x in tensors)


def gradients(out: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients of a loss that is not linear in `out`."""
    return torch.autograd.grad((out.sin() + out.square()).sum(), inputs)


def assert_same(*pairs: tuple[Tensor, Tensor]) -> None:
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, atol=1e-11, rtol=1e-11)


def assert_gradients_agree(mine: tuple[Tensor, tuple[Tensor, ...]], theirs: tuple[Tensor, tuple[Tensor, ...]]) -> None:
    """Output and gradients of two functions of the same inputs: `(out, inputs)` each."""
    assert_same((mine[0], theirs[0]), *zip(gradients(*mine), gradients(*theirs), strict=True))
