"""The Hopper kernel of latent rows on a GPU: `pytest -m gpu tests/backend/hopper/test_hopper_latent_gpu.py`.

A barrier that is never signaled hangs: a test that takes too long ends the process and prints the stack.
"""

from typing import Any

import pytest
import torch

import flashtile
from flashtile.backend.hopper import support
from flashtile.testing.case import Case
from flashtile.testing.latent import latent
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(support.unusable() is not None, reason=f"{support.unusable()}"),
    pytest.mark.usefixtures("watchdog"),
]
LENGTHS = (1000, 0, 1, 129, 64)


def latent_case(
    heads: int, queries: int, page_size: int | None, dtype: torch.dtype, spread: float, **more: Any
) -> Case:
    """Decoding over pages in any order; NaN behind the keys."""
    generator = torch.Generator("cuda").manual_seed(heads + queries)
    q = spread * torch.randn(len(LENGTHS), heads, queries, 576, generator=generator, device="cuda")
    k = torch.randn(len(LENGTHS), 1, 1024, 576, generator=generator, device="cuda").to(dtype)
    for b, n in enumerate(LENGTHS):
        k[b, :, n:] = torch.nan
    given: dict[str, Any] = {"q": q.to(dtype), "k_cache": k, "scale": 192**-0.5, "causal": True}
    given["cache_seqlens"] = torch.tensor(LENGTHS, device="cuda").int()
    if page_size is not None:
        pages = k.transpose(1, 2).reshape(-1, page_size, 1, 576)
        order = torch.randperm(len(pages), generator=generator, device="cuda")
        given["k_cache"] = torch.empty_like(pages).index_copy_(0, order, pages)
        given["page_table"] = order.view(len(LENGTHS), -1).int()
    return latent(Case("attention_with_kvcache", given | {"v_cache": given["k_cache"][..., :512]} | more))


@pytest.mark.parametrize("num_splits", [None, 1, 3, 16])
@pytest.mark.parametrize("spread", [1, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "queries", "page_size"), [(16, 1, 64), (128, 1, 64), (128, 2, 128), (20, 3, None), (64, 16, 64)]
)
def test_decoding(
    heads: int, queries: int, page_size: int | None, dtype: torch.dtype, spread: float, num_splits: int | None
) -> None:
    case = latent_case(heads, queries, page_size, dtype, spread, num_splits=num_splits)
    with poisoned_allocation():
        results = {name: x.cpu() for name, x in case.run("hopper").items()}
    assert [str(x) for x in compare(results, case, solve(case)) if not x.ok] == []


def test_pages_that_do_not_exist() -> None:
    """Their keys are not visible, whatever the page has."""
    arguments = {
        name: x for name, x in latent_case(128, 1, 64, torch.bfloat16, 1).arguments.items() if name != "v_cache"
    }
    table, whole = (
        arguments["page_table"].clone(),
        flashtile.attention_with_kvcache(v_cache=None, backend="hopper", **arguments),
    )
    arguments["k_cache"][table[0, 3].long()] = torch.nan
    table[0, 3] = -1
    arguments["page_table"] = table
    out = flashtile.attention_with_kvcache(v_cache=None, backend="hopper", **arguments)
    assert torch.equal(out[1:], whole[1:])
    assert bool(out[0].isfinite().all())
    assert not torch.equal(out[0], whole[0])
