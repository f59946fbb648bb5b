"""Second derivatives by the kernel for CPUs: against formulas in float64, and as `tiled`."""

from typing import Any

import pytest
import torch
from second_oracle import assert_close, by_autograd, second_derivative

import flashtile
from flashtile.backend.cpu.support import unusable
from flashtile.testing.poison import poisoned_allocation

pytestmark = pytest.mark.skipif(unusable() is not None, reason=str(unusable()))


def drawn(dtype: torch.dtype, heads: int, sizes: tuple[int, int, int, int]) -> Any:
    """Inputs with outliers, directions, and the cotangent of out; of 4 query heads."""
    rows, keys, head_dim, head_dim_v = sizes
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, rows, head_dim), (heads, keys, head_dim), (heads, keys, head_dim_v)]
    given = []
    for shape in (*shapes, *shapes, (4, rows, head_dim_v)):
        x = torch.randn(1, *shape, generator=generator, dtype=torch.float64)
        given.append((x * torch.where(torch.rand(x.shape, generator=generator) < 0.02, 8, 1)).to(dtype))
    return tuple(given[:3]), tuple(given[3:6]), given[6]


@pytest.mark.parametrize(("name", "sizes"), [("softcap", (70, 110, 64, 64)), ("causal", (21, 18, 24, 40))])
def test_within_the_bound(name: str, sizes: tuple[int, int, int, int]) -> None:
    """More than one block of keys and panel of rows; and rows that see no key, in parts of vectors."""
    rows, keys = sizes[:2]
    inputs, along, dout = drawn(torch.float32, 4, sizes)
    hidden = torch.arange(keys) > torch.arange(rows)[:, None] + keys - rows
    bias = torch.where(hidden & (name == "causal"), -torch.inf, 0.0).expand(1, 4, rows, keys)
    arguments: dict[str, Any] = {"softcap": {"softcap": 5.0}, "causal": {"causal": True}}[name]
    with poisoned_allocation():
        found, passes = by_autograd(inputs, along, dout, "cpu", **arguments)
    assert ("second", "cpu") in passes
    right = second_derivative(inputs, along, dout, bias, softcap=arguments.get("softcap", torch.inf))
    assert_close(found, right, torch.float32)


@pytest.mark.parametrize("threads", [1, 2])
def test_features_are_as_tiled(threads: int) -> None:
    """Groups, a window, dropout, a bias, slopes and sinks together, along a direction of k, v and sinks."""
    inputs, (_, tk, tv), dout = drawn(torch.float64, 2, (37, 130, 16, 16))
    generator = torch.Generator().manual_seed(1)
    arguments: dict[str, Any] = {"window": (60, 7), "dropout_p": 0.3, "dropout_seed": 5}
    arguments |= {"bias": torch.randn(1, 4, 37, 130, generator=generator, dtype=torch.float64)}
    arguments |= {"alibi_slopes": torch.rand(4, generator=generator)}
    sinks, tsinks = torch.randn(2, 4, generator=generator, dtype=torch.float64)

    def hessian(backend: str) -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (*inputs, sinks)]
        out, lse = flashtile.attention(*leaves[:3], sinks=leaves[3], backend=backend, return_lse=True, **arguments)
        first = torch.autograd.grad((out, lse), leaves[1:], (dout, lse.detach()), create_graph=True)
        return torch.autograd.grad(first, leaves, (tk, tv, tsinks))

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = hessian("cpu")
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, hessian("tiled"), atol=1e-11, rtol=1e-9)


def test_packed_rows_are_as_tiled() -> None:
    """Tokens of no sequence, and a sequence without any."""
    offsets = torch.tensor([0, 5, 5, 16], dtype=torch.int32)
    generator = torch.Generator().manual_seed(3)
    q, k, v, tq, tk, tv, dout = (torch.randn(18, heads, 8, generator=generator) for heads in (4, 2, 2, 4, 2, 2, 4))

    def hessian(backend: str) -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flashtile.attention_varlen(*leaves, offsets, offsets, causal=True, backend=backend)  # type: ignore[call-overload]
        first = torch.autograd.grad(out, leaves, dout, create_graph=True)
        return torch.autograd.grad(first, leaves, (tq, tk, tv))

    torch.testing.assert_close(hessian("cpu"), hessian("tiled"), atol=2e-5, rtol=1e-4)
