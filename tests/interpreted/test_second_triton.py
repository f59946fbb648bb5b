"""The kernels of second derivatives in Triton's interpreter, against formulas in float64."""

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from second_oracle import Exact, Triple, assert_close, by_autograd, second_derivative
from torch import Tensor

import flashtile
from flashtile.backend.triton.launch import second_blocks
from flashtile.backend.triton.plan import candidates, tables
from flashtile.dispatch.planner import forget_plans
from flashtile.testing.poison import poisoned_allocation

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
SQ, SK, H = 21, 18, 2


def tensors(dtype: torch.dtype, head_dim: int, head_dim_v: int, seed: int = 0) -> tuple[Triple, Triple, Tensor]:
    """Inputs with outliers, directions, and the cotangent of out."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(rows: int, width: int) -> Tensor:
        x = torch.randn(1, H, rows, width, generator=generator)
        return (x * torch.where(torch.rand(x.shape, generator=generator) < 0.02, 8, 1)).to(dtype)

    given = [drawn(*size) for size in 2 * [(SQ, head_dim), (SK, head_dim), (SK, head_dim_v)]]
    return tuple(given[:3]), tuple(given[3:]), drawn(SQ, head_dim_v)  # type: ignore[return-value]


def hidden_after(shift: int) -> Tensor:
    """-inf where key j is past `i + shift`."""
    return torch.where(torch.arange(SK) > torch.arange(SQ)[:, None] + shift, -torch.inf, 0.0)[None, None]


FULL = torch.zeros(1, 1, SQ, SK)
SHOWN = torch.rand(1, 1, SQ, SK, generator=torch.Generator().manual_seed(1)) < 0.6
BIAS = torch.randn(1, H, SQ, SK, generator=torch.Generator().manual_seed(2))
SLOPES = torch.tensor([0.5, 0.1])
DISTANCES = (torch.arange(SQ)[:, None] + SK - SQ - torch.arange(SK)).abs()
CASES: dict[str, tuple[dict[str, Any], Tensor]] = {
    "plain": ({}, FULL),
    "causal": ({"causal": True}, hidden_after(SK - SQ)),
    "bias": ({"bias": BIAS}, BIAS),
    "mask": ({"mask": SHOWN}, torch.where(SHOWN, 0.0, -torch.inf)),
    "slopes": ({"alibi_slopes": SLOPES}, -SLOPES[None, :, None, None] * DISTANCES),
    "sinks": ({"sinks": torch.tensor([0.3, -1.0])}, FULL),
    "softcap": ({"softcap": 2.0, "bias": BIAS}, BIAS),
}


def exact(inputs: Triple, along: Triple, dout: Tensor, name: str) -> list[Exact]:
    arguments, bias = CASES[name]
    more = {key: arguments[key] for key in ("sinks", "softcap") if key in arguments}
    return second_derivative(inputs, along, dout, bias, **more)


@pytest.mark.parametrize(("dtype", "sizes"), [(torch.float32, (8, 8)), (torch.float16, (24, 16))], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_features(name: str, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    """Rows that see no key, too."""
    arguments, _ = CASES[name]
    inputs, along, dout = tensors(dtype, *sizes)
    with poisoned_allocation():
        found, passes = by_autograd(inputs, along, dout, "triton", **arguments)
    assert ("second", "triton") in passes
    assert_close(found, exact(inputs, along, dout, name), dtype)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Heads of any width are as wide ones."""
    monkeypatch.setattr(candidates, "BLOCKED_ABOVE", 0)
    forget_plans()
    yield monkeypatch
    forget_plans()


@pytest.mark.parametrize(("name", "dtype"), [("causal", torch.float16), ("bias", torch.float32)], ids=str)
def test_wide_heads(name: str, dtype: torch.dtype, wide: pytest.MonkeyPatch) -> None:
    """Weights of pairs in memory, of one head after another."""
    wide.setattr(second_blocks, "MOST_BYTES", 0)
    arguments, _ = CASES[name]
    inputs, along, dout = tensors(dtype, 24, 40)
    with poisoned_allocation():
        found, passes = by_autograd(inputs, along, dout, "triton", **arguments)
    assert ("second", "triton") in passes
    assert_close(found, exact(inputs, along, dout, name), dtype)


@pytest.mark.parametrize("most_bytes", [0, 2**30])
def test_wide_heads_in_groups_with_dropout_are_as_tiled(most_bytes: int, wide: pytest.MonkeyPatch) -> None:
    """Two units of rows and keys, in ranges of their own or together; one of two heads of a group in each, or all.
    Programs share the keys of sums, and some have none.
    """
    wide.setattr(second_blocks, "MOST_BYTES", most_bytes)
    wide.setitem(tables.BLOCKED, "interpreter", tables.BLOCKED["interpreter"]._replace(programs=32))
    generator = torch.Generator().manual_seed(3)
    sizes = 2 * [(2, 40), (1, 35), (1, 35)] + [(2, 40)]
    *inputs, tq, tk, tv, dout = (torch.randn(1, h, n, 8, generator=generator) for h, n in sizes)
    arguments: dict[str, Any] = {"window": (12, 7), "dropout_p": 0.3, "dropout_seed": 5}
    with poisoned_allocation():
        found, _ = by_autograd(tuple(inputs), (tq, tk, tv), dout, "triton", **arguments)  # type: ignore[arg-type]
    right, _ = by_autograd(tuple(inputs), (tq, tk, tv), dout, "tiled", **arguments)  # type: ignore[arg-type]
    torch.testing.assert_close(found, right, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("blocked", [False, True])
def test_a_mask_function_reads_a_tensor(blocked: bool, wide: pytest.MonkeyPatch) -> None:
    """It has no gradient, and a place among the results."""
    if not blocked:
        wide.undo()
    inputs, along, dout = tensors(torch.float32, 16, 16)
    shown = SHOWN[0, 0]
    found, passes = by_autograd(inputs, along, dout, "triton", mask=lambda b, h, i, j: shown[i, j])
    assert ("second", "triton") in passes
    bias = torch.where(SHOWN, 0.0, -torch.inf)
    assert_close(found, second_derivative(inputs, along, dout, bias), torch.float32)


@pytest.mark.parametrize("blocked", [False, True])
def test_sinks_are_as_tiled(blocked: bool, wide: pytest.MonkeyPatch) -> None:
    """Their direction, their gradient and that of lse; one is no sink."""
    if not blocked:
        wide.undo()
    inputs, along, dout = tensors(torch.float32, 16, 16)
    sinks, tsinks = torch.tensor([0.3, -torch.inf]), torch.tensor([0.7, -0.4])

    def hessian(backend: str) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (*inputs, sinks)]
        out, lse = flashtile.attention(*leaves[:3], sinks=leaves[3], causal=True, backend=backend, return_lse=True)
        first = torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)), create_graph=True)
        return torch.autograd.grad(first, leaves, (*along, tsinks))

    for x, right in zip(hessian("triton"), hessian("tiled"), strict=True):
        torch.testing.assert_close(x, right, atol=1e-5 * float(right.abs().max()), rtol=1e-4)


def test_ranges_hold_whole_groups_or_equal_parts_of_one() -> None:
    of = partial(second_blocks.ranges_of, rows=300, pitch=256, unit=128)
    assert of(6, 2, pairs=5 * 384 * 256) == [(0, 4, 0, 384), (4, 2, 0, 384)]
    assert [x[:2] for x in of(6, 6, pairs=5 * 384 * 256)] == [(0, 3), (3, 3)]
    assert of(1, 1, pairs=2 * 128 * 256) == [(0, 1, 0, 256), (0, 1, 256, 128)]
    assert of(0, 1, pairs=1) == []


@pytest.mark.parametrize("splits", [1, 3])
def test_groups_packed_rows_and_dropout_are_as_tiled(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that share the keys of a tile of rows, of which some have none, too."""
    found = candidates.second
    monkeypatch.setattr(candidates, "second", lambda *x: ((tile, splits) for tile, _ in found(*x)))
    forget_plans()
    offsets = torch.tensor([0, 5, 5, 24], dtype=torch.int32)
    generator = torch.Generator().manual_seed(3)
    q, k, v, tq, tk, tv, dout = (torch.randn(24, heads, 8, generator=generator) for heads in (4, 2, 2, 4, 2, 2, 4))

    def hessian(backend: str) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flashtile.attention_varlen(
            *leaves, offsets, offsets, causal=True, dropout_p=0.3, dropout_seed=5, backend=backend
        )
        first = torch.autograd.grad(out, leaves, dout, create_graph=True)
        return torch.autograd.grad(first, leaves, (tq, tk, tv))

    for x, right in zip(hessian("triton"), hessian("tiled"), strict=True):
        torch.testing.assert_close(x, right, atol=2e-5, rtol=1e-4)
    forget_plans()


@pytest.mark.parametrize("names", ["q", "k", "v", "qv"])
def test_directions_that_are_absent(names: str) -> None:
    """Their products are not in the kernels; other inputs need gradients all the same."""
    inputs, along, dout = tensors(torch.float32, 8, 8)
    still: Any = tuple(x if n in names else torch.zeros_like(x) for n, x in zip("qkv", along, strict=True))
    expected = second_derivative(inputs, still, dout, FULL)
    leaves = [x.requires_grad_() for x in inputs]
    out = flashtile.attention(*leaves, backend="triton")
    chosen = [n for n in range(3) if "qkv"[n] in names]
    first = torch.autograd.grad(out, [leaves[n] for n in chosen], dout, create_graph=True)
    assert_close(list(torch.autograd.grad(first, leaves, [along[n] for n in chosen])), expected, torch.float32)


def test_transforms_of_torch_func() -> None:
    """A Hessian times a direction in any nesting, and the third order, which is composed."""
    inputs, along, _ = tensors(torch.float32, 8, 8)

    def loss(backend: str) -> Any:
        return lambda *x: flashtile.attention(*x, causal=True, backend=backend).square().sum()

    def forward_over_reverse(f: Any) -> Any:
        return torch.func.jvp(torch.func.grad(f, argnums=(0, 1, 2)), inputs, along)[1]

    def reverse_over_forward(f: Any) -> Any:
        return torch.func.grad(lambda *x: torch.func.jvp(f, x, along)[1], argnums=(0, 1, 2))(*inputs)

    def reverse_over_reverse(f: Any) -> Any:
        return torch.func.vjp(torch.func.grad(f, argnums=(0, 1, 2)), *inputs)[1](along)

    def curvature(f: Any) -> Any:
        return lambda *x: sum(
            (a * b).sum()
            for a, b in zip(torch.func.jvp(torch.func.grad(f, (0, 1, 2)), x, along)[1], along, strict=True)
        )

    def assert_near(found: Any, right: Any) -> None:
        for x, y in zip(found, right, strict=True):
            torch.testing.assert_close(x, y, atol=2e-6 * float(y.abs().max()), rtol=1e-4)

    right = forward_over_reverse(loss("tiled"))
    for nesting in (forward_over_reverse, reverse_over_forward, reverse_over_reverse):
        with flashtile.calls() as counts:
            found = nesting(loss("triton"))
        assert ("second", "triton") in {(row.direction, row.backend) for row in counts.rows}
        assert_near(found, right)
    third = [torch.func.grad(curvature(loss(backend)))(*inputs) for backend in ("triton", "tiled")]
    assert_near([third[0]], [third[1]])


@pytest.mark.parametrize("arguments", [{"score_mod": lambda s, b, h, i, j: s * 0.5}], ids=["score_mod"])
def test_what_has_no_kernel_runs_in_tiled(arguments: dict[str, Any]) -> None:
    inputs, along, dout = tensors(torch.float32, 8, 8)
    found, passes = by_autograd(inputs, along, dout, "triton", **arguments)
    assert all(direction != "second" for direction, _ in passes)
    right, _ = by_autograd(inputs, along, dout, "tiled", **arguments)
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)
