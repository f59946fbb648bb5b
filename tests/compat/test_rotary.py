"""`flash_attn.layers.rotary`, against rotation of complex numbers."""

import pytest
import torch
from flash_formula import assert_gradients_agree, assert_same, leaves, randn, rotated

from flashtile.compat.flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_
from flashtile.errors import ArgumentError

B, S, H, D, ROOM = 2, 5, 3, 8, 12
COS, SIN = randn(ROOM, 3).cos(), randn(ROOM, 3).sin()  # 6 of 8 features are rotated


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offset", [0, 4, torch.tensor([0, 6], dtype=torch.int32)], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_results_and_gradients(interleaved: bool, offset: int | torch.Tensor, inplace: bool) -> None:
    (mine,), (theirs,) = leaves(randn(B, S, H, D)), leaves(randn(B, S, H, D))
    x = mine * 1  # no leaf, which cannot be written
    out = apply_rotary_emb(x, COS, SIN, interleaved, inplace, offset)
    assert (out is x) == inplace
    first = offset[:, None] if isinstance(offset, torch.Tensor) else torch.full((B, 1), offset)
    reference = rotated(theirs, COS, SIN, first + torch.arange(S), interleaved)
    assert_gradients_agree((out, (mine,)), (reference, (theirs,)))


def test_packed_sequences() -> None:
    x, cu_seqlens = randn(7, H, D), torch.tensor([0, 2, 2, 7], dtype=torch.int32)
    out = apply_rotary_emb(x, COS, SIN, cu_seqlens=cu_seqlens, max_seqlen=5, seqlen_offsets=torch.tensor([3, 0, 1]))
    positions = torch.tensor([[3, 4, 1, 2, 3, 4, 5]])
    assert_same((out, rotated(x[None], COS, SIN, positions, False)[0]))


def test_half_precision_is_computed_in_float32() -> None:
    x, cos, sin = randn(B, S, H, D).half(), COS.half(), SIN.half()
    out = apply_rotary_emb(x, cos, sin)
    exact = rotated(x.double(), cos.double(), sin.double(), torch.arange(S).expand(B, S), False)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.double(), exact, atol=1e-7, rtol=2.0**-11 * 1.01)


def test_packed_tensors_are_rotated_in_place() -> None:
    positions = torch.arange(2, 2 + S).expand(B, S)
    for heads in (None, 4):
        qkv = randn(B, S, 3, H, D) if heads is None else randn(B, S, 4 + 2 * 2, D)
        expected = qkv.clone()
        parts = expected.unbind(2) if heads is None else (expected[:, :, :4], expected[:, :, 4:6])
        parts[0].copy_(rotated(parts[0], COS, SIN, positions, True))
        parts[1].copy_(rotated(parts[1], SIN, COS, positions, True))
        out = apply_rotary_emb_qkv_(qkv, COS, SIN, SIN, COS, interleaved=True, seqlen_offsets=2, num_heads_q=heads)
        assert out is qkv
        assert_same((qkv, expected))
    kv = randn(B, S, 2, H, D)
    expected = kv.clone()
    expected[:, :, 0] = rotated(kv[:, :, 0], COS, SIN, positions, False)
    assert_same((apply_rotary_emb_kv_(kv, COS, SIN, seqlen_offsets=2), expected))


def test_errors() -> None:
    x = randn(B, S, H, D)
    for tables in ((COS[:4], SIN[:4]), (COS, SIN[:, :2]), (randn(ROOM, 5), randn(ROOM, 5))):
        with pytest.raises(ArgumentError, match="`cos`"):
            apply_rotary_emb(x, *tables)
    with pytest.raises(ArgumentError, match="`max_seqlen`"):
        apply_rotary_emb(x[0], COS, SIN, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ArgumentError, match="`num_heads_q`"):
        apply_rotary_emb_qkv_(x, COS, SIN)
