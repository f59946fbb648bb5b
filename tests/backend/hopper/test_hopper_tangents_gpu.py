"""Forward mode of the Hopper backend on a GPU: `pytest -m gpu tests/backend/hopper/test_hopper_tangents_gpu.py`."""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from hopper_variants import VARIANTS, case_of
from variants import Variant

import flashtile
from flashtile.backend.hopper import support
from flashtile.backend.hopper.plan import tables
from flashtile.backend.hopper.plan.widths import WIDTHS
from flashtile.bench.allocation import live_and_peak_bytes
from flashtile.dispatch import planner
from flashtile.testing.case import Case
from flashtile.testing.moving import moving
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(support.unusable() is not None, reason="no Hopper GPU")]
ALL = ("q", "k", "v")
PROBLEMS = 3  # of each variant


def failures(case: Case) -> list[str]:
    with poisoned_allocation(), flashtile.calls() as counts:
        results = {key: x.cpu() for key, x in case.run("hopper").items()}
    assert [(row.direction, row.backend) for row in counts.rows] == [("tangents", "hopper")], str(counts)
    return [f"{case.description}\n  {x}" for x in compare(results, case, solve(case)) if not x.ok]


def has_kernel(variant: Variant) -> bool:
    head_dims = variant.head_dim, variant.head_dim_v or variant.head_dim
    width = next(pair for pair in WIDTHS if all(d <= n for d, n in zip(head_dims, pair, strict=True)))
    return width in tables.TANGENTS and variant.dtype is not torch.float32 and variant.layout != "paged"


@pytest.mark.parametrize("name", [name for name, x in VARIANTS.items() if has_kernel(x)])
def test_variants_are_within_the_bound(name: str) -> None:
    assert not [x for seed in range(PROBLEMS) for x in failures(moving(case_of(name, seed, "cuda"), ALL))]


@pytest.mark.parametrize(("width", "number"), [(w, n) for w, x in tables.TANGENTS.items() for n in range(len(x))])
def test_every_candidate(width: tuple[int, int], number: int) -> None:
    """Odd sizes, groups, and rows of many blocks."""
    torch.manual_seed(0)
    shapes = {"q": (1, 4, 700, width[0]), "k": (1, 2, 1111, width[0]), "v": (1, 2, 1111, width[1])}
    tensors = {name: torch.randn(x, device="cuda", dtype=torch.bfloat16) for name, x in shapes.items()}
    case = moving(Case("attention", tensors | {"causal": True}, forward_only=True), ALL)
    planner.forget_plans()
    with mock.patch.dict(tables.TANGENTS, {width: tables.TANGENTS[width][number : number + 1]}):
        assert not failures(case)
    planner.forget_plans()


@pytest.mark.parametrize("names", [("q",), ("k",), ("v",), ("q", "k"), ("q", "v"), ("k", "v")], ids="".join)
@pytest.mark.parametrize("width", [96, 128, 256])
def test_some_inputs_move(names: tuple[str, ...], width: int) -> None:
    assert not failures(moving(case_of(f"causal {width}", 1, "cuda"), names))


def test_long_rows() -> None:
    q, k, v = (torch.randn(1, 1, n, 128, device="cuda", dtype=torch.bfloat16) for n in (64, 2**17, 2**17))
    assert not failures(moving(Case("attention", {"q": q, "k": k, "v": v}, forward_only=True), ALL))


def test_memory_and_bits() -> None:
    """Results, and `out` in float32; the same bits each time, and from a captured graph."""
    q, k, v = (torch.randn(1, 8, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def along() -> tuple[torch.Tensor, ...]:
        return torch.func.jvp(  # type: ignore[no-any-return]
            lambda *x: flashtile.attention(*x, causal=True, backend="hopper"), (q, k, v), (q, k, v)
        )

    expected = along()
    left, peak = live_and_peak_bytes(along, q.device)
    assert peak - left <= 4 * q.numel() + 2**22
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = along()
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert all(torch.equal(x, y) for _ in range(20) for x, y in zip(along(), expected, strict=True))
