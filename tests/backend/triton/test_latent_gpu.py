"""Latent rows on a GPU: `pytest -m gpu tests/backend/triton/test_latent_gpu.py`."""

from typing import Any

import pytest
import torch
from forced import forced, number
from torch import Tensor

import flashtile
from flashtile.backend.triton import support
from flashtile.dispatch import fast_path
from flashtile.testing.case import Case
from flashtile.testing.eight_bit import FORMATS, with_eight_bits
from flashtile.testing.generate import random_case
from flashtile.testing.latent import latent
from flashtile.testing.oracle import solve
from flashtile.testing.packed_rows import packed_rows
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def assert_right(case: Case, backend: str = "triton") -> None:
    with poisoned_allocation():
        results = {name: x.cpu() for name, x in case.run(backend).items()}
    wrong = [str(x) for x in compare(results, case, solve(case)) if not x.ok]
    assert not wrong, "\n".join([case.description, *wrong])


def wide_case(
    heads: int = 16, queries: int = 1, dtype: torch.dtype = torch.bfloat16, page_size: int | None = 64, **more: Any
) -> Case:
    """Decoding with as many features as DeepSeek's models have; NaN behind the keys."""
    generator = torch.Generator("cuda").manual_seed(heads + queries)
    lengths = torch.tensor([700, 0, 1, 129], dtype=torch.int32, device="cuda")
    q = torch.randn(4, heads, queries, 576, generator=generator, device="cuda").to(dtype)
    k = torch.randn(4, 1, 768, 576, generator=generator, device="cuda").to(dtype)
    for b, n in enumerate(lengths.tolist()):
        k[b, :, n:] = torch.nan
    given: dict[str, Any] = {"q": q, "cache_seqlens": lengths, "causal": True, "scale": 192**-0.5} | more
    given["k_cache"] = k
    if page_size is not None:
        given["k_cache"] = k.transpose(1, 2).reshape(-1, page_size, 1, 576)
        given["page_table"] = torch.arange(4 * 768 // page_size, device="cuda").view(4, -1).int()
    return latent(Case("attention_with_kvcache", given | {"v_cache": given["k_cache"][..., :512]}))


@pytest.mark.parametrize("page_size", [None, 1, 16, 64, 48])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "queries"), [(1, 1), (16, 1), (20, 2), (64, 1), (128, 1), (128, 2), (8, 16)])
def test_decoding(heads: int, queries: int, dtype: torch.dtype, page_size: int | None) -> None:
    assert_right(wide_case(heads, queries, dtype, page_size))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("heads", [16, 32, 128])
def test_every_candidate(heads: int, seed: int) -> None:
    """All tiles and splits of the tables."""
    fast_path.forget()
    with forced(support, number(seed)):
        assert_right(wide_case(heads))
    fast_path.forget()


@pytest.mark.parametrize(
    "more",
    [{"window": (100, 0)}, {"num_splits": 7}, {"softcap": 3.0}, {"attention_chunk": 50}, {"window": (10, -3)}, {}],
    ids=str,
)  # fmt: skip
def test_features(more: dict[str, Any]) -> None:
    assert_right(wide_case(32, 3, sinks=torch.linspace(-2, 2, 32, device="cuda"), **more))


@pytest.mark.parametrize("kind", ["none", "heads", "pages", "tokens"])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("heads", [16, 128])
def test_caches_of_8_bits(heads: int, dtype: torch.dtype, kind: str) -> None:
    case = wide_case(heads, 1, torch.float16 if heads == 16 else torch.bfloat16)
    new = torch.randn(4, 1, 1, 576, device="cuda").to(case.dtype)
    case.arguments |= {"k": new, "v_cache": case.arguments["k_cache"][..., :512]}
    assert_right(latent(with_eight_bits(case, dtype, kind, kind, torch.Generator().manual_seed(0))))


@pytest.mark.parametrize("page_size", [None, 1, 16, 64, 48])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "queries"), [(1, 1), (16, 1), (20, 2), (128, 1), (8, 16)])
def test_rows_of_656_bytes(heads: int, queries: int, dtype: torch.dtype, page_size: int | None) -> None:
    """Read in words, and a copy in float32."""
    case = wide_case(heads, queries, dtype, page_size)
    case.arguments["k"] = torch.randn(4, 1, queries, 576, device="cuda").to(dtype)
    assert_right(packed_rows(case))
    if dtype is torch.float16:
        case = wide_case(heads, queries, torch.float32, page_size)
        assert_right(packed_rows(case))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("heads", [16, 32, 128])
def test_every_candidate_of_656_bytes(heads: int, seed: int) -> None:
    fast_path.forget()
    with forced(support, number(seed)):
        assert_right(packed_rows(wide_case(heads)))
    fast_path.forget()


def test_random_problems() -> None:
    """Of any width, with all features."""
    for seed in range(60):
        function = ("attention_varlen", "attention_with_kvcache")[seed % 2]
        case = latent(random_case(seed, device="cuda", dtypes=DTYPES, function=function))
        if case.arguments["q"].shape[-1] <= 512:
            assert_right(case)


def test_prefill_over_rows() -> None:
    """Absorbed, with more rows than a tile has, packed."""
    q = torch.randn(300, 16, 576, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(300, 1, 576, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    case = Case("attention_varlen", {"q": q, "k": k, "v": k[..., :512], "cu_seqlens_q": offsets, "scale": 0.07})
    case.arguments |= {"cu_seqlens_k": offsets, "causal": True}
    assert_right(latent(case))


def test_captured_and_replayed() -> None:
    """A CUDA graph sees what lengths, pages and rows are when it is replayed; it appends each time."""
    case = wide_case(16)
    call = case.arguments | {"k": torch.randn(4, 1, 1, 576, device="cuda", dtype=torch.bfloat16)}
    out = torch.empty(4, 16, 1, 512, device="cuda", dtype=torch.bfloat16)

    def step() -> Tensor:
        return flashtile.attention_with_kvcache(**call, out=out)

    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    call["cache_seqlens"].add_(1)
    call["k"].normal_()
    graph.replay()
    torch.cuda.synchronize()
    found = out.clone()
    assert torch.equal(found, step())
    assert not found.isnan().any()
