"""The public function: attention over a sequence whose rows and keys are sharded over a mesh."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..api.normalize import normalize
from ..api.signatures import Causal, ScoreModArgument, WindowArgument
from ..call.call import Call
from ..call.eager import in_forward_mode
from ..errors import ArgumentError, AttentionError
from ..expression import MaskMod
from .agreement import Description, agree
from .group import EXAMPLE, group_of
from .layout import kind_of
from .parts import Whole
from .ring import Ring

SCHEMES = ("auto", "ring")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    layout: str = "contiguous",
    scheme: str = "auto",
    causal: Causal = False,
    window: WindowArgument = None,
    attention_chunk: int | None = None,
    mask: MaskMod | Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    score_mod: ScoreModArgument = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of this rank's rows over the keys of all ranks of a mesh.

    Arguments mean what they mean in `flashtile.attention` for the whole sequence: positions of causal, window, masks,
    ALiBi, score_mod and dropout are those in it, and a seed gives the dropout mask of one device. Each rank holds its
    own rows and the keys of two ranks at a time. The first derivative of q, k and v exists, also through `lse`. Ranks
    exchange the shapes and arguments of a call first; where they differ, all of them raise. Shard the sequence with
    `shard`, and all ranks must take part in forward and in backward (Liu et al., "Ring Attention", 2023).

    Args:
        q: this rank's rows of the queries `[B, Hq, Sq, D]`.
        k: this rank's rows of the keys `[B, Hkv, Sk, D]`.
        v: this rank's rows of the values `[B, Hkv, Sk, Dv]`.
        mesh: a `DeviceMesh` with one dimension.
        layout: that of `shard`, for queries and keys; "zigzag" balances causal attention.
        scheme: "ring", in which keys and values travel from rank to rank; "auto" is the same.
        mask: a function of positions, `(b, h, q_idx, k_idx) -> bool`, that reads no tensors.
        alibi_slopes: `[Hq]` or `[B, Hq]`, the same on all ranks, without a gradient.
        score_mod: a function that reads no tensors.
        dropout_seed: an int, the same on all ranks; required where `dropout_p` is above 0.

    The other arguments are those of `flashtile.attention`.

    Returns:
        `out [B, Hq, Sq, Dv]` of this rank's rows in q's dtype; with `return_lse` also `lse [B, Hq, Sq]`.

    Raises:
        ArgumentError: on all ranks, where an argument of one is not what it should be, or differs from that of the
            first rank; or the ranks' rows are not those of the layout.
        BackendError: no backend takes a part of the call, or the named one does not.
    """
    group, call, requires_grad = group_of(mesh), None, ()
    try:
        kind_of(layout)
        accepted_here(q, scheme, mask, alibi_slopes, dropout_p, dropout_seed)
        call = normalize(
            "attention",
            {"q": q, "k": k, "v": v, "mask": mask, "alibi_slopes": alibi_slopes},
            causal=causal,
            window=window,
            attention_chunk=attention_chunk,
            scale=scale,
            softcap=softcap,
            score_mod=score_mod,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            num_splits=None,
            deterministic=deterministic,
            backend=backend,
        )
        accepted_call(call)
        requires_grad = tuple(torch.is_grad_enabled() and x.requires_grad for x in (q, k, v))
        described: Description | str = Description.of(call, layout, requires_grad, dropout_seed)
    except AttentionError as error:
        described = str(error)
    rows, keys = agree(group, described)
    assert call is not None
    t = call.tensors
    rest = t._replace(out=None)
    out, lse = Ring.apply(t.q, t.k, t.v, rest, Whole(call.settings, rows, keys), group)
    return (out, lse) if return_lse else out


def accepted_here(
    q: Tensor, scheme: str, mask: Any, alibi_slopes: Tensor | None, dropout_p: float, dropout_seed: Any
) -> None:
    """Refuse what sharded calls do not have."""
    if scheme not in SCHEMES:
        raise ArgumentError("scheme", scheme, " or ".join(map(repr, SCHEMES)), EXAMPLE)
    if isinstance(mask, Tensor):
        raise ArgumentError("mask", mask, "a function of positions, or None", EXAMPLE)
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ArgumentError("alibi_slopes", alibi_slopes, "slopes that require no gradient", EXAMPLE)
    if dropout_p != 0 and type(dropout_seed) is not int:
        raise ArgumentError("dropout_seed", dropout_seed, "with dropout an int, the same on all ranks", EXAMPLE)
    if torch.compiler.is_compiling() or in_forward_mode():
        raise AttentionError(
            "sharded attention has no forward mode, and cannot be compiled.\n"
            "  accepted: the call outside torch.compile and torch.func.jvp"
        )


def accepted_call(call: Call) -> None:
    """Refuse shapes that are no call's, before ranks exchange keys; and tensors that functions capture."""
    t = call.tensors
    if t.score_mod_tensors:
        raise ArgumentError("score_mod", t.score_mod_tensors, "functions that read no tensors", EXAMPLE)
    for name, x in (("q", t.q), ("k", t.k), ("v", t.v)):
        if x.dim() != 4 or x.dtype != t.q.dtype or x.shape[0] != t.q.shape[0] or not x.is_floating_point():
            raise ArgumentError(name, x, "floating-point [B, H, S, D], of q's dtype and batch", EXAMPLE)
    if t.k.shape[1:3] != t.v.shape[1:3] or t.k.shape[3] != t.q.shape[3]:
        raise ArgumentError("k", t.k, "k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv], with the D of q", EXAMPLE)
    if t.k.shape[1] == 0 or t.q.shape[1] % t.k.shape[1] != 0:
        raise ArgumentError("k", t.k, f"a number of heads that divides that of q, {t.q.shape[1]}", EXAMPLE)
