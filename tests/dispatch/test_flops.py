"""`torch.utils.flop_counter` counts the operators: all pairs of a dense call, of packed sequences and of caches."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flashtile

B, HQ, HKV, SQ, SK, D, DV = 2, 4, 2, 5, 7, 6, 3
FORWARD, BACKWARD = 2 * (D + DV), 2 * (3 * D + 2 * DV)  # of a pair


def counted(call: Callable[..., Any], *tensors: Any, **settings: Any) -> list[int]:
    """Operations of forward and of both passes."""
    counts = []
    with FlopCounterMode(display=False) as counter:
        out = call(*tensors, **settings)
        counts.append(counter.get_total_flops())
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors):
            out.sum().backward()
            counts.append(counter.get_total_flops() - counts[0])
    return counts


def dense(requires_grad: bool = True) -> list[torch.Tensor]:
    shapes = (B, HQ, SQ, D), (B, HKV, SK, D), (B, HKV, SK, DV)
    return [torch.randn(shape, requires_grad=requires_grad) for shape in shapes]


def test_dense() -> None:
    pairs = B * HQ * SQ * SK
    for causal in (False, True):
        assert counted(flashtile.attention, *dense(), causal=causal) == [pairs * FORWARD, pairs * BACKWARD]
    with FakeTensorMode():
        assert counted(flashtile.attention, *dense()) == [pairs * FORWARD, pairs * BACKWARD]


def test_tangents() -> None:
    """Forward's products and those of the inputs that move."""
    q, k, v = dense(requires_grad=False)
    pairs, bias = B * HQ * SQ * SK, torch.zeros(1, 1, SQ, SK)

    def of(moving: int, *tensors: torch.Tensor) -> list[int]:
        def along(*x: torch.Tensor) -> torch.Tensor:
            arguments = [*x, *tensors[moving:]]
            return flashtile.attention(*arguments[:3], bias=arguments[3] if tensors[3:] else None)

        return counted(lambda *x: torch.func.jvp(along, x, x)[1], *tensors[:moving])

    assert of(3, q, k, v) == [3 * pairs * FORWARD]
    assert of(2, q, k, v) == [pairs * 2 * (3 * D + 2 * DV)]
    assert counted(lambda x: torch.func.jvp(lambda x: flashtile.attention(q, k, x), (x,), (x,))[1], v) == [
        pairs * 2 * (D + 2 * DV)
    ]
    by_bias = counted(lambda x: torch.func.jvp(lambda x: flashtile.attention(q, k, v, bias=x), (x,), (x,))[1], bias)
    assert by_bias == [pairs * 2 * (D + 2 * DV)]


def test_packed() -> None:
    """By lengths where they can be read, else by the longest."""
    q, k, v = (x[0].transpose(0, 1).detach().requires_grad_() for x in dense())
    cu_q, cu_k = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 6, 7], dtype=torch.int32)
    packed = q, k, v, cu_q, cu_k
    pairs = HQ * (2 * 6 + 3 * 1)
    assert counted(flashtile.attention_varlen, *packed) == [pairs * FORWARD, pairs * BACKWARD]
    used = torch.tensor([4, 1], dtype=torch.int32)
    assert counted(flashtile.attention_varlen, *packed, seqused_k=used)[0] == HQ * (2 * 4 + 3 * 1) * FORWARD
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in packed]
        longest = {"max_seqlen_q": 3, "max_seqlen_k": 6}
        assert counted(flashtile.attention_varlen, *fake, **longest)[0] == HQ * 2 * 3 * 6 * FORWARD


@pytest.mark.parametrize("paged", [False, True])
def test_cache(paged: bool) -> None:
    q, k, v = dense(requires_grad=False)
    k_cache, v_cache = torch.zeros(B, HKV, 16, D), torch.zeros(B, HKV, 16, DV)
    cache: dict[str, Any] = {"cache_seqlens": torch.tensor([3, 8], dtype=torch.int32), "k": k, "v": v}
    if paged:
        k_cache, v_cache = (x.reshape(8, 4, HKV, -1) for x in (k_cache, v_cache))
        cache["page_table"] = torch.arange(8, dtype=torch.int32).reshape(2, 4)
    count = counted(flashtile.attention_with_kvcache, q, k_cache, v_cache, **cache)
    assert count == [HQ * SQ * (3 + 8 + 2 * SK) * FORWARD]
    with FakeTensorMode() as mode:
        q, k_cache, v_cache = (mode.from_tensor(x) for x in (q, k_cache, v_cache))
        cache = {name: mode.from_tensor(x) for name, x in cache.items()}
        count = counted(flashtile.attention_with_kvcache, q, k_cache, v_cache, **cache)
    assert count == [HQ * SQ * 2 * 16 * FORWARD]


CODE = """
import sys, torch, flashtile
assert "torch.utils.flop_counter" not in sys.modules  # it loads Triton
import torch.utils.flop_counter
q = torch.randn(1, 1, 3, 4)
with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
    flashtile.attention(q, q, q)
print(counter.get_total_flops())
"""


def test_a_counter_that_is_imported_after_flashtile() -> None:
    """Above it is imported before, if this file's tests run alone."""
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert result.stdout == f"{2 * 3 * 3 * 8}\n"
