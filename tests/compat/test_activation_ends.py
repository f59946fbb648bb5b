"""Calls of PyTorch's functions that begin while flashtile is active and end when it is not, and the reverse."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from flash_formula import assert_same, gradients, leaves, randn
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as native
from torch.utils.checkpoint import checkpoint

import flashtile.compat.torch as names
from flashtile.compat.torch import kernels
from flashtile.errors import ArgumentError

pytest.importorskip("torch.nn.attention._registry")
Function = Callable[..., Tensor]
H, L, S, E = 2, 5, 7, 8
SEEN = torch.ones(L, S, dtype=torch.bool)
SEEN[1] = False  # a row without keys
HIDING = torch.zeros(L, S, dtype=torch.float64).masked_fill(~SEEN, -torch.inf)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": SEEN},
    "float mask": {"attn_mask": HIDING},
    "both": {"attn_mask": SEEN, "is_causal": True},
}
WAYS: dict[str, Callable[[Function], Function]] = {
    "eager": lambda f: f,
    "checkpointed": lambda f: lambda *x: checkpoint(f, *x, use_reentrant=False),
    "compiled": lambda f: torch.compile(f, backend="aot_eager"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", CALLS)
@pytest.mark.parametrize("active", ["in forward", "in backward"])
def test_each_backward_follows_each_forward(active: str, options: str, way: str) -> None:
    """Rows without keys have PyTorch's log-sum-exp, which its backward pass needs, and ours takes."""
    if way == "compiled" and options not in ("plain", "float mask"):
        return
    inputs = leaves(randn(2, H, L, E), randn(2, H, S, E, seed=1), randn(2, H, S, E, seed=2))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        reference = native(*inputs, **CALLS[options])
        expected = gradients(reference, inputs)

    def attend(*x: Tensor) -> Tensor:
        return native(*x, **CALLS[options])

    with names.activate() if active == "in forward" else nullcontext():
        out = WAYS[way](attend)(*inputs)
    with names.activate() if active == "in backward" else nullcontext():
        found = gradients(out, inputs)
    assert_same((out, reference), *zip(found, expected, strict=True))


def test_backward_of_varlen_attn_after_the_block() -> None:
    """A sequence without keys; PyTorch has no kernel on a CPU, so the backward pass stays flashtile's."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    inputs = leaves(randn(8, H, E), randn(5, H, E, seed=1), randn(5, H, E, seed=2))
    offsets = torch.tensor([0, 3, 8]), torch.tensor([0, 0, 5])
    expected = names.varlen_attn(*inputs, *offsets, 5, 5)
    with names.activate():
        out, lse = varlen.varlen_attn(*inputs, *offsets, 5, 5, return_aux=varlen.AuxRequest(lse=True))
    assert_same((out, expected), *zip(gradients(out, inputs), gradients(expected, inputs), strict=True))
    assert bool((lse[:, :3] == torch.inf).all())  # as the kernels of PyTorch
    with pytest.raises(NotImplementedError):
        varlen.varlen_attn(*inputs, *offsets, 5, 5)


def test_dropout_stays_with_pytorch() -> None:
    """Its kernel is called, which on a CPU refuses dropout; where it has none, the call is refused."""
    q = randn(1, H, L, E)
    aten = torch.ops.aten
    with names.activate():
        with pytest.raises(RuntimeError, match="do not support dropout"):
            aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5)
        with pytest.raises(ArgumentError, match="`dropout_p`"):
            aten._flash_attention_forward(q, q, q, None, None, L, L, 0.5, False, False)


@pytest.mark.parametrize(("rows", "keys"), [(L, S), (S, L)])
def test_the_operator_of_gpus_aligns_to_the_last_query(rows: int, keys: int) -> None:
    """`CausalBias` calls it so for other lengths. Rows without keys have the lse of FlashAttention, +inf."""
    q, k, v = leaves(randn(1, H, rows, E), randn(1, H, keys, E, seed=1), randn(1, H, keys, E, seed=2))
    visible = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    reference = native(q, k, v, attn_mask=visible)
    out, lse, _, _, *longest, seed, offset, _ = kernels.sdpa_cuda(q.detach(), k.detach(), v.detach(), 0.0, True)
    assert_same((out, reference))
    assert torch.equal((lse == torch.inf).any(0).any(0), ~visible.any(dim=1))
    dout = randn(*out.shape, seed=3)
    more = (None, None, *longest, 0.0, True, seed, offset)
    found = kernels.sdpa_cuda_backward(dout, q, k, v, out, lse, *more)
    assert_same(*zip(found, torch.autograd.grad(reference, (q, k, v), dout), strict=True))
    with names.activate():  # on a CPU PyTorch makes a mask of it
        if rows < keys:
            assert_same((native(q, k, v, attn_mask=causal_lower_right(rows, keys)), reference))
