"""`flash_attn.bert_padding`: tokens of a padded batch, and back."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from flash_formula import gradients, leaves, randn

from flashtile.compat.flash_attn.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from flashtile.errors import AttentionError

MASK = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]])


def test_there_and_back() -> None:
    (x,) = leaves(randn(3, 4, 2, 5))
    tokens, indices, cu_seqlens, longest, used = unpad_input(x, MASK)
    assert torch.equal(tokens, x[MASK.bool()])
    assert indices.tolist() == [0, 1, 9, 10, 11]
    assert (cu_seqlens.tolist(), cu_seqlens.dtype) == ([0, 2, 2, 5], torch.int32)
    assert longest == 3
    assert type(longest) is int
    assert (used.tolist(), used.dtype) == ([2, 0, 3], torch.int32)
    back = pad_input(tokens, indices, 3, 4)
    assert torch.equal(back, x * MASK[..., None, None])
    assert torch.equal(pad_input(tokens, indices.int(), 3, 4), back)
    (dx,) = gradients(back, (x,))
    assert torch.equal(dx == 0, (MASK == 0)[..., None, None].expand_as(dx))


def test_unused_places() -> None:
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    tokens, indices, cu_seqlens, longest, used = unpad_input(randn(3, 4, 5), MASK, unused)
    assert tokens.shape == (6, 5)
    assert indices.tolist() == [0, 1, 2, 9, 10, 11]
    assert cu_seqlens.tolist() == [0, 3, 3, 6]
    assert (longest, used.tolist()) == (3, [2, 0, 3])


def test_rows_of_several_sequences() -> None:
    lengths = torch.tensor([[2, 1, 0, 0], [0, 0, 0, 0], [4, 0, 0, 0]])
    x = randn(3, 4, 5)
    tokens, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(tokens, x.flatten(0, 1)[indices])
    assert indices.tolist() == [0, 1, 2, 8, 9, 10, 11]
    assert (cu_seqlens.tolist(), cu_seqlens.dtype, longest) == ([0, 2, 3, 7], torch.int32, 4)


def test_rows_and_the_rest() -> None:
    (x,) = leaves(randn(4, 3))
    indices = torch.tensor([2, 0])
    rows, residual = index_first_axis_residual(x, indices)
    assert torch.equal(rows, x[indices])
    assert torch.equal(residual, x)
    (dx,) = torch.autograd.grad(rows.sum() + 2 * residual.sum(), x)
    assert dx[:, 0].tolist() == [3, 2, 3, 2]


def test_rows() -> None:
    x = randn(6, 2, 3)
    indices = torch.tensor([4, 0, 4])
    assert torch.equal(index_first_axis(x, indices), x[indices])
    assert torch.equal(index_first_axis(x, indices.int()), x[indices])
    back = index_put_first_axis(x[:2], torch.tensor([3, 1]), 5)
    assert torch.equal(back[[3, 1]], x[:2])
    assert not back[[0, 2, 4]].any()


def test_rearrange_is_that_of_einops(monkeypatch: pytest.MonkeyPatch) -> None:
    """With einops and without."""
    for einops in (SimpleNamespace(rearrange=max), None):
        monkeypatch.setitem(sys.modules, "einops", einops)
        spec = importlib.util.find_spec("flashtile.compat.flash_attn.bert_padding")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if einops is not None:
            assert module.rearrange is max
        else:
            with pytest.raises(AttentionError, match="pip install einops"):
                module.rearrange(MASK, "a b -> b a")
