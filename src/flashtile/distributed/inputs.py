"""The inputs of a sharded call: which are accepted, and the call that a rank makes of its own rows."""

import functools
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..api.normalize import normalize
from ..block_mask import BlockMask, is_flex
from ..call.call import FEATURES, Call, Tensors
from ..call.eager import in_forward_mode
from ..call.eight_bit import is_eight_bit
from ..errors import ArgumentError, AttentionError
from .group import EXAMPLE
from .layout import Layout, Piece, Placement
from .visible import Document

VARLEN_EXAMPLE = "flashtile.distributed.attention_varlen(q, k, v, [0, 700, 1024], mesh=mesh)"

DEFAULTS: dict[str, Any] = {
    "causal": False, "window": None, "attention_chunk": None, "scale": None, "softcap": None, "score_mod": None,
    "dropout_p": 0.0, "dropout_seed": None, "deterministic": None, "backend": "auto",
}  # fmt: skip


def with_defaults(function: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a call, with the values of those that are absent."""
    unknown = [name for name in keywords if name not in DEFAULTS]
    if unknown:
        raise TypeError(f"{function}() got an unexpected keyword argument '{unknown[0]}'")
    return DEFAULTS | keywords


def normalized(tensors: dict[str, Any], keywords: dict[str, Any]) -> Call:
    """A rank's call of its own rows, before it is known which of all rows those are."""
    accepted_here(keywords)
    call = normalize("attention", dict(tensors), num_splits=None, whole=False, **keywords)
    accepted_shapes(call.tensors)
    return call


def without_lists(tensors: dict[str, Any]) -> tuple[dict[str, Any], BlockMask | None]:
    """The tensors with a function of positions in place of lists of blocks, and these lists of the whole sequence."""
    mask: Any = tensors.get("mask")
    # A graph takes lists of blocks that were made outside of it.
    lists = BlockMask.of_flex(mask) if is_flex(mask) and not torch.compiler.is_compiling() else mask
    if not isinstance(lists, BlockMask):
        return tensors, None
    return tensors | {"mask": lists.as_function()}, lists


def accepted_here(keywords: dict[str, Any]) -> None:
    """Refuse what sharded calls do not have."""
    p, seed = keywords["dropout_p"], keywords["dropout_seed"]
    if p != 0 and type(seed) is not int:
        raise ArgumentError("dropout_seed", seed, "with dropout an int, the same on all ranks", EXAMPLE)
    if in_forward_mode():
        raise AttentionError("sharded attention has no forward mode.\n  accepted: the call outside of torch.func.jvp")


def accepted_shapes(t: Tensors) -> None:
    """Refuse shapes that are no call's, before ranks exchange keys. Numbers of rows are compared later."""
    for name, x in (("q", t.q), ("k", t.k), ("v", t.v)):
        if x.dim() != 4 or x.dtype != t.q.dtype or x.shape[0] != t.q.shape[0] or not x.is_floating_point():
            raise ArgumentError(name, x, "floating-point [B, H, S, D], of q's dtype and batch", EXAMPLE)
        if is_eight_bit(x):
            raise ArgumentError(name, x, "16 bits or more: sharded calls take no tensors of 8 bits", EXAMPLE)
    if t.k.shape[1:3] != t.v.shape[1:3] or t.k.shape[3] != t.q.shape[3]:
        raise ArgumentError("k", t.k, "k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv], with the D of q", EXAMPLE)
    if t.k.shape[1] == 0 or t.q.shape[1] % t.k.shape[1] != 0:
        raise ArgumentError("k", t.k, f"a number of heads that divides that of q, {t.q.shape[1]}", EXAMPLE)


def with_own_pairs(call: Call, rows: Layout, num_keys: int, rank: int, batch: int | None = None) -> Call:
    """The call in which tensors of pairs have this rank's rows, and the shapes of all features are right.

    Args:
        call: bias and mask have the rows of the whole sequence or this rank's, or one; and all keys, or one.
        rows: the layout of rows.
        num_keys: keys of the whole sequence.
        rank: this rank.
        batch: sequences of a packed call.
    """
    t, own = call.tensors, rows.rows(rank)
    sizes = {"B": t.q.shape[0] if batch is None else batch, "H": t.q.shape[1], "Sk": num_keys}
    for name in ("mask", "bias", "alibi_slopes", "sinks"):
        x = getattr(t, name)
        if x is None:
            continue
        feature = FEATURES[name]
        if batch is not None and feature.broadcasts:
            raise ArgumentError(name, x, "None, for packed sequences; for a mask, a function", VARLEN_EXAMPLE)
        shapes = [s for n in {own, rows.length} for s in feature.sizes(**sizes, Sq=n)]
        fits = any(
            len(s) == x.dim()
            and all(n == m or (n == 1 and feature.broadcasts) for n, m in zip(x.shape, s, strict=True))
            for s in shapes
        )
        if not fits or x.dtype not in feature.dtypes(t.q.dtype):
            raise ArgumentError(name, x, " or ".join(map(str, shapes)) + feature.advice, EXAMPLE)
        if feature.broadcasts and x.shape[2] == rows.length != own and x.shape[2] != 1:
            t = t._replace(**{name: Placement.of(rows).select(x, rank, 2)})
    return call._replace(tensors=t)


def documents_of(cu_seqlens_q: Any, cu_seqlens_k: Any) -> tuple[Document, ...]:
    """The sequences of a packed call, from offsets on the host."""
    of_q = offsets("cu_seqlens_q", cu_seqlens_q)
    of_k = of_q if cu_seqlens_k is None else offsets("cu_seqlens_k", cu_seqlens_k)
    if len(of_q) != len(of_k):
        raise ArgumentError("cu_seqlens_k", cu_seqlens_k, f"{len(of_q)} offsets, as many as of queries", VARLEN_EXAMPLE)
    return documents_between(of_q, of_k)


@functools.lru_cache(maxsize=256)
def documents_between(of_q: tuple[int, ...], of_k: tuple[int, ...]) -> tuple[Document, ...]:
    return tuple(Document(Piece(*q), Piece(*k)) for q, k in zip(pairwise(of_q), pairwise(of_k), strict=True))


def offsets(argument: str, value: Any) -> tuple[int, ...]:
    """Nothing is read back from a device, for that would wait for it."""
    found = value
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.dim() == 1:
        found = value.tolist()
    if (
        not isinstance(found, list | tuple)
        or not found
        or any(type(n) is not int for n in found)
        or found[0] != 0
        or any(b < a for a, b in pairwise(found))
    ):
        accepted = "offsets [B + 1] from 0 on that do not decrease, in a list or a tensor on the CPU"
        raise ArgumentError(argument, value, accepted, VARLEN_EXAMPLE)
    return tuple(found)
