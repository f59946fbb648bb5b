"""Values that are columns of the keys in Triton's forward kernel, in its interpreter."""

import contextlib
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from checking import assert_right
from forced import first, forced
from torch import Tensor
from triton.runtime.errors import InterpreterError

import flashtile
from flashtile.backend.triton import support
from flashtile.backend.triton.kernels import forward
from flashtile.backend.triton.tile_config import KernelConfig
from flashtile.call.problem import Problem
from flashtile.dispatch import cache_operator, fast_path
from flashtile.testing.case import Case
from flashtile.testing.eight_bit import FORMATS, with_eight_bits
from flashtile.testing.generate import random_case
from flashtile.testing.latent import latent
from flashtile.testing.oracle import solve
from flashtile.testing.packed_rows import packed_rows
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


def pages_of(k: Tensor, page_size: int) -> dict[str, Any]:
    pages = k.transpose(1, 2).reshape(-1, page_size, k.shape[1], k.shape[-1])
    return {"k_cache": pages, "page_table": torch.arange(len(pages)).view(len(k), -1).flip(1).int()}


def wide_case(page_size: int | None = None, v_dim: int = 512, **more: Any) -> Case:
    """Decoding with as many features as DeepSeek's models have: 20 heads, more rows than a tile of 16 has."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, n, v_dim + 64, generator=generator).half() for heads, n in ((20, 2), (1, 48)))
    given = {"k_cache": k} if page_size is None else pages_of(k, page_size)
    given |= {"v_cache": given["k_cache"][..., :v_dim], "q": q, "cache_seqlens": torch.tensor([45, 0]).int()}
    return latent(Case("attention_with_kvcache", given | {"causal": True, "scale": 192**-0.5} | more))


@pytest.mark.parametrize(
    ("page_size", "more"),
    [(None, {"num_splits": 3}), (16, {"sinks": torch.linspace(-1, 1, 20)}), (6, {"window": (20, 0), "num_splits": 2})],
)  # fmt: skip
def test_the_width_of_deepseek(page_size: int | None, more: dict[str, Any]) -> None:
    assert_right(wide_case(page_size, **more), "triton")


@pytest.mark.parametrize(("dtype", "kind"), [*zip(FORMATS, ("tokens", "heads", "tokens"), strict=True)])
def test_caches_of_8_bits(dtype: torch.dtype, kind: str) -> None:
    new = torch.randn(2, 1, 2, 576).half()
    case = wide_case(16, k=new, cache_seqlens=torch.tensor([40, 3]).int())
    case.arguments["v_cache"] = case.arguments["k_cache"][..., :512]
    assert_right(latent(with_eight_bits(case, dtype, kind, kind)), "triton")


@pytest.mark.parametrize("seed", range(3))
def test_random_problems(seed: int) -> None:
    """Of any width: values are a chunk of the keys' rows, all of them, or loaded by themselves."""
    function = ("attention_with_kvcache", "attention_varlen")[seed % 2]
    assert_right(latent(random_case(seed, dtypes=(torch.float16, torch.float32), function=function)), "triton")


@pytest.mark.parametrize("v_dim", [32, 48, 40])
def test_values_are_loaded_once(v_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are a chunk of the keys' rows, or all of them."""
    fast_path.forget()
    with forced(support, first(forward=KernelConfig(16, 16, 4, 1), given_splits=None)):
        q, k = torch.randn(1, 4, 1, 48).half(), torch.randn(1, 1, 40, 48).half()
        call: dict[str, Any] = {"cache_seqlens": 33, "backend": "triton"}
        expected = flashtile.attention_with_kvcache(q, k, k[..., :v_dim].clone(), **call)
        monkeypatch.setattr(forward, "load_v", None)
        loads = contextlib.nullcontext() if v_dim != 40 else pytest.raises(InterpreterError)
        with loads:
            out = flashtile.attention_with_kvcache(q, k, None, v_dim=v_dim, **call)
            assert torch.equal(out, expected)
    fast_path.forget()


def test_rows_of_656_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in words, not a copy, once new ones are appended."""
    monkeypatch.setattr(cache_operator, "unpacked", None)
    new = torch.randn(2, 1, 2, 576).half()
    q, lengths = torch.randn(2, 8, 2, 576).half(), torch.tensor([44, 2]).int()
    case = packed_rows(wide_case(16, q=q, cache_seqlens=lengths, k=new, num_splits=2))
    expected = solve(case)
    fast_path.forget()
    with forced(support, first(forward=KernelConfig(32, 32, 4, 1), given_splits=None)):
        for n in range(3):
            if n == 2:  # known now: nobody describes or plans the call
                monkeypatch.setattr(Problem, "describe", None)
                monkeypatch.setattr(cache_operator, "is_declined", None)
            arguments = {name: x.clone() if name == "k_cache" else x for name, x in case.arguments.items()}
            again = replace(case, arguments=arguments)
            assert all(x.ok for x in compare(again.run("triton"), case, expected))
    fast_path.forget()
