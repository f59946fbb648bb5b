"""Attention from its formula, in operations that every transform of PyTorch knows, and calls to compare with it.

An `Example` is one call as a function of its differentiable tensors alone, so that a test can apply a transform to
`example.fused` (the library, on small tiles) and to `example.formula`, and compare.
"""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from checking import offsets, tile_size
from torch import Tensor

import flashtile
from flashtile.testing.oracle.philox import keep_factors

Outputs = tuple[Tensor, Tensor]
TWO_ROWS = 28  # scores of two rows of a head, or of two heads' rows of few keys
FP64 = torch.float64


def dense_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] = (None, None),
    mask: Tensor | flashtile.MaskMod | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    score_mod_tensors: tuple[Tensor, ...] = (),
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    first_sequence: int = 0,
) -> Outputs:
    """`out` and `lse` of a dense call; sequence 0 here is `first_sequence` of the whole call."""
    (batch, heads, seqlen_q, width), seqlen_k = q.shape, k.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    b = torch.arange(batch)[:, None, None, None] + first_sequence
    h, i, j = torch.arange(heads)[None, :, None, None], torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    behind = i + seqlen_k - seqlen_q - j  # how far a key lies behind the row's own position
    s = (width**-0.5 if scale is None else scale) * (q @ k.mT)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    if alibi_slopes is not None:
        s = s - (alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes[None])[..., None, None] * behind.abs()
    if score_mod is not None:
        s = score_mod(s, b, h, i, j, *score_mod_tensors)
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal is True:
        visible = visible & (behind >= 0)
    if causal == "top_left":
        visible = visible & (j <= i)
    left, right = window
    visible = visible if left is None else visible & (behind <= left)
    visible = visible if right is None else visible & (behind >= -right)
    if isinstance(mask, flashtile.MaskMod):
        mask = mask.fn(b, h, i, j, *mask.tensors)
    visible = visible if mask is None else visible & mask
    s = torch.where(visible, s, -torch.inf)
    if sinks is not None:
        s = torch.cat((s, sinks[:, None, None].expand(*s.shape[:-1], 1)), dim=-1)
    empty = (s == -torch.inf).all(dim=-1, keepdim=True)
    s = torch.where(empty, 0.0, s)
    p = torch.where(empty, 0.0, s.softmax(dim=-1))[..., :seqlen_k]
    lse = torch.where(empty, -torch.inf, s.logsumexp(dim=-1, keepdim=True))[..., 0]
    if dropout_p > 0:
        shape = (heads, seqlen_q, seqlen_k)
        keep = [keep_factors(dropout_p, dropout_seed, first_sequence + n, *shape) for n in range(batch)]
        p = p * torch.stack([torch.from_numpy(x) for x in keep])
    return p @ v, lse


def packed_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | flashtile.MaskMod | None = None,
    alibi_slopes: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **features: Any,
) -> Outputs:
    """A loop of dense calls; tokens of no sequence give 0 and -inf."""
    outs, lses = [], []
    starts = cu_seqlens_q.tolist()
    for n, (start, end) in enumerate(itertools.pairwise(starts)):
        keys = keys_of(n, k, cu_seqlens_k, seqused_k, page_table)

        def local(x: Tensor | None, shape: tuple[int, int, int]) -> Tensor | None:
            if x is None:
                return None
            parts = (slice(shape[0], shape[0] + 1), slice(None), slice(shape[1]), slice(shape[2]))
            return x[tuple(slice(None) if m == 1 else part for m, part in zip(x.shape, parts, strict=True))]

        parts = [x.transpose(0, 1)[None] for x in (q[start:end], flat(k)[keys], flat(v)[keys])]
        slopes = alibi_slopes[n : n + 1] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        place = (n, end - start, len(keys))
        given = {"bias": local(bias, place), "mask": mask, "alibi_slopes": slopes}
        if not isinstance(mask, flashtile.MaskMod):
            given["mask"] = local(mask, place)
        out, lse = dense_formula(*parts, first_sequence=n, **given, **features)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    spare = q.shape[0] - starts[-1]
    outs.append(v.new_zeros((spare, q.shape[1], v.shape[-1])))
    lses.append(q.new_full((q.shape[1], spare), -torch.inf))
    return torch.cat(outs), torch.cat(lses, dim=1)


def flat(x: Tensor) -> Tensor:
    """Pages as tokens."""
    return x.flatten(0, 1) if x.dim() == 4 else x


def keys_of(n: int, k: Tensor, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None, table: Tensor | None) -> Tensor:
    """The tokens of k that are sequence n's keys, in order."""
    if seqused_k is not None:
        length = int(seqused_k[n])
    else:
        assert cu_seqlens_k is not None
        length = int(cu_seqlens_k[n + 1] - cu_seqlens_k[n])
    position = torch.arange(length)
    if table is None:
        assert cu_seqlens_k is not None
        return position + int(cu_seqlens_k[n])
    page_size = k.shape[1]
    return table[n].long()[position // page_size] * page_size + position % page_size


@dataclass
class Example:
    """A call as a function of its `inputs`; `fixed` are the other arguments. `score_mod_n` are score_mod's tensors. By
    default the backend is the one that has the tiles and compiles nothing; "auto" takes that of least expected time.
    """

    inputs: dict[str, Tensor]
    fixed: dict[str, Any] = field(default_factory=dict)
    tile: tuple[int, int] = (2, 3)
    scores: int = 2**20  # of a block: all heads and sequences
    backend: str = "tiled"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.inputs.values())

    def tangents(self, seed: int = 1) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(x.shape, generator=generator, dtype=FP64).to(x.dtype) for x in self.tensors)

    def arguments(self, tensors: tuple[Tensor, ...]) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        named = dict(zip(self.inputs, tensors, strict=True))
        modifiers = tuple(named.pop(name) for name in self.inputs if name.startswith("score_mod_"))
        return named | self.fixed, modifiers

    def tiles(self) -> AbstractContextManager[None]:
        """The tiles of calls, which derivatives of their results need once more."""
        return tile_size(*self.tile, self.scores)

    def fused(self, *tensors: Tensor, **options: Any) -> Outputs:
        arguments, modifiers = self.arguments(tensors)
        if "score_mod" in arguments:
            arguments["score_mod"] = flashtile.ScoreMod(arguments["score_mod"], modifiers)
        call = flashtile.attention_varlen if "cu_seqlens_q" in arguments else flashtile.attention
        if "cu_seqlens_q" in arguments:
            arguments.setdefault("cu_seqlens_k", None)
        with self.tiles():
            return call(**arguments, return_lse=True, **{"backend": self.backend} | options)

    def formula(self, *tensors: Tensor) -> Outputs:
        arguments, modifiers = self.arguments(tensors)
        call = packed_formula if "cu_seqlens_q" in arguments else dense_formula
        return call(**arguments, score_mod_tensors=modifiers)


def loss(attention: Callable[..., Outputs]) -> Callable[..., Tensor]:
    """A scalar that is not linear in `out` or `lse`; rows that see nothing add nothing for their lse."""

    def of_inputs(*tensors: Tensor) -> Tensor:
        out, lse = attention(*tensors)
        return (torch.sin(2 * out) + out.square()).sum() + torch.cos(torch.where(lse == -torch.inf, 0, lse)).sum()

    return of_inputs


def curved(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, factor: Tensor, offset: Tensor) -> Tensor:
    """A score modification with second derivatives in everything, and every index."""
    return score * torch.tanh(factor[h]) + 0.1 * score.square() * offset[b, h] + offset[b, h] ** 2 * ((i - j) % 3)


def within(b: Tensor, h: Tensor, i: Tensor, j: Tensor, lengths: Tensor) -> Tensor:
    """A mask function of every index."""
    return (j < lengths[b]) & ((i + j + h) % 3 != 0)


B, HQ, HKV, SQ, SK, D, DV = 2, 4, 2, 5, 7, 3, 2
MASK_MOD = flashtile.MaskMod(within, (torch.tensor([6, 2, 4, 1]),))
CU_Q, CU_K = offsets(3, 0, 4, 1), offsets(5, 2, 0, 4)
TQ, TK = 10, 12  # the last tokens belong to no sequence
TABLE = torch.tensor([[4, 0, 7], [2, 9, 9], [9, 9, 9], [1, 5, 9]], dtype=torch.int32)  # entry 9 is never looked at


def dense(
    fixed: dict[str, Any] | None = None,
    *,
    batch: int = B,
    heads: tuple[int, int] = (HQ, HKV),
    seqlen_q: int = SQ,
    seqlen_k: int = SK,
    **extra: Tensor,
) -> Example:
    hq, hkv = heads
    inputs = {"q": randn(batch, hq, seqlen_q, D), "k": randn(batch, hkv, seqlen_k, D, seed=1)}
    return Example(inputs | {"v": randn(batch, hkv, seqlen_k, DV, seed=2)} | extra, fixed or {})


def packed(fixed: dict[str, Any] | None = None, **extra: Tensor) -> Example:
    inputs = {"q": randn(TQ, HQ, D), "k": randn(TK, HKV, D, seed=1), "v": randn(TK, HKV, DV, seed=2)}
    return Example(inputs | extra, {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K} | (fixed or {}))


def paged(fixed: dict[str, Any] | None = None, **extra: Tensor) -> Example:
    inputs = {"q": randn(TQ, HQ, D), "k": randn(8, 2, HKV, D, seed=1), "v": randn(8, 2, HKV, DV, seed=2)}
    used = torch.tensor([5, 2, 0, 3], dtype=torch.int32)
    return Example(inputs | extra, {"cu_seqlens_q": CU_Q, "seqused_k": used, "page_table": TABLE} | (fixed or {}))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 100 * len(shape)), dtype=FP64)


def random_mask(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.6


def features() -> dict[str, Tensor]:
    """One tensor of every kind that modifies scores, for a dense call."""
    return {
        "bias": randn(1, HQ, SQ, SK, seed=4),
        "alibi_slopes": 0.2 * randn(B, HQ, seed=5),
        "sinks": randn(HQ, seed=6),
        "score_mod_0": randn(HQ, seed=7),
        "score_mod_1": 0.5 * randn(B, HQ, seed=8),
    }


def everything() -> Example:
    fixed = {"causal": True, "window": (4, None), "softcap": 2.0, "dropout_p": 0.25, "dropout_seed": 11}
    return dense(fixed | {"score_mod": curved, "mask": random_mask(B, 1, SQ, SK)}, **features())


def packed_everything() -> Example:
    fixed = {"causal": True, "softcap": 2.0, "dropout_p": 0.25, "dropout_seed": 11, "score_mod": curved}
    extra = features() | {"bias": randn(4, 1, 4, 5), "alibi_slopes": 0.2 * randn(4, HQ)}
    extra["score_mod_1"] = 0.5 * randn(4, HQ, seed=8)
    return packed(fixed | {"mask": MASK_MOD, "max_seqlen_q": 4, "max_seqlen_k": 5}, **extra)


def some_scores_minus_infinity() -> Tensor:
    """A bias with -inf here and there, and in the whole row 1 of head 0."""
    bias = torch.where(random_mask(1, HQ, SQ, SK), randn(1, HQ, SQ, SK), -torch.inf)
    bias[0, 0, 1] = -torch.inf
    return bias


EXAMPLES: dict[str, Callable[[], Example]] = {
    "plain": dense,
    "causal": lambda: dense({"causal": True}),
    "top_left": lambda: dense({"causal": "top_left"}),
    "window": lambda: dense({"window": (2, 1)}),
    "mask": lambda: dense({"mask": random_mask(1, HQ, SQ, SK)}),
    "mask function": lambda: dense({"mask": MASK_MOD}),
    "scale": lambda: dense({"scale": -0.7}),
    "softcap": lambda: replace(dense({"softcap": 0.8}), backend="auto"),
    "bias": lambda: dense(bias=randn(B, HQ, SQ, SK)),
    "bias of keys": lambda: dense(bias=randn(B, 1, 1, SK)),
    "bias of rows": lambda: dense(bias=randn(1, HQ, SQ, 1)),
    "bias of nothing": lambda: dense(bias=randn(1, 1, 1, 1), sinks=randn(HQ)),
    "slopes": lambda: dense(alibi_slopes=0.3 * randn(HQ)),
    "slopes of sequences": lambda: dense(alibi_slopes=0.3 * randn(B, HQ)),
    "sinks": lambda: dense(sinks=randn(HQ)),
    "no sink": lambda: dense(sinks=torch.where(torch.arange(HQ) == 1, -torch.inf, randn(HQ))),
    "score_mod": lambda: dense({"score_mod": curved}, **{n: x for n, x in features().items() if "mod" in n}),
    "dropout": lambda: dense({"dropout_p": 0.3, "dropout_seed": 5}),
    "everything": everything,
    "more queries than keys": lambda: dense({"causal": True}, seqlen_q=7, seqlen_k=4),
    "more queries than keys, and sinks": lambda: dense({"causal": True}, seqlen_q=7, seqlen_k=4, sinks=randn(HQ)),
    "rows without keys": lambda: dense({"mask": random_mask(B, 1, SQ, 1)}, bias=randn(1, HQ, SQ, SK)),
    "scores of -inf": lambda: dense(bias=some_scores_minus_infinity()),
    "no keys": lambda: dense(seqlen_k=0),
    "no keys but sinks": lambda: dense(seqlen_k=0, sinks=randn(HQ)),
    "packed": lambda: replace(packed({"causal": True}), backend="auto"),
    "packed, with seqused_k": lambda: packed({"seqused_k": torch.tensor([3, 2, 0, 1], dtype=torch.int32)}),
    "packed with everything": packed_everything,
    "paged": lambda: paged({"causal": True}, sinks=randn(HQ)),
}
