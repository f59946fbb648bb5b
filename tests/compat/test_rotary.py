"""`flash_attn.layers.rotary`, against rotation of complex numbers."""

from typing import Any

import pytest
import torch
from flash_formula import assert_gradients_agree, assert_same, leaves, randn, rotated
from torch import Tensor

from flashtile.compat.flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)
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


def tables(positions: int, dim: int, base: float, scale_base: float | None, sign: int) -> tuple[Tensor, Tensor]:
    """Tables of queries (`sign` 1) or keys (-1) in float64: pair n turns by `position / base ** (2n / dim)`."""
    position, n = torch.arange(positions, dtype=torch.float64)[:, None], torch.arange(dim // 2, dtype=torch.float64)
    angle, decay = position / base ** (2 * n / dim), torch.tensor(1.0, dtype=torch.float64)
    if scale_base is not None:
        decay = ((2 * n / dim + 0.4) / 1.4) ** (sign * (position - positions // 2) / scale_base)
    return angle.cos() * decay, angle.sin() * decay


@pytest.mark.parametrize("form", ["qkv", "grouped", "q and kv"])
@pytest.mark.parametrize(
    ("settings", "offset", "positions"),
    [
        ({}, 0, S),
        ({"interleaved": True, "base": 500.0}, 4, S + 4),
        ({"scale_base": 20.0}, torch.tensor([3, 0]), ROOM),
        ({"interleaved": True, "scale_base": 512}, 3, S + 3),
    ],
    ids=str,
)
def test_embedding(settings: dict[str, Any], offset: int | Tensor, positions: int, form: str) -> None:
    """Six of eight features; values and features behind are as they were."""
    module = RotaryEmbedding(6, **settings)
    base, scale_base, interleaved = settings.get("base", 1e4), settings.get("scale_base"), module.interleaved
    first = offset[:, None] if isinstance(offset, Tensor) else torch.full((B, 1), offset)
    at = first + torch.arange(S)
    q, k, v = randn(B, S, 4, D), randn(B, S, 2 if form == "grouped" else 4, D, seed=1), randn(B, S, 4, D, seed=2)
    v = v[:, :, : k.shape[2]]
    expected_q, expected_k = (
        rotated(x, *tables(positions, 6, base, scale_base, sign), at, interleaved) for x, sign in ((q, 1), (k, -1))
    )
    longest = ROOM if isinstance(offset, Tensor) else None
    if form == "q and kv":
        out, kv = module(q, torch.stack((k, v), 2), seqlen_offset=offset, max_seqlen=longest)
        assert out is q
        found = out, *kv.unbind(2)
    elif form == "qkv":
        found = module(torch.stack((q, k, v), 2), seqlen_offset=offset, max_seqlen=longest).unbind(2)
    else:
        qkv = torch.cat((q, k, v), 2)
        found = module(qkv, seqlen_offset=offset, max_seqlen=longest, num_heads_q=4).split((4, 2, 2), 2)
    for x, y in zip(found, (expected_q, expected_k, v), strict=True):  # tables are those of float32
        torch.testing.assert_close(x, y, atol=2e-6, rtol=2e-6)


def test_tables_of_an_embedding() -> None:
    """They grow, are exact in a module of 16 bits, and belong to no checkpoint."""
    module = RotaryEmbedding(64).bfloat16()
    assert not module.state_dict()
    with torch.inference_mode():
        module(randn(1, 600, 3, 1, 64).float())
    with pytest.raises(ArgumentError, match="`max_seqlen`"):
        RotaryEmbedding(64)(randn(1, 5, 3, 1, 64), seqlen_offset=torch.tensor([0]))
    for seqlen in (500, 1000):
        (leaf,) = leaves(randn(1, seqlen, 3, 1, 64).float())
        module(leaf * 1)[:, :, :2].sum().backward()  # not with tables of inference mode
        cos, _ = tables(seqlen, 64, 1e4, None, 1)
        assert module._cos_cached is not None
        torch.testing.assert_close(module._cos_cached[:seqlen].double(), cos, atol=1e-4, rtol=0)
    assert module._seq_len_cached == 1000


def test_errors() -> None:
    x = randn(B, S, H, D)
    for tables in ((COS[:4], SIN[:4]), (COS, SIN[:, :2]), (randn(ROOM, 5), randn(ROOM, 5))):
        with pytest.raises(ArgumentError, match="`cos`"):
            apply_rotary_emb(x, *tables)
    with pytest.raises(ArgumentError, match="`max_seqlen`"):
        apply_rotary_emb(x[0], COS, SIN, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ArgumentError, match="`num_heads_q`"):
        apply_rotary_emb_qkv_(x, COS, SIN)
