"""Sums over many keys or rows are within the contract's bound, which does not grow with their number.

Values are chosen so that rounding errors of a single accumulator would all have one sign. Sums are known exactly, so
the tests need no oracle.
"""

import math
from collections.abc import Iterator

import pytest
import torch
from checking import tile_size
from torch import Tensor

import flashtile

D, THIRD, LONG = 8, 1 / 3, 2**20
EPS = {torch.float32: 2.0**-23, torch.float64: 2.0**-51}  # counts twice for float64


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, since tests run in parallel; small tiles, so that `tiled` adds many."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with tile_size(8, 8):
        yield
    torch.set_num_threads(before)


def rows(length: int, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((1, 1, length, D), value, dtype=dtype)


def assert_near(x: Tensor, exact: Tensor | float, terms: Tensor | float, score: float = 0.0) -> None:
    """The contract's bound for sums whose terms have one sign, or absolute values that add up to `terms`; `score` is
    the largest absolute sum in a score.
    """
    eps, exact = EPS[x.dtype], torch.as_tensor(exact, dtype=torch.float64)
    limit = 4 * eps * exact.abs() + eps * (32 + 4 * score) * torch.as_tensor(terms, dtype=torch.float64)
    assert ((x.double() - exact).abs() <= limit).all(), ((x.double() - exact).abs() / limit).max()


@pytest.mark.parametrize(
    ("backend", "length", "num_rows", "dtype"),
    [
        ("cpu", LONG, 1, torch.float32),
        ("cpu", LONG, 1, torch.float64),
        ("cpu", LONG // 8, 24, torch.float32),
        ("tiled", 2**14, 1, torch.float32),
        ("tiled", 2**14, 4, torch.float64),
        ("reference", 2**15, 1, torch.float32),
    ],
)
def test_equal_values(backend: str, length: int, num_rows: int, dtype: torch.dtype) -> None:
    """The mean of equal values, with uniform weights but for one key, and no gradient of the scores."""
    q, k, v = rows(num_rows, 1.0, dtype), rows(length, 0.0, dtype), rows(length, THIRD, dtype)
    k[0, 0, 0] = 0.1
    q.requires_grad_()
    out, lse = flashtile.attention(q, k, v, return_lse=True, backend=backend)
    score = 0.1 * D**0.5
    exact = math.log(length - 1 + math.exp(k[0, 0, 0, 0].item() * D**0.5))
    third = v[0, 0, 0, 0].item()
    assert_near(out, third, third, score)
    assert ((lse - exact).abs() <= EPS[dtype] * (8 + 4 * score) * exact).all()
    (dq,) = torch.autograd.grad(out, q, torch.full_like(out, THIRD))
    terms = 2 * D * third**2 * 0.1 * D**-0.5 * 1.2 / length  # of the one key that is not 0
    assert_near(dq, 0.0, terms, score)


def test_rising_scores() -> None:
    """Every block's maximum is slightly above the last one; rescaling must not round the sums each time."""
    ramp = torch.arange(LONG) / LONG
    k = ramp[None, None, :, None].expand(1, 1, LONG, D).contiguous()
    q = rows(2, D**-0.5)
    out, lse = flashtile.attention(q, k, rows(LONG, THIRD), return_lse=True, backend="cpu")
    s = k[0, 0].double().sum(-1) * (q[0, 0, 0, 0].double() * D**-0.5)
    assert_near(out, torch.tensor(THIRD).item(), THIRD, 1.0)
    exact = s.exp().sum().log()
    assert ((lse - exact).abs() <= EPS[torch.float32] * (8 + 4) * exact).all()


def test_one_outlier() -> None:
    """A large first value, after which a single accumulator would lose low bits of all others."""
    v = rows(LONG, THIRD)
    v[0, 0, 0] = 1e6
    out = flashtile.attention(rows(2, 0.0), rows(LONG, 1.0), v, backend="cpu")
    exact = v[0, 0, :, 0].double().mean()
    assert_near(out, exact, exact)


@pytest.mark.parametrize(
    ("backend", "length", "dtype"),
    [
        ("cpu", LONG, torch.float32),
        ("cpu", LONG, torch.float64),
        ("reference", 2**16, torch.float32),
    ],
)
def test_keys_of_many_rows(backend: str, length: int, dtype: torch.dtype) -> None:
    """dk, dv, dsinks, dbias of a bias that rows share, and the same by a score_mod: sums with a term for each row."""
    q, k = rows(length, THIRD, dtype), rows(2, 0.0, dtype).requires_grad_()
    v, weight = rows(2, 0.0, dtype), 1 / 3  # of each key and of the sink
    v[:, :, 0], v[:, :, 1] = 0.7, -0.2
    v.requires_grad_()
    sinks, bias = torch.zeros(1, dtype=dtype).requires_grad_(), torch.zeros(1, 1, 1, 2, dtype=dtype).requires_grad_()
    weight_of_key = torch.zeros(2, dtype=dtype).requires_grad_()
    score_mod = flashtile.ScoreMod(lambda s, b, h, i, j, x: s + x[j], (weight_of_key,))
    out = flashtile.attention(q, k, v, sinks=sinks, bias=bias, score_mod=score_mod, backend=backend)
    dout = torch.full_like(out, 0.3)
    dk, dv, dsinks, dbias, dx = torch.autograd.grad(out, [k, v, sinks, bias, weight_of_key], dout)
    third, dp = q[0, 0, 0, 0].item(), dout[0, 0, 0, 0].item() * v[0, 0, :, 0].double() * D
    delta = weight * dp.sum()
    ds, terms = weight * (dp - delta), weight * (dp.abs() + weight * dp.abs().sum())
    assert_near(dv, length * weight * dout[0, 0, 0, 0].item(), length * weight * 0.3)
    factor = length * third * D**-0.5
    assert_near(dk, (ds * factor)[:, None].detach(), (terms * factor)[:, None].detach())
    assert_near(dbias, (ds * length).detach(), (terms * length).detach())
    assert_near(dx, (ds * length).detach(), (terms * length).detach())
    assert_near(dsinks, (-weight * delta * length).detach(), (weight * delta.abs() * length).detach())


def test_slopes_of_packed_sequences() -> None:
    """dslopes of packed sequences: each row adds the same amount, from the key before its own, at distance 1."""
    lengths = torch.tensor([0, 2, 2**17, 0, 4])
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    q = torch.zeros(int(bounds[-1]), 1, D)
    v, dout = q.clone(), torch.full_like(q, 0.3)
    v[0::2], v[1::2] = 0.7, -0.2
    dout[1::2] *= -1
    slopes = torch.zeros(len(lengths), 1).requires_grad_()
    out = flashtile.attention_varlen(q, q, v, bounds, bounds, alibi_slopes=slopes, window=(1, 0), backend="cpu")
    (dslopes,) = torch.autograd.grad(out, slopes, dout)
    dp = dout[0, 0, 0].double() * D * v[:2, 0, 0].double()
    of_row = (dp[0] - dp[1]) / 4  # p (dp - delta) with p of 1/2; a first row has one key, and no gradient
    rows = (lengths - 1).clamp(min=0)
    assert_near(dslopes[:, 0], rows * of_row, rows * of_row)


def test_many_parts_merged() -> None:
    outs, lses = [torch.full((1, 1, 1, 1), THIRD)] * 1024, [torch.zeros(1, 1, 1)] * 1024
    out, lse = flashtile.merge_attention(outs, lses)
    assert_near(out, torch.tensor(THIRD).item(), THIRD)
    assert_near(lse, torch.tensor(1024.0).log().item(), 1.0)
