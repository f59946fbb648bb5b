"""`flash_attn_func` and its packed forms, against the formula in FlashAttention's conventions."""

from typing import Any

import pytest
import torch
from flash_formula import assert_gradients_agree, assert_same, formula, leaves, randn

from flashtile.compat.flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from flashtile.errors import ArgumentError

B, SQ, SK, HQ, HKV, D = 2, 5, 7, 4, 2, 6
SETTINGS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window_size": (2, 1)},
    {"window_size": (3, -1)},
    {"window_size": [-7, 0]},
    {"causal": True, "window_size": (2, 5), "softcap": 1.5},
    {"softmax_scale": -0.3, "softcap": -1.0},
    {"alibi_slopes": randn(HQ, seed=5).abs()},
    {"causal": True, "alibi_slopes": randn(B, HQ, seed=5).abs().float(), "deterministic": True},
]


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: Any) -> Any:
    known = {name: x for name, x in settings.items() if name not in ("deterministic", "softmax_scale")}
    if "alibi_slopes" in known:
        known["alibi_slopes"] = known["alibi_slopes"].double()
    return formula(q, k, v, scale=settings.get("softmax_scale"), **known)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(SQ, SK), (SK, 3)])
def test_results_and_gradients(settings: dict[str, Any], seqlen_q: int, seqlen_k: int) -> None:
    tensors = randn(B, seqlen_q, HQ, D), randn(B, seqlen_k, HKV, D, seed=1), randn(B, seqlen_k, HKV, D, seed=2)
    mine, theirs = leaves(*tensors), leaves(*tensors)
    out, lse, mask = flash_attn_func(*mine, **settings, return_attn_probs=True)
    reference, reference_lse, _ = expected(*theirs, **settings)
    assert_same((lse, reference_lse))  # +inf where a row sees nothing
    assert mask.shape == (0,)
    assert torch.equal(out, flash_attn_func(*mine, **settings))
    assert_gradients_agree((out, mine), (reference, theirs))


def test_by_position() -> None:
    q, k, v = randn(1, SQ, 2, D), randn(1, SQ, 2, D, seed=1), randn(1, SQ, 2, D, seed=2)
    out = flash_attn_func(q, k, v, 0.0, 0.7, True, (2, 0), 3.0, randn(2).abs(), True, False)
    settings = {"window_size": (2, 0), "softcap": 3.0, "alibi_slopes": randn(2).abs()}
    assert_same((out, formula(q, k, v, scale=0.7, causal=True, **settings)[0]))


def test_packed_tensors() -> None:
    qkv, kv = randn(B, SK, 3, HQ, D), randn(B, SK, 2, HKV, D, seed=3)
    q = randn(B, SQ, HQ, D)
    for function, reference, inputs in (
        (flash_attn_qkvpacked_func, lambda x: formula(*x.unbind(2), causal=True)[0], (qkv,)),
        (flash_attn_kvpacked_func, lambda q, x: formula(q, *x.unbind(2), causal=True)[0], (q, kv)),
    ):
        mine, theirs = leaves(*inputs), leaves(*inputs)
        out = function(*mine, causal=True)
        assert out.is_contiguous()
        assert_gradients_agree((out, mine), (reference(*theirs), theirs))
        assert torch.equal(function(*mine, causal=True, return_attn_probs=True)[0], out)


def test_dropout_by_its_mask() -> None:
    """S_dmask has the weights, negative where they were dropped; the output and gradients are those of the rest."""
    tensors = randn(B, SQ, HQ, D), randn(B, 300, HKV, D, seed=1), randn(B, 300, HKV, D, seed=2)
    mine, theirs = leaves(*tensors), leaves(*tensors)
    out, lse, mask = flash_attn_func(*mine, dropout_p=0.25, causal=True, softcap=2.0, return_attn_probs=True)
    assert mask.shape == (B, HQ, SQ, 300)
    reference, reference_lse, weights = formula(*theirs, causal=True, softcap=2.0, keep=(mask >= 0).double() / 0.75)
    dropped = (mask < 0).sum() / (weights > 0).sum()
    assert 0.22 < dropped < 0.28
    assert_same((mask.abs(), weights), (lse, reference_lse))
    assert_gradients_agree((out, mine), (reference, theirs))


def test_dropout_follows_the_seed_of_torch() -> None:
    q = randn(1, 64, 2, D)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(flash_attn_func(q, q, q, 0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_and_head_dimensions_that_the_original_refuses(dtype: torch.dtype) -> None:
    """On a CPU, of 300 features, which are no multiple of 8, and values of other width."""
    q, k, v = (x.to(dtype) for x in (randn(1, 3, 2, 300), randn(1, 4, 2, 300), randn(1, 4, 2, 5)))
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    bound = 8 * torch.finfo(dtype).eps
    reference = formula(*(x.double() for x in (q, k, v)))
    torch.testing.assert_close(out.double(), reference[0], atol=bound, rtol=bound)
    torch.testing.assert_close(lse.double(), reference[1], atol=1e-4, rtol=0)


def test_compiled_as_one_graph() -> None:
    def call(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        out, lse, _ = flash_attn_func(q, k, k, causal=True, window_size=(2, 0), return_attn_probs=True)
        return out + lse.mT[..., None]

    mine, theirs = leaves(randn(B, SQ, HQ, D), randn(B, SK, HKV, D)), leaves(randn(B, SQ, HQ, D), randn(B, SK, HKV, D))
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_gradients_agree((compiled(*mine), mine), (call(*theirs), theirs))


@pytest.mark.parametrize("window_size", [3, (1,), None])
def test_a_window_is_a_pair(window_size: Any) -> None:
    q = randn(1, 3, 2, D)
    with pytest.raises(ArgumentError, match="`window_size`"):
        flash_attn_func(q, q, q, window_size=window_size)
