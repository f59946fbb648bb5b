"""Gradients against finite differences, each tensor alone and together, and what autograd may hand to backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checking import BACKENDS, dense_case, offsets, tile_size
from torch import Tensor
from torch.autograd import gradcheck

import flashtile
from flashtile.testing.score_functions import tempered_table

B, HQ, HKV, SQ, SK, D, DV = 2, 2, 1, 3, 5, 3, 2


def leaf(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def dense_leaves() -> dict[str, Tensor]:
    return {"q": leaf(B, HQ, SQ, D), "k": leaf(B, HKV, SK, D, seed=1), "v": leaf(B, HKV, SK, DV, seed=2)}


def check(function: Callable[..., Any], leaves: dict[str, Tensor], **arguments: Any) -> None:
    """gradcheck of out and lse in every leaf, in tiles that no tensor fits in.

    `fast_mode` compares one random projection of each Jacobian instead of every element, at a tenth of the time.
    """
    names = list(leaves)

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        given = arguments | dict(zip(names, tensors, strict=True))
        modifiers = tuple(given.pop(name) for name in names if name.startswith("score_mod_"))
        if modifiers:
            given["score_mod"] = flashtile.ScoreMod(tempered_table, modifiers)
        out, lse = function(**given, return_lse=True)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)  # -inf has no finite differences

    with tile_size(2, 2, scores=4):
        assert gradcheck(call, tuple(leaves.values()), fast_mode=True)


MASK = torch.tensor([True, True, False, True, True]).expand(1, 1, 1, SK)
WITHOUT_TENSORS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "top_left": {"causal": "top_left"},
    "window": {"window": (1, 1)},
    "mask": {"mask": MASK},
    "scale": {"scale": -0.3},
    "softcap": {"softcap": 0.8},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 3},
    "rows that see nothing": {"window": (0, None), "mask": MASK & (torch.arange(SQ)[:, None] != 1)},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", WITHOUT_TENSORS)
def test_features_without_tensors(name: str, backend: str) -> None:
    check(flashtile.attention, dense_leaves(), backend=backend, **WITHOUT_TENSORS[name])


WITH_TENSORS: dict[str, dict[str, Tensor]] = {
    "bias": {"bias": leaf(B, HQ, SQ, SK)},
    "bias of heads": {"bias": leaf(1, HQ, 1, 1)},
    "bias of pairs": {"bias": leaf(1, 1, SQ, SK)},
    "bias of keys": {"bias": leaf(B, 1, 1, SK)},
    "slopes": {"alibi_slopes": leaf(HQ)},
    "slopes of sequences": {"alibi_slopes": leaf(B, HQ)},
    "sinks": {"sinks": leaf(HQ)},
    "score_mod": {"score_mod_0": leaf(HQ), "score_mod_1": leaf(HQ, 17)},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", WITH_TENSORS)
def test_tensors_of_features(name: str, backend: str) -> None:
    check(flashtile.attention, dense_leaves() | WITH_TENSORS[name], backend=backend, window=(1, 1), softcap=2.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_features_together(backend: str) -> None:
    tensors = {name: x for tensors in WITH_TENSORS.values() for name, x in tensors.items()}
    check(
        flashtile.attention,
        dense_leaves() | tensors,
        backend=backend,
        causal=True,
        softcap=2.0,
        mask=MASK,
        dropout_p=0.3,
        dropout_seed=9,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_varlen(backend: str) -> None:
    leaves = {"q": leaf(7, HQ, D), "k": leaf(9, HKV, D), "v": leaf(9, HKV, DV)}
    leaves |= {"bias": leaf(3, 1, 4, 5), "alibi_slopes": leaf(3, HQ), "sinks": leaf(HQ)}
    cu_q, cu_k = offsets(4, 0, 2), offsets(5, 2, 1)  # one query and one key belong to no sequence
    check(
        flashtile.attention_varlen,
        leaves,
        backend=backend,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=4,
        max_seqlen_k=5,
        causal=True,
        dropout_p=0.3,
        dropout_seed=4,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_of_two_sequences(backend: str) -> None:
    """Both sequences begin with page 2, whose gradient is the sum of theirs."""
    leaves = {"q": leaf(3, HQ, D), "k": leaf(4, 2, HKV, D), "v": leaf(4, 2, HKV, DV)}
    check(
        flashtile.attention_varlen,
        leaves,
        backend=backend,
        cu_seqlens_q=offsets(2, 1),
        cu_seqlens_k=None,
        seqused_k=torch.tensor([3, 4], dtype=torch.int32),
        page_table=torch.tensor([[2, 0], [2, 3]], dtype=torch.int32),
        causal=True,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("result", [0, 1], ids=["out", "lse"])
def test_through_one_result_alone(result: int, backend: str) -> None:
    leaves = dense_leaves() | {"sinks": leaf(HQ)}
    names = list(leaves)

    def call(*tensors: Tensor) -> Tensor:
        given = dict(zip(names, tensors, strict=True))
        return flashtile.attention(**given, return_lse=True, backend=backend)[result]

    assert gradcheck(call, tuple(leaves.values()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "alibi_slopes", "sinks", "score_mod"])
def test_one_input_that_requires_grad(name: str, backend: str) -> None:
    """The gradient of one input does not depend on which others are asked for; the others stay `None`."""

    def tensors_requiring(wanted: str | None) -> dict[str, Tensor]:
        tensors = {**dense_leaves(), "bias": leaf(1, HQ, SQ, 1), "alibi_slopes": leaf(HQ), "sinks": leaf(HQ)}
        tensors |= {"score_mod": leaf(HQ), "table": leaf(HQ, 17)}
        return {n: x.detach().requires_grad_(wanted in (None, n)) for n, x in tensors.items()}

    def run(tensors: dict[str, Tensor]) -> None:
        given = dict(tensors)
        mod = flashtile.ScoreMod(tempered_table, (given.pop("score_mod"), given.pop("table")))
        out, lse = flashtile.attention(**given, score_mod=mod, causal=True, return_lse=True, backend=backend)
        (out.sum() + lse.square().sum()).backward()

    alone, together = tensors_requiring(name), tensors_requiring(None)
    run(alone)
    run(together)
    torch.testing.assert_close(alone[name].grad, together[name].grad, rtol=1e-12, atol=1e-14)
    assert together[name].grad.abs().max() > 0
    assert all(x.grad is None for n, x in alone.items() if n != name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dout_step", "dlse_step"), [(0, 0), (2, 1), (1, 2)])
def test_strides_of_cotangents(dout_step: int, dlse_step: int, backend: str) -> None:
    """Stride 0 and strides with gaps mean the same numbers as a contiguous cotangent."""
    case = dense_case()

    def with_stride(x: Tensor, step: int) -> Tensor:
        if step == 0:
            return x.new_ones(()).expand(x.shape)
        spread = x.new_full((*x.shape[:-1], step * x.shape[-1]), torch.nan)
        spread[..., ::step] = x
        return spread[..., ::step]

    case.dout, case.dlse = with_stride(case.dout, dout_step), with_stride(case.dlse, dlse_step)
    strided = case.run(backend)
    case.dout, case.dlse = case.dout.contiguous(), case.dlse.contiguous()
    assert all(torch.equal(strided[name], x) for name, x in case.run(backend).items())


def test_gradients_have_the_dtype_and_shape_of_their_inputs() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        case = dense_case(
            dtype=dtype, bias=torch.randn(1, 2, 1, 9), alibi_slopes=torch.rand(2).to(dtype), sinks=torch.randn(2)
        )
        results = case.run("tiled")
        for name, x in case.differentiable().items():
            assert (results[f"d{name}"].dtype, results[f"d{name}"].shape) == (x.dtype, x.shape)


def test_no_gradient_where_grad_mode_is_off() -> None:
    with torch.no_grad():
        out, lse = flashtile.attention(**dense_leaves(), return_lse=True)
    assert not out.requires_grad
    assert not lse.requires_grad


def test_one_tensor_as_q_k_and_v() -> None:
    """The three gradients of self-attention on one tensor add up."""
    x = leaf(B, HQ, SQ, D)
    parts = [x.detach().requires_grad_() for _ in range(3)]
    flashtile.attention(x, x, x).square().sum().backward()
    flashtile.attention(*parts).square().sum().backward()
    torch.testing.assert_close(x.grad, sum(part.grad for part in parts))
