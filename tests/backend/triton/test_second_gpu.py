"""Second derivatives on a GPU: `pytest -m gpu tests/backend/triton/test_second_gpu.py`."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from second_oracle import Triple, assert_close, by_autograd, second_derivative
from torch import Tensor

import flashtile
from flashtile.api.explain import QKV, described_call
from flashtile.backend.hopper import entry as hopper
from flashtile.backend.triton import entry as triton
from flashtile.backend.triton import support
from flashtile.backend.triton.launch import second_blocks
from flashtile.bench.allocation import live_and_peak_bytes
from flashtile.call.device import describe_device
from flashtile.call.plan import Plan
from flashtile.call.problem import Problem
from flashtile.dispatch.planner import plan_call
from flashtile.testing.poison import poisoned_allocation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def tensors(dtype: torch.dtype, shape: tuple[int, ...], head_dim: int, seed: int) -> tuple[Triple, Triple, Tensor]:
    """Inputs with outliers, directions, and the cotangent of out."""
    batch, heads, rows, keys = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def drawn(length: int) -> Tensor:
        x = torch.randn(batch, heads, length, head_dim, generator=generator, device="cuda")
        return (x * torch.where(torch.rand(x.shape, generator=generator, device="cuda") < 0.01, 5, 1)).to(dtype)

    given = [drawn(n) for n in (rows, keys, keys, rows, keys, keys)]
    return tuple(given[:3]), tuple(given[3:]), drawn(rows)  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 256])
@pytest.mark.parametrize("feature", ["plain", "causal", "bias", "mask", "window", "softcap"])
def test_within_the_bound(feature: str, head_dim: int, dtype: torch.dtype) -> None:
    rows, keys = 301, 437
    inputs, along, dout = tensors(dtype, (1, 2, rows, keys), head_dim, head_dim)
    i, j = torch.arange(rows, device="cuda")[:, None], torch.arange(keys, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    bias = torch.randn(1, 2, rows, keys, generator=generator, device="cuda").to(dtype)
    shown = torch.rand(1, 1, rows, keys, generator=generator, device="cuda") < 0.5
    shift = i + keys - rows

    def added(visible: Tensor) -> Tensor:
        return torch.where(visible, 0.0, -torch.inf).expand(1, 1, rows, keys)

    arguments: dict[str, Any]
    arguments, terms = {
        "plain": ({}, added(j >= 0)),
        "causal": ({"causal": True}, added(j <= shift)),
        "bias": ({"bias": bias}, bias),
        "mask": ({"mask": shown}, added(shown)),
        "window": ({"window": (70, 20)}, added((j >= shift - 70) & (j <= shift + 20))),
        "softcap": ({"softcap": 20.0}, added(j >= 0)),
    }[feature]
    problem = Problem.describe(described_call(*inputs, None, None, arguments))
    if (reason := support.declines_second(problem, describe_device(inputs[0].device), QKV, QKV)) is not None:
        pytest.skip(reason)
    with poisoned_allocation():
        found, passes = by_autograd(inputs, along, dout, "triton", **arguments)
    assert ("second", "triton") in passes, passes
    assert_close(
        found, second_derivative(inputs, along, dout, terms, softcap=arguments.get("softcap", math.inf)), dtype
    )


def planned(inputs: Triple, **arguments: Any) -> Plan:
    return plan_call(described_call(*inputs, None, None, arguments), needs=QKV, moves=QKV)


@pytest.mark.skipif(not is_hopper, reason="Hopper's forward mode")
@pytest.mark.parametrize(
    ("head_dim", "softcap"), [(96, math.inf), (128, math.inf), (128, 20.0), (256, math.inf), (256, 20.0)]
)
def test_behind_another_backend(head_dim: int, softcap: float) -> None:
    """Forward mode and forward are Hopper's where those are faster."""
    rows, keys = 1301, 1437
    inputs, along, dout = tensors(torch.bfloat16, (1, 16, rows, keys), head_dim, head_dim)
    arguments: dict[str, Any] = {"causal": True} | ({} if math.isinf(softcap) else {"softcap": softcap})
    first = triton.before_second(planned(inputs, **arguments))
    with poisoned_allocation(), mock.patch.object(hopper, first, wraps=getattr(hopper, first)) as run:
        found, passes = by_autograd(inputs, along, dout, "auto", **arguments)
    assert run.called
    assert ("second", "triton") in passes, passes
    i, j = torch.arange(rows, device="cuda")[:, None], torch.arange(keys, device="cuda")
    terms = torch.where(j <= i + keys - rows, 0.0, -torch.inf)[None, None]
    assert_close(found, second_derivative(inputs, along, dout, terms, softcap=softcap), torch.bfloat16)


@pytest.mark.skipif(not is_hopper, reason="Hopper's forward mode")
def test_packed_rows_behind_another_backend() -> None:
    offsets = torch.tensor([0, 1000, 1000, 1001, 3000], dtype=torch.int32, device="cuda")
    generator = torch.Generator("cuda").manual_seed(3)
    q, k, v, tq, tk, tv, dout = (
        torch.randn(3000, heads, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
        for heads in (16, 4, 4, 16, 4, 4, 16)
    )

    def hessian(backend: str) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flashtile.attention_varlen(*leaves, offsets, offsets, causal=True, backend=backend)
        first = torch.autograd.grad(out, leaves, dout, create_graph=True)
        return torch.autograd.grad(first, leaves, (tq, tk, tv))

    with mock.patch.object(hopper, "tangents", wraps=hopper.tangents) as run:
        hessian("auto")
    assert run.called
    for x, right in zip(hessian("auto"), hessian("triton"), strict=True):
        torch.testing.assert_close(x, right, atol=1e-2 * float(right.abs().max()), rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_programs_share_the_keys_of_few_rows(dtype: torch.dtype) -> None:
    rows, keys = 40, 8000
    inputs, along, dout = tensors(dtype, (1, 2, rows, keys), 64, 4)
    assert planned(inputs, window=(6000, 0), backend="triton").num_splits > 1
    with poisoned_allocation():
        found, _ = by_autograd(inputs, along, dout, "triton", window=(6000, 0))
    i, j = torch.arange(rows, device="cuda")[:, None], torch.arange(keys, device="cuda")
    shift = i + keys - rows
    terms = torch.where((j <= shift) & (j >= shift - 6000), 0.0, -torch.inf)[None, None]
    assert_close(found, second_derivative(inputs, along, dout, terms), dtype)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_groups_packed_rows_and_dropout_are_as_tiled(head_dim: int) -> None:
    offsets = torch.tensor([0, 130, 130, 131, 700], dtype=torch.int32, device="cuda")
    generator = torch.Generator("cuda").manual_seed(3)
    q, k, v, tq, tk, tv, dout = (
        torch.randn(700, heads, head_dim, generator=generator, device="cuda") for heads in (4, 2, 2, 4, 2, 2, 4)
    )

    def hessian(backend: str) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flashtile.attention_varlen(
            *leaves, offsets, offsets, causal=True, dropout_p=0.3, dropout_seed=5, backend=backend
        )
        first = torch.autograd.grad(out, leaves, dout, create_graph=True)
        return torch.autograd.grad(first, leaves, (tq, tk, tv))

    for x, right in zip(hessian("triton"), hessian("tiled"), strict=True):
        torch.testing.assert_close(x, right, atol=1e-4 * float(right.abs().max()), rtol=1e-3)


def test_wide_heads_in_groups_with_dropout_are_as_tiled() -> None:
    """Weights of pairs in memory, in ranges of some rows of a head."""
    generator = torch.Generator("cuda").manual_seed(3)
    sizes = [(4, 700), (2, 900), (2, 900), (4, 700), (2, 900), (2, 900), (4, 700)]
    *inputs, tq, tk, tv, dout = (torch.randn(1, h, n, 160, generator=generator, device="cuda") for h, n in sizes)
    arguments: dict[str, Any] = {"window": (300, 70), "dropout_p": 0.3, "dropout_seed": 5}
    with mock.patch.object(second_blocks, "MOST_BYTES", 2**23), poisoned_allocation():
        found, passes = by_autograd(tuple(inputs), (tq, tk, tv), dout, "triton", **arguments)  # type: ignore[arg-type]
    assert ("second", "triton") in passes, passes
    right, _ = by_autograd(tuple(inputs), (tq, tk, tv), dout, "tiled", **arguments)  # type: ignore[arg-type]
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4 * float(y.abs().max()), rtol=1e-3)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_memory_grows_with_length(head_dim: int) -> None:
    def peak(length: int) -> int:
        inputs, along, dout = tensors(torch.bfloat16, (1, 4, length, length), head_dim, 0)
        leaves = [x.requires_grad_() for x in inputs]
        first = torch.autograd.grad(flashtile.attention(*leaves), leaves, dout, create_graph=True)
        left, most = live_and_peak_bytes(
            lambda: torch.autograd.grad(first, leaves, along, retain_graph=True), torch.device("cuda")
        )
        return most - left

    peak(2048)
    assert peak(16384) < 4.5 * peak(4096)
