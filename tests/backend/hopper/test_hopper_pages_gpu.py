"""Keys in pages in the Hopper kernels on a GPU: `pytest -m gpu tests/backend/hopper/test_hopper_pages_gpu.py`.

A barrier that is never signaled hangs: a test that takes too long ends the process and prints the stack.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_cases import CASES, Paged, with_missing_pages
from torch import Tensor

import flashtile
from flashtile.backend.hopper import support
from flashtile.testing.case import Case
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(support.unusable() is not None, reason=f"{support.unusable()}"),
    pytest.mark.usefixtures("watchdog"),
]
LONG = {  # several blocks for each warpgroup, and the configurations of long sequences
    "16": Paged(16, 128, heads=(8, 2), queries=150, keys=(1050, 999, 517)),
    "64, three warpgroups": Paged(64, 64, heads=(8, 2), queries=(300, 64, 1), keys=(1050, 999, 1500)),
    "few rows": Paged(16, 128, heads=(8, 2), queries=4, keys=(2050, 1999, 1000)),
}


def wrong(case: Case) -> list[str]:
    with poisoned_allocation():
        results = {key: x.cpu() for key, x in case.run("hopper").items()}
    return [str(x) for x in compare(results, case, solve(case)) if not x.ok]


@pytest.mark.parametrize("name", CASES)
def test_pages(name: str) -> None:
    assert [x for seed in range(3) for x in wrong(CASES[name].case(seed, "cuda"))] == []


@pytest.mark.parametrize("name", LONG)
def test_long_sequences(name: str) -> None:
    assert wrong(LONG[name].case(0, "cuda")) == []


@pytest.mark.parametrize("num_splits", [1, 3])
def test_split_keys(num_splits: int) -> None:
    case = LONG["few rows"].case(1, "cuda")
    assert wrong(replace(case, arguments=case.arguments | {"num_splits": num_splits})) == []


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [8, 64])
def test_pages_that_do_not_exist_hold_no_keys(size: int, packed: bool) -> None:
    case, masked = with_missing_pages(size, "cuda", packed=packed)
    with poisoned_allocation():
        results = {key: x.cpu() for key, x in case.run("hopper").items()}
    assert [str(x) for x in compare(results, masked, solve(masked)) if not x.ok] == []


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_appended_keys(packed: bool, rotary: bool) -> None:
    """By Triton's kernel, and recorded and replayed: as in the Triton backend."""
    batch, size, room, tokens, dim = 3, 16, 320, 70, 128
    generator = torch.Generator("cuda").manual_seed(1)

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    num_pages = batch * room // size + 5
    table = torch.randperm(num_pages, generator=generator, device="cuda")[: batch * room // size].view(batch, -1)
    lengths = torch.tensor([100, 0, 211], dtype=torch.int32, device="cuda")
    given: dict[str, Any] = {"cache_seqlens": lengths, "page_table": table.int(), "causal": True}
    q, k, v = (randn(batch, heads, tokens, dim) for heads in (8, 2, 2))
    if packed:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        given["cu_seqlens_q"] = torch.tensor([0, 50, 150, 210], dtype=torch.int32, device="cuda")
    if rotary:
        angle = randn(room, dim // 2, dtype=torch.float32)
        given |= {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    caches = [randn(num_pages, size, 2, dim) for _ in range(2)]
    found = {}
    for backend in ("triton", "hopper"):
        own = [x.clone() for x in caches]
        for _ in range(3):
            out, lse = flashtile.attention_with_kvcache(
                q, *own, k=k, v=v, return_lse=True, backend=backend, **given
            )  # fmt: skip
        found[backend] = (out, lse, *own)
    (out, lse, *own), (expected_out, expected_lse, *others) = found["hopper"], found["triton"]
    assert all(map(torch.equal, own, others))
    torch.testing.assert_close(out, expected_out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-3)


def test_a_captured_call_reads_its_table_again() -> None:
    case = CASES["24, hdim 96"].case(2, "cuda")
    given = dict(case.arguments)
    flashtile.attention_with_kvcache(**given, backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashtile.attention_with_kvcache(**given, backend="hopper")
    given["cache_seqlens"].copy_(torch.tensor([1, 150, 131]))
    given["page_table"][1, :2] = given["page_table"][1, :2].flip(0)
    graph.replay()
    assert torch.equal(out, flashtile.attention_with_kvcache(**given, backend="hopper"))
