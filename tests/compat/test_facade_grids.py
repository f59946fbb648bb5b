"""Random calls by the names of `flash_attn` and PyTorch against the formula in float64, on a CPU and on a GPU."""

import random
from typing import Any
from unittest import mock

import pytest
import torch
from flash_formula import FP64, formula, randn
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as native

import flashtile.compat.torch as names
from flashtile.compat import flash_attn
from flashtile.compat.torch import kernels

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}  # of the largest value


def places(on_cpu: int, on_gpu: int) -> Any:
    """Seeds for each kind of device."""
    cases = [pytest.param("cpu", seed) for seed in range(on_cpu)]
    cases += [pytest.param("cuda", seed, marks=[pytest.mark.gpu, NEEDS_GPU]) for seed in range(on_gpu)]
    return pytest.mark.parametrize(("device", "seed"), cases)


def drawn(seed: int, device: str) -> tuple[random.Random, tuple[Tensor, ...], dict[str, Any]]:
    """q, k and v as `flash_attn` has them, `[B, S, H, D]`, and keywords that the formula knows too."""
    rng = random.Random(seed)
    dtype = rng.choice([torch.float16, torch.bfloat16] if device == "cuda" else [torch.bfloat16, torch.float32])
    heads_kv, group, width = rng.choice([1, 2]), rng.choice([1, 3]), rng.choice([64, 80, 128])
    rows, keys = rng.choice([1, 65, 200]), rng.choice([70, 129, 333])
    shapes = (2, rows, heads_kv * group, width), (2, keys, heads_kv, width), (2, keys, heads_kv, width)
    q, k, v = (randn(*shape, seed=seed + n).to(dtype) for n, shape in enumerate(shapes))
    settings: dict[str, Any] = {"causal": rng.random() < 0.5, "window_size": rng.choice([(-1, -1), (40, 0), (30, 20)])}
    settings["softcap"] = rng.choice([0.0, 0.0, 5.0])
    return rng, (q, k, v), settings


def assert_near(found: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    """Within the dtype's tolerance of the largest value; infinities at the same places."""
    x, y = found.detach().cpu().double(), expected.detach()
    assert torch.equal(x.isinf(), y.isinf())
    x, y = (z.masked_fill(z.isinf(), 0) for z in (x, y))
    assert float((x - y).abs().max()) <= factor * TOLERANCES[found.dtype] * max(1.0, float(y.abs().max()))


@places(4, 20)
def test_flash_attn_func(device: str, seed: int) -> None:
    _, tensors, settings = drawn(seed, device)
    mine = tuple(x.to(device).requires_grad_() for x in tensors)
    theirs = tuple(x.to(FP64).requires_grad_() for x in tensors)
    out, lse, _ = flash_attn.flash_attn_func(*mine, **settings, return_attn_probs=True)
    expected, expected_lse, _ = formula(*theirs, **settings)
    assert_near(out, expected)
    assert_near(lse, expected_lse, factor=10)
    dout = randn(*out.shape, seed=9).to(out.dtype)
    found = torch.autograd.grad(out, mine, dout.to(device))
    for a, b in zip(found, torch.autograd.grad(expected, theirs, dout.to(FP64)), strict=True):
        assert_near(a, b, factor=2)


@places(2, 8)
def test_flash_attn_varlen_func(device: str, seed: int) -> None:
    rng, (q, k, v), settings = drawn(seed, device)
    ends = [[0, rng.randint(0, x.shape[1]), x.shape[1]] for x in (q, k)]
    offsets = [torch.tensor(x, dtype=torch.int32, device=device) for x in ends]
    packed = [x[0].to(device) for x in (q, k, v)]
    out = flash_attn.flash_attn_varlen_func(*packed, *offsets, q.shape[1], k.shape[1], **settings)
    for n in range(2):
        rows, keys = (slice(x[n], x[n + 1]) for x in ends)
        expected = formula(*(x[:1, y].to(FP64) for x, y in ((q, rows), (k, keys), (v, keys))), **settings)[0]
        if expected.numel():
            assert_near(out[rows], expected[0])


@places(2, 8)
def test_flash_attn_with_kvcache(device: str, seed: int) -> None:
    """Paged or dense, with appended keys."""
    rng, (q, k, v), settings = drawn(seed, device)
    q, new = q[:, : (rows := min(q.shape[1], 5))], (k[:, -rows:], v[:, -rows:])
    past, page = k.shape[1] - rows, 16
    room = -(-k.shape[1] // page)
    caches = [torch.zeros(2, room * page, *x.shape[2:], dtype=x.dtype) for x in (k, v)]
    for cache, x in zip(caches, (k, v), strict=True):
        cache[:, :past] = x[:, :past]
    more: dict[str, Any] = {}
    if rng.random() < 0.5:
        order = torch.randperm(2 * room, generator=torch.Generator().manual_seed(seed))
        pages = [torch.empty_like(x).view(2 * room, page, *x.shape[2:]) for x in caches]
        for x, cache in zip(pages, caches, strict=True):
            x[order] = cache.reshape(x.shape)
        caches, more = pages, {"block_table": order.view(2, room).int().to(device)}
    lengths = torch.full((2,), past, dtype=torch.int32, device=device)
    k_cache, v_cache, k_new, v_new = (x.to(device) for x in (*caches, *new))
    with torch.no_grad():
        out = flash_attn.flash_attn_with_kvcache(
            q.to(device), k_cache, v_cache, k_new, v_new, cache_seqlens=lengths, **more, **settings
        )
    assert_near(out, formula(q.to(FP64), k.to(FP64), v.to(FP64), **settings)[0])


@places(2, 8)
def test_activated_sdpa(device: str, seed: int) -> None:
    """PyTorch's own function, with its choice held to flash attention, which is tried after cuDNN on Hopper."""
    pytest.importorskip("torch.nn.attention._registry")
    _, (q, k, v), settings = drawn(seed, device)
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    causal = settings["causal"] and q.shape[1] > 1
    if causal:  # PyTorch's flash attention takes it for equal lengths alone
        q, k, v = (x[:, : min(q.shape[1], k.shape[1])] for x in (q, k, v))
    mine = tuple(x.transpose(1, 2).to(device).requires_grad_() for x in (q, k, v))
    theirs = tuple(x.detach().cpu().to(FP64).requires_grad_() for x in mine)
    used = mock.Mock(wraps=kernels.sdpa_forward)
    with mock.patch.object(kernels, "sdpa_forward", used), names.activate(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = native(*mine, is_causal=causal)
        dout = randn(*out.shape, seed=9).to(out.dtype)
        found = torch.autograd.grad(out, mine, dout.to(device))
    assert used.call_count == 1
    with sdpa_kernel(SDPBackend.MATH):
        expected = native(*theirs, is_causal=causal)
    assert_near(out, expected)
    for a, b in zip(found, torch.autograd.grad(expected, theirs, dout.to(FP64)), strict=True):
        assert_near(a, b, factor=2)
    assert torch.nn.attention.current_flash_attention_impl() is None
