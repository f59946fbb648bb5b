"""Attention over parts of the keys, put together again: what split-KV, cascades and rings have in common."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..backend.blockwise.softmax import merge
from ..errors import ArgumentError

EXAMPLE = (
    "flashtile.merge_attention([out_a, out_b], [lse_a, lse_b]) with each `out, lse = flashtile.attention(..., "
    "return_lse=True)` over other keys"
)


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The attention over all keys, from attentions of the same queries over disjoint sets of keys.

    Associative and commutative up to rounding; a part whose rows saw nothing (`lse = -inf`) changes nothing.
    Differentiable in every argument (Dao et al., "FlashAttention", section 3.1: the block decomposition of softmax).

    Example:
        >>> q, k, v = (torch.randn(1, 2, 64, 32) for _ in range(3))
        >>> first = flashtile.attention(q, k[:, :, :20], v[:, :, :20], return_lse=True)
        >>> second = flashtile.attention(q, k[:, :, 20:], v[:, :, 20:], return_lse=True)
        >>> out, lse = flashtile.merge_attention([first[0], second[0]], [first[1], second[1]])
        >>> torch.allclose(out, flashtile.attention(q, k, v), atol=1e-5)
        True

    Args:
        outs: one or more `[B, H, Sq, Dv]`, or varlen `[Tq, H, Dv]`; floating-point, on any device.
        lses: for each, its `[B, H, Sq]`, or varlen `[H, Tq]`, as `return_lse=True` gives it: natural logarithms in
            float32 (float64 for float64).

    Returns:
        `out` and `lse` in the shapes and dtypes of the parts. A row that no part saw is 0, with `lse = -inf`.

    Raises:
        ArgumentError: the lists are empty or differ in length, or shapes, dtypes or devices differ.
    """
    for argument, parts in (("outs", outs), ("lses", lses)):
        if isinstance(parts, Tensor) or not isinstance(parts, Sequence):
            raise ArgumentError(argument, parts, "a list of tensors, one for each part", EXAMPLE)
    if not outs or len(outs) != len(lses):
        raise ArgumentError(
            "lses", lses, f"as many tensors as `outs` has, which is {len(outs)}, and at least one", EXAMPLE
        )
    for argument, parts in (("outs", outs), ("lses", lses)):
        for n, x in enumerate(parts):
            if not isinstance(x, Tensor):
                raise ArgumentError(f"{argument}[{n}]", x, "a torch.Tensor", EXAMPLE)
            first = parts[0]
            if (x.shape, x.dtype, x.device) != (first.shape, first.dtype, first.device):
                raise ArgumentError(f"{argument}[{n}]", x, f"shape, dtype and device of `{argument}[0]`", EXAMPLE)
    if outs[0].dim() not in (3, 4) or not outs[0].is_floating_point():
        raise ArgumentError("outs[0]", outs[0], "floating-point, [B, H, Sq, Dv] or [Tq, H, Dv]", EXAMPLE)
    varlen = outs[0].dim() == 3
    rows = outs[0].shape[:-1]
    expected = torch.Size((rows[1], rows[0])) if varlen else rows
    if lses[0].shape != expected or not lses[0].is_floating_point() or lses[0].device != outs[0].device:
        accepted = "floating-point, on the device of `outs`: [B, H, Sq] for [B, H, Sq, Dv], [H, Tq] for [Tq, H, Dv]"
        raise ArgumentError("lses[0]", lses[0], accepted, EXAMPLE)
    out, lse = merge(outs, [(x.t() if varlen else x)[..., None] for x in lses])
    lse = lse[..., 0]
    return out.to(outs[0].dtype), lse.t() if varlen else lse
