"""Forward mode on a GPU: `pytest -m gpu tests/backend/triton/test_tangents_gpu.py`."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
from variants import VARIANTS

import flashtile
from flashtile.as_arch import ARCH_VARIABLE
from flashtile.backend.triton.plan import candidates
from flashtile.backend.triton.tile_config import KernelConfig
from flashtile.bench.allocation import live_and_peak_bytes
from flashtile.dispatch import fast_path, planner
from flashtile.testing.case import Case
from flashtile.testing.generate import random_case
from flashtile.testing.moving import moving
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
PROBLEMS = 4  # of each variant
TILES = [
    KernelConfig(*tile)
    for tile in ((64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 3), (64, 32, 8, 2), (64, 32, 4, 2), (32, 32, 8, 2))
]
Tensors = tuple[torch.Tensor, ...]


def failures(case: Case, backend: str = "triton") -> list[str]:
    with poisoned_allocation(), flashtile.calls() as counts:
        results = {key: x.cpu() for key, x in case.run(backend).items()}
    assert [(row.direction, row.backend) for row in counts.rows] == [("tangents", "triton")], str(counts)
    return [f"{case.description}\n  {x}" for x in compare(results, case, solve(case)) if not x.ok]


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_within_the_bound(name: str) -> None:
    cases = [VARIANTS[name].case(seed, "cuda") for seed in range(PROBLEMS)]
    assert not [x for case in cases for x in failures(moving(case))]


@pytest.mark.filterwarnings("ignore::flashtile.errors.AttentionWarning")  # of functions that cannot be traced
@pytest.mark.parametrize("seed", range(24))
def test_random_problems_are_within_the_bound(seed: int) -> None:
    function = ("attention", "attention_varlen")[seed % 2]
    case = moving(random_case(seed, device="cuda", dtypes=(torch.bfloat16, torch.float16), function=function))
    with flashtile.calls() as counts:
        results = {key: x.cpu() for key, x in case.run().items()}
    assert len(counts.rows) == 1, str(counts)
    wrong = [str(x) for x in compare(results, case, solve(case)) if not x.ok]
    assert not wrong, "\n".join([case.description, *wrong])


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_tile(tile: KernelConfig, head_dim: int) -> None:
    """Odd sizes, groups, and rows of many blocks."""
    q, k, v = made(1, 4, 700, 1111, head_dim, heads_kv=2)
    case = moving(Case("attention", {"q": q, "k": k, "v": v, "causal": True}, forward_only=True))
    fast_path.forget()
    with mock.patch.object(candidates, "tangent_tiles", return_value=(tile,)):
        try:
            assert not failures(case)
        except Exception as error:  # a tile that is too large for the chip's memory
            if "out of resource" not in str(error):
                raise
            pytest.skip(str(error))
        finally:
            fast_path.forget()


@pytest.mark.skipif(os.environ.get(ARCH_VARIABLE) is None, reason=f"for {ARCH_VARIABLE}=sm_80")
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_by_mma(name: str) -> None:
    """By the kernel for chips with mma.sync, where it takes the call."""
    plain = candidates.tangent_tiles

    def tiles(*given: Any) -> tuple[KernelConfig, ...]:
        return tuple(x for x in plain(*given) if x.mma)[:1] or plain(*given)

    fast_path.forget()
    with mock.patch.object(candidates, "tangent_tiles", tiles):
        cases = [VARIANTS[name].case(seed, "cuda") for seed in range(PROBLEMS)]
        assert not [x for case in cases for x in failures(moving(case))]
    fast_path.forget()


@pytest.mark.parametrize("names", [("q",), ("k",), ("v",), ("q", "k"), ("q", "v")])
def test_some_inputs_move(names: tuple[str, ...]) -> None:
    q, k, v = made(2, 4, 333, 257, 64)
    case = Case("attention", {"q": q, "k": k, "v": v, "causal": "top_left"}, forward_only=True)
    assert not failures(moving(case, names))


@pytest.mark.parametrize("num_splits", [2, 7, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_programs_share_the_keys_of_a_tile(head_dim: int, num_splits: int) -> None:
    """Some have no block: rows see no key beyond the window, and there are fewer blocks than splits."""
    q, k, v = made(1, 4, 300, 1111, head_dim, heads_kv=2)
    options = {"q": q, "k": k, "v": v, "num_splits": num_splits, "window": (500, 0)}
    assert not failures(moving(Case("attention", options, forward_only=True)))
    options["bias"] = torch.randn(1, 4, 300, 1112, device="cuda", dtype=torch.bfloat16)[..., :1111]
    assert not failures(moving(Case("attention", options, forward_only=True)))


def test_long_rows() -> None:
    q, k, v = made(1, 1, 64, 2**17, 64)
    assert not failures(moving(Case("attention", {"q": q, "k": k, "v": v}, forward_only=True)))


def test_nan_in_a_key_stays_in_the_rows_that_see_it() -> None:
    q, k, v = made(1, 2, 130, 200, 64)
    k[:, :, 150] = torch.nan
    assert not failures(moving(Case("attention", {"q": q, "k": k, "v": v, "causal": True}, forward_only=True)))


def made(batch: int, heads: int, rows: int, keys: int, head_dim: int, heads_kv: int | None = None) -> Tensors:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (batch, heads, rows, head_dim), *[(batch, heads_kv or heads, keys, head_dim)] * 2
    return tuple(torch.randn(x, device="cuda", dtype=torch.bfloat16, generator=generator) for x in shapes)


def along(*tensors: torch.Tensor, **options: Any) -> Any:
    return torch.func.jvp(lambda *x: flashtile.attention(*x, **options), tensors, tensors)


def test_memory_is_linear() -> None:
    """Results alone: out, lse and their tangents, and no copy of an input."""
    q, k, v = made(1, 8, 16384, 16384, 64)
    left, peak = live_and_peak_bytes(lambda: along(q, k, v, causal=True), q.device)
    assert left <= 2.2 * q.numel() * 2
    assert peak - left <= 2**20 * 4


def test_a_captured_graph_repeats_it() -> None:
    q, k, v = made(2, 4, 512, 512, 64)
    expected = along(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = along(q, k, v)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_backward_through_the_results_is_one_pass_of_a_kernel() -> None:
    """MeanFlow's loss, whose tangent is a constant."""
    q, k, v = made(2, 4, 512, 512, 64)
    leaf = q.clone().requires_grad_()
    with flashtile.calls() as counts:
        out, dout = torch.func.jvp(lambda q: flashtile.attention(q, k, v), (leaf,), (q,))[:2]
        (out - dout.detach()).square().sum().backward()
    assert [row.direction for row in counts.rows] == ["tangents", "backward"]
    assert all(row.backend in ("triton", "hopper") and row.calls == 1 for row in counts.rows)


def test_repeats_are_bitwise_equal() -> None:
    q, k, v = made(2, 4, 700, 700, 64)
    first = along(q, k, v, causal=True)
    for _ in range(20):
        assert all(torch.equal(x, y) for x, y in zip(along(q, k, v, causal=True), first, strict=True))


def test_autocast_and_checkpoint() -> None:
    q, k, v = (x.float() for x in made(1, 2, 130, 130, 64))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out, dout = along(q, k, v)
    assert out.dtype is dout.dtype is torch.bfloat16
    expected = along(*(x.bfloat16() for x in (q, k, v)))
    assert torch.equal(out, expected[0])
    assert torch.equal(dout, expected[1])


def test_of_a_layer_compiled_and_recorded() -> None:
    """nn.Attention by functional_call, in a CUDA graph, around torch.compile, and trained through the results."""
    layer = flashtile.nn.Attention(128, 2, causal=True, device="cuda", dtype=torch.bfloat16)
    parameters = {name: x.detach() for name, x in layer.named_parameters()}
    inputs = tuple(torch.randn(2, 300, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def along(of: Any) -> Tensors:
        network = lambda x: torch.func.functional_call(of, parameters, (x,))  # noqa: E731
        return torch.func.jvp(network, inputs[:1], inputs[1:])  # type: ignore[no-any-return]

    with flashtile.calls() as counts:
        expected = along(layer)
    assert [(row.direction, row.backend) for row in counts.rows] == [("tangents", "triton")]
    for x, y in zip(along(torch.compile(layer)), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        along(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = along(layer)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_what_no_kernel_takes_is_tiled_with_one_warning() -> None:
    q, k, v = (x.double() for x in made(1, 2, 33, 33, 64))
    planner._warn_once.cache_clear()
    fast_path.forget()
    with flashtile.calls() as counts:
        with pytest.warns(flashtile.AttentionWarning, match="forward mode"):
            along(q, k, v)
        along(q, k, v)  # a second warning would be an error, by pytest's settings
    assert [(row.direction, row.backend, row.calls) for row in counts.rows] == [("tangents", "tiled", 2)]
