"""SDPA of nested tensors against calls of each sequence, and against PyTorch's own."""

from typing import Any

import pytest
import torch
from flash_formula import assert_same, randn
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as native

from flashtile.compat.torch import scaled_dot_product_attention, varlen_attn
from flashtile.errors import ArgumentError

HEADS, WIDTH = 4, 6
LENGTHS_Q, LENGTHS_K = [3, 0, 5], [4, 2, 1]


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def nested(values: Tensor, offsets: Tensor, **more: Any) -> Tensor:
    """`[B, H, ragged, E]` of packed `[T, H, E]`."""
    return torch.nested.nested_tensor_from_jagged(values, offsets, **more).transpose(1, 2)


def drawn(lengths_k: list[int], heads_kv: int = HEADS) -> tuple[list[Tensor], list[Tensor]]:
    """Packed values that require gradients, and nested tensors of them."""
    sizes = [(sum(LENGTHS_Q), HEADS, WIDTH), (sum(lengths_k), heads_kv, WIDTH), (sum(lengths_k), heads_kv, 7)]
    values = [randn(*size, seed=n).requires_grad_() for n, size in enumerate(sizes)]
    offsets, offsets_k = offsets_of(LENGTHS_Q), offsets_of(lengths_k)
    if lengths_k == LENGTHS_Q:
        offsets_k = offsets
    return values, [nested(x, y) for x, y in zip(values, (offsets, offsets_k, offsets_k), strict=True)]


def by_sequence(values: list[Tensor], lengths: tuple[list[int], list[int]], **options: Any) -> Tensor:
    """PyTorch's SDPA of each sequence, packed; a sequence without keys gives 0."""
    q, k, v = (x.split(n) for x, n in zip(values, (lengths[0], lengths[1], lengths[1]), strict=True))
    outs = [native(*(x.transpose(0, 1) for x in one), **options).transpose(0, 1) for one in zip(q, k, v, strict=True)]
    return torch.cat(outs)


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "scale": 0.3}, {"enable_gqa": True}], ids=str)
@pytest.mark.parametrize("lengths_k", [LENGTHS_Q, LENGTHS_K], ids=["same", "other"])
def test_results_and_gradients(lengths_k: list[int], options: dict[str, Any]) -> None:
    values, tensors = drawn(lengths_k, 2 if "enable_gqa" in options else HEADS)
    out = scaled_dot_product_attention(*tensors, **options)
    expected = by_sequence(values, (LENGTHS_Q, lengths_k), **options)
    assert out.is_nested
    assert out.shape[2] == tensors[0].shape[2]  # the same ragged dimension: they can be added
    packed = out.transpose(1, 2).values()
    weight = randn(*packed.shape, seed=7)
    found = torch.autograd.grad((packed * weight).sum(), values)
    assert_same((packed, expected), *zip(found, torch.autograd.grad((expected * weight).sum(), values), strict=True))


def test_as_pytorchs_own() -> None:
    """In the layer that PyTorch documents: projections of a nested tensor, split into heads."""
    tokens = torch.nested.nested_tensor([randn(n, 8) for n in (3, 6, 1)], layout=torch.jagged)
    q, k, v = (tokens.unflatten(-1, (2, 4)).transpose(1, 2) * n for n in (1, 2, 3))
    out, expected = scaled_dot_product_attention(q, k, v), native(q, k, v)
    assert_same((out.transpose(1, 2).values(), expected.transpose(1, 2).values()))
    assert (out.transpose(1, 2).flatten(-2) + tokens).shape == tokens.shape


def test_keys_with_gaps() -> None:
    """A cache of which each sequence uses a part: what is in the rest does not count."""
    values, offsets, lengths = randn(9, HEADS, WIDTH), torch.tensor([0, 4, 6, 9]), torch.tensor([2, 2, 1])
    values[[2, 3, 7, 8]] = torch.nan
    q = nested(randn(sum(LENGTHS_Q), HEADS, WIDTH, seed=1), offsets_of(LENGTHS_Q))
    k = nested(values, offsets, lengths=lengths)
    out = scaled_dot_product_attention(q, k, k)
    used = values[[0, 1, 4, 5, 6]]
    expected = by_sequence([q.values().transpose(0, 1), used, used], (LENGTHS_Q, [2, 2, 1]))
    assert_same((out.transpose(1, 2).values(), expected))


def test_dropout_has_its_seed_from_torch() -> None:
    _, tensors = drawn(LENGTHS_Q)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(scaled_dot_product_attention(*tensors, dropout_p=0.5).values())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_varlen_takes_values_and_offsets() -> None:
    values, (q, k, v) = drawn(LENGTHS_K)
    out = varlen_attn(*values, q.offsets(), k.offsets(), 5, 4)
    assert_same((out, scaled_dot_product_attention(q, k, v).transpose(1, 2).values()))


def test_refused() -> None:
    _, (q, k, v) = drawn(LENGTHS_K)
    dense, strided = randn(3, HEADS, 5, WIDTH), torch.nested.nested_tensor([randn(HEADS, 2, WIDTH)] * 3)
    gaps = nested(randn(9, HEADS, WIDTH), torch.tensor([0, 4, 6, 9]), lengths=torch.tensor([2, 2, 1]))
    other = nested(randn(7, HEADS, WIDTH), offsets_of(LENGTHS_K))
    few = drawn(LENGTHS_K, 2)[1]
    for arguments, words in (
        ((dense, k, v), "query"),
        ((q, dense, v), "key"),
        ((q, k, dense), "value"),
        ((strided, strided, strided), "query"),
        ((q.transpose(1, 2), k, v), "query"),
        ((gaps, k, v), "query.contiguous"),
        ((q, k, other), "the offsets of key"),
        ((q, k, v, torch.ones(1, dtype=torch.bool)), "attn_mask"),
        ((q, *few[1:]), "enable_gqa"),
    ):
        with pytest.raises(ArgumentError, match=words):
            scaled_dot_product_attention(*arguments)
