"""Captured tensors and numbers of functions in GPU kernels: of other dtypes, with other values, and rows of -inf."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import ScoreMod
from flashtile.expression import varying

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def inputs(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(1, 4, 65, 64, device="cuda", dtype=dtype) for _ in range(3)]


def test_a_converted_module() -> None:
    module = torch.nn.Module()
    module.table = torch.nn.Parameter(torch.randn(4, 9, device="cuda"))
    mod = flashtile.score_mods.relative_table(module.table)
    flashtile.attention(*inputs(torch.float32), score_mod=mod)
    module.to(torch.bfloat16)
    x = inputs(torch.bfloat16)
    outs = [flashtile.attention(*x, score_mod=m) for m in (mod, flashtile.score_mods.relative_table(module.table))]
    assert torch.equal(*outs)


def test_numbers_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varying, "_seen", {})
    q, k, v = inputs(torch.bfloat16)
    for step in range(4):
        factor = 1.3 + step
        scaled: Callable[..., Tensor] = lambda s, b, h, i, j, f=factor: torch.tanh(s / f) * 2.0  # noqa: E731
        out = flashtile.attention(q, k, v, score_mod=scaled)
        expected = flashtile.attention(q, k, v, score_mod=scaled, backend="tiled")
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_integers_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varying, "_seen", {})
    q, k, v = (x.requires_grad_() for x in inputs(torch.bfloat16))
    for n in range(3):
        shifted: Callable[..., Tensor] = lambda s, b, h, i, j, n=n: torch.where(3 * i - j > 20 + n, s, 0.5 * s)  # noqa: E731
        visible: Callable[..., Tensor] = lambda b, h, i, j, n=n: (j < 60 - n) & (i - j <= 33 + n)  # noqa: E731
        results = []
        for backend in ("auto", "triton", "tiled"):
            out = flashtile.attention(q, k, v, score_mod=shifted, mask=visible, backend=backend)
            results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
        for found in results[:2]:
            for x, expected in zip(found, results[2], strict=True):
                torch.testing.assert_close(x, expected, rtol=2e-2, atol=2e-2)


def test_a_row_of_minus_infinity_alone() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(torch.bfloat16))
    bias = torch.zeros(1, 1, 65, 65, device="cuda")
    bias[0, 0, 1] = -torch.inf
    w = torch.rand(4, device="cuda", requires_grad=True)
    out = flashtile.attention(q, k, v, bias=bias, score_mod=ScoreMod(lambda s, b, h, i, j, w: s * w[h], (w,)))
    out.float().square().sum().backward()
    for x in (q, k, v, w):
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()
