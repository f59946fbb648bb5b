"""FlashAttention-2's passes by themselves, as rings of ranks call them: parts of the keys, merged by their lse."""

import inspect
from typing import Any

import pytest
import torch
from flash_formula import assert_same, formula, gradients, leaves, randn
from torch import Tensor

from flashtile.compat.flash_attn import flash_attn_interface as names
from flashtile.errors import ArgumentError

B, S, HQ, HKV, D = 2, 6, 4, 2, 8
SCALE = D**-0.5


def defaults(function: Any, **arguments: Any) -> dict[str, Any]:
    """Keyword arguments as ring-flash-attn makes them: the defaults of the signature, and its own."""
    parameters = inspect.signature(function).parameters.values()
    return {x.name: x.default for x in parameters if x.default is not x.empty} | arguments


def settings(**others: Any) -> dict[str, Any]:
    usual = {"dropout_p": 0.0, "softmax_scale": SCALE, "window_size_left": -1, "window_size_right": -1}
    return usual | {"softcap": 0.0, "alibi_slopes": None} | others


def merged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The formula of ring-flash-attn for two disjoint sets of keys; out `[..., S, H, D]`, lse `[..., H, S]`."""
    lse, part_lse = lse.mT[..., None], part_lse.mT[..., None]
    out = out - torch.sigmoid(part_lse - lse) * (out - part)
    return out, (lse - torch.nn.functional.logsigmoid(lse - part_lse))[..., 0].mT


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_a_ring_of_two(packed: bool) -> None:
    """Rank 1 of two, causal: its own keys are causal, those of rank 0 are all visible."""
    q, k, v = randn(B, S, HQ, D), randn(B, 2 * S, HKV, D, seed=1), randn(B, 2 * S, HKV, D, seed=2)
    theirs = leaves(q, k, v)
    reference, reference_lse, _ = formula(*theirs, causal=True)
    expected = gradients(reference, theirs)
    parts = [(k[:, S:], v[:, S:], True), (k[:, :S], v[:, :S], False)]
    forward, backward = names._flash_attn_forward, names._flash_attn_backward
    of_sequences: dict[str, Any] = {}
    if packed:
        forward, backward = names._flash_attn_varlen_forward, names._flash_attn_varlen_backward
        cu = torch.arange(B + 1, dtype=torch.int32) * S
        of_sequences = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": S, "max_seqlen_k": S}
        q, parts = q.flatten(0, 1), [(k.flatten(0, 1), v.flatten(0, 1), causal) for k, v, causal in parts]
    results = []
    for k, v, causal in parts:
        given = settings(q=q, k=k, v=v, causal=causal, return_softmax=False, **of_sequences)
        out, lse, mask, state = forward(**defaults(forward, **given))
        assert (mask.numel(), state.shape, state.dtype) == (0, (2,), torch.int64)
        results += [out, lse]
    out, lse = merged(*results)
    dense = (lambda x: x.unflatten(0, (B, S))) if packed else (lambda x: x)
    assert_same((dense(out), reference), (lse, reference_lse.transpose(0, 1).flatten(1) if packed else reference_lse))
    x = out.requires_grad_()
    (dout,) = torch.autograd.grad((x.sin() + x.square()).sum(), x)
    dq, of_keys = torch.zeros_like(q), []
    for k, v, causal in parts:
        places = [torch.empty_like(x) for x in (q, k, v)]
        given = settings(
            q=q, k=k, v=v, causal=causal, dout=dout, out=out.detach(), softmax_lse=lse, deterministic=False
        )
        given |= of_sequences | dict(zip(("dq", "dk", "dv"), places, strict=True))
        delta = backward(**defaults(backward, **given))
        assert delta.shape == lse.shape
        dq += places[0]
        of_keys.insert(0, places[1:])
    assert_same((delta, (out * dout).sum(-1).mT))
    dk, dv = (torch.cat([dense(x) for x in parts], dim=1) for parts in zip(*of_keys, strict=True))
    assert_same(*zip((dense(dq), dk, dv), expected, strict=True))


def test_dropout_of_both_passes_is_one() -> None:
    """`rng_state` carries the seed; S_dmask shows which weights were dropped."""
    q, k, v, dout = randn(B, S, HQ, D), randn(B, S, HKV, D, seed=1), randn(B, S, HKV, D, seed=2), randn(B, S, HQ, D)
    forward = settings(q=q, k=k, v=v, dropout_p=0.25, causal=True, window_size_left=3)
    torch.manual_seed(0)
    out, lse, mask, state = names._wrapped_flash_attn_forward(**forward, return_softmax=True)
    keep = (mask >= 0).double() / 0.75
    assert 0 < (mask < 0).sum() < mask.numel() / 2
    theirs = leaves(q, k, v)
    reference = formula(*theirs, causal=True, window_size=(3, -1), keep=keep)[0]
    places = [torch.empty_like(x) for x in (q, k, v)]
    backward = forward | {"deterministic": True, "dout": dout, "out": out, "softmax_lse": lse, "rng_state": state}
    names._wrapped_flash_attn_backward(**backward, **dict(zip(("dq", "dk", "dv"), places, strict=True)))
    expected = torch.autograd.grad(reference, theirs, dout)
    assert_same((out, reference), *zip(places, expected, strict=True))


def test_rows_without_keys() -> None:
    """Their lse is +inf, as `flash_attn` has it, and their gradients are 0."""
    q, k, v, dout = randn(1, 5, 2, D), randn(1, 3, 2, D, seed=1), randn(1, 3, 2, D, seed=2), randn(1, 5, 2, D, seed=3)
    given = settings(q=q, k=k, v=v, causal=True)
    out, lse, *_ = names._flash_attn_forward(**given, return_softmax=False)
    assert (lse[:, :, :2] == torch.inf).all()
    places = [torch.empty_like(x) for x in (q, k, v)]
    given |= {"dout": dout, "out": out, "softmax_lse": lse, "deterministic": False, "dk": None}
    names._flash_attn_backward(**given, dq=places[0], dv=places[2])
    theirs = leaves(q, k, v)
    expected = torch.autograd.grad(formula(*theirs, causal=True)[0], theirs, dout)
    assert_same((places[0], expected[0]), (places[2], expected[2]))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"dropout_p": 0.5}, "rng_state"),
        ({"out": randn(1, 4, 2, D)}, "out"),
        ({"dout": randn(1, 3, 2, D).float()}, "dout"),
        ({"softmax_lse": randn(1, 3, 2)}, "lse"),
        ({"softmax_lse": randn(1, 2, 3).float()}, "lse"),
        ({"k": randn(1, 3, 2, D + 1)}, "k"),
    ],
)
def test_what_backward_refuses(change: dict[str, Any], name: str) -> None:
    x = randn(1, 3, 2, D)
    given = settings(q=x, k=x, v=x, dout=x, out=x, softmax_lse=randn(1, 2, 3), causal=False, deterministic=False)
    given |= {"dq": None, "dk": None, "dv": None} | change
    with pytest.raises(ArgumentError, match=f"`{name}`"):
        names._flash_attn_backward(**given)


def test_padding_in_front_of_packed_keys_is_refused() -> None:
    x, cu = randn(4, 2, D), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ArgumentError, match="`leftpad_k`"):
        names._flash_attn_varlen_forward(x, x, x, cu, cu, 4, 4, 0.0, SCALE, False, leftpad_k=cu[:1])
