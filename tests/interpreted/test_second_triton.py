"""The kernels of second derivatives in Triton's interpreter, against formulas in float64."""

import os
from typing import Any

import pytest
import torch
from second_oracle import Triple, assert_close, by_autograd, second_derivative
from torch import Tensor

import flashtile
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
}


@pytest.mark.parametrize(("dtype", "sizes"), [(torch.float32, (8, 8)), (torch.float16, (24, 16))], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_features(name: str, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    """Rows that see no key, too."""
    arguments, bias = CASES[name]
    inputs, along, dout = tensors(dtype, *sizes)
    with poisoned_allocation():
        found, passes = by_autograd(inputs, along, dout, "triton", **arguments)
    assert ("second", "triton") in passes
    assert_close(found, second_derivative(inputs, along, dout, bias, arguments.get("sinks")), dtype)


def test_groups_packed_rows_and_dropout_are_as_tiled() -> None:
    offsets = torch.tensor([0, 5, 5, 16], dtype=torch.int32)
    generator = torch.Generator().manual_seed(3)
    q, k, v, tq, tk, tv, dout = (torch.randn(16, heads, 8, generator=generator) for heads in (4, 2, 2, 4, 2, 2, 4))

    def hessian(backend: str) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flashtile.attention_varlen(
            *leaves, offsets, offsets, causal=True, dropout_p=0.3, dropout_seed=5, backend=backend
        )
        first = torch.autograd.grad(out, leaves, dout, create_graph=True)
        return torch.autograd.grad(first, leaves, (tq, tk, tv))

    for x, right in zip(hessian("triton"), hessian("tiled"), strict=True):
        torch.testing.assert_close(x, right, atol=2e-5, rtol=1e-4)


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


@pytest.mark.parametrize(
    "arguments", [{"softcap": 5.0}, {"score_mod": lambda s, b, h, i, j: s * 0.5}], ids=["softcap", "score_mod"]
)
def test_what_has_no_kernel_runs_in_tiled(arguments: dict[str, Any]) -> None:
    inputs, along, dout = tensors(torch.float32, 8, 8)
    found, passes = by_autograd(inputs, along, dout, "triton", **arguments)
    assert all(direction != "second" for direction, _ in passes)
    right, _ = by_autograd(inputs, along, dout, "tiled", **arguments)
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)
