"""Bytes that forward keeps for backward: standard attention against FlashAttention, with and without dropout.

PyTorch's autograd keeps the operands that derivatives need. For standard attention these are q, k and v, and of size
N²: P for the softmax, and with dropout the mask that it drew and the dropped P that meets V. FlashAttention keeps
out and lse, and makes tiles of P again; with dropout it keeps the *state* of the random number generator, from which
the same numbers are drawn again, tile by tile (step 5). Its operations in backward are five products for four.

The counts are of what autograd really keeps, by its own hooks. `python -m flashtile_ladder related.saved_for_backward`
prints them.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import step05_flash1


def standard(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Attention `[N, d]` by torch operations, each with PyTorch's own derivative."""
    p = torch.softmax((q @ k.mT) / math.sqrt(q.shape[1]), dim=1)  # [N, N]
    return (torch.dropout(p, dropout_p, train=True) if dropout_p else p) @ v


class Flash(torch.autograd.Function):
    """Step 5 with its backward; dropout's generator is kept as its state."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        state = torch.Generator().manual_seed(0).get_state() if dropout_p else None
        out, lse = step05_flash1.attention(q, k, v, dropout_p=dropout_p, rng_state=state)
        ctx.save_for_backward(q, k, v, out, lse, *([] if state is None else [state]))
        ctx.dropout_p = dropout_p
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *state = ctx.saved_tensors
        keywords = {"dropout_p": ctx.dropout_p, "rng_state": state[0] if state else None}
        return *step05_flash1.backward(q, k, v, out, lse, grads[0], **keywords), None


def flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Attention `[N, d]` by step 5."""
    return Flash.apply(q, k, v, dropout_p)  # type: ignore[no-any-return]


def saved_bytes(function: Callable[..., Tensor], n: int, d: int, dropout_p: float = 0.0) -> int:
    """Bytes of different storages that autograd keeps, beyond the inputs q, k and v."""
    q, k, v = (torch.randn(n, d, requires_grad=True) for _ in range(3))
    inputs = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    storages: dict[int, int] = {}
    kept = []  # so that no address is given out twice

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in inputs:
            storages[storage.data_ptr()] = storage.nbytes()
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function(q, k, v, dropout_p)
    return sum(storages.values())


def main() -> None:
    d = 64
    for n in (256, 512, 1024):
        for dropout_p in (0.0, 0.1):
            many, few = (saved_bytes(function, n, d, dropout_p) for function in (standard, flash))
            name = "dropout" if dropout_p else "plain"
            print(f"N = {n:>4}, {name:>7}: standard keeps {many / 2**20:6.2f} MiB, flash {few / 2**20:5.2f} MiB")
