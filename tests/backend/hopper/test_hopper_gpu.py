"""The Hopper backend on a GPU: `pytest -m gpu tests/backend/hopper/test_hopper_gpu.py`.

A barrier that is never signaled hangs: a test that takes too long ends the process and prints the stack.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import large_terms
import pytest
import torch
from forced import first, forced, number
from hopper_variants import LONGER, VARIANTS, case_of, tiles_of, with_tiles

import flashtile
from flashtile.backend.hopper import support
from flashtile.backend.hopper.launch import fused_backward
from flashtile.backend.hopper.plan import candidates
from flashtile.dispatch import fast_path
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(support.unusable() is not None, reason=f"{support.unusable()}"),
    pytest.mark.usefixtures("watchdog"),
]
PROBLEMS = 8  # of each variant


@pytest.mark.parametrize("name", VARIANTS)
def test_random_problems_are_within_the_bound(name: str) -> None:
    check_random_problems(name)


@pytest.mark.parametrize(
    "name", ["full 32", "full 64", "causal 64", "window 64", "packed sinks 64", "causal 80", "causal 96", "packed 96"]
)
def test_three_warpgroups(name: str) -> None:
    with with_tiles(tiles_of(3)):
        check_random_problems(name)


@pytest.mark.parametrize("name", ["full 64", "packed 64", "full 128", "causal 128"])
def test_short_blocks_of_three_warpgroups(name: str) -> None:
    with with_tiles(tiles_of(3, block_n=64)):
        check_random_problems(name)


@pytest.mark.parametrize(
    "name", ["full 64", "causal 64", "grouped heads 64", "full 128", "causal 80", "causal 96", "grouped heads 96"]
)
def test_late_dq(name: str) -> None:
    def adds_late(config: Any) -> bool:
        return config.late_dq is not None

    with mock.patch.object(candidates, "DQ_LENGTH", 129), forced(support, backward=first(where=adds_late)):
        check_random_problems(name, lengths=[n for n in LONGER if n >= 129])


@pytest.mark.parametrize("name", VARIANTS)
def test_all_candidates_give_the_same_results(name: str) -> None:
    for seed in range(0, 20, 5):
        with forced(support, number(seed), number(seed)):
            check_random_problems(name, seeds=(seed,))


def test_last_wave() -> None:
    """Eleven programs have parts of each of the last 12 of 144 blocks of keys, on 132 multiprocessors."""
    variant = replace(VARIANTS["full 128"], heads=(16, 16), seqlen_q=1100, seqlen_k=1100)
    case = variant.case(2, "cuda")
    launch = fused_backward.FusedBackward.launch_last_wave
    with (
        forced(support, backward=first(last_splits=11)),
        mock.patch.object(fused_backward.FusedBackward, "launch_last_wave", autospec=True, side_effect=launch) as wave,
    ):
        results = {key: x.cpu() for key, x in case.run("hopper").items()}
    assert wave.call_count == 1
    wrong = [str(x) for x in compare(results, case, solve(case)) if not x.ok]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(autouse=True)
def other_plans() -> Iterator[None]:
    fast_path.forget()
    yield
    fast_path.forget()


def check_random_problems(name: str, seeds: Sequence[int] = range(PROBLEMS), lengths: Sequence[int] = LONGER) -> None:
    fast_path.forget()
    failures = []
    for seed in seeds:
        case = case_of(name, seed, "cuda", tuple(lengths))
        if case.arguments.get("max_seqlen_q", LONGER[0]) < LONGER[0]:  # only zero-length sequences
            continue
        with poisoned_allocation():
            results = {key: x.cpu() for key, x in case.run("hopper").items()}
        failures += [f"{case.description}\n  {x}" for x in compare(results, case, solve(case)) if not x.ok]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", ["causal 64", "full 128", "sinks 128"])
def test_nan_and_infinite_keys(name: str) -> None:
    case = replace(case_of(name, 1, "cuda", (130, 200)), forward_only=True)
    k = case.arguments["k"].clone()
    k[0, 0, 70, 3], k[0, 1, 5, 7], k[-1, -1, 100, 1] = torch.nan, torch.inf, -torch.inf
    k[-1, 0, :, 2] = torch.nan
    case.arguments["k"] = k
    results = {key: x.cpu() for key, x in case.run("hopper").items()}
    wrong = [str(x) for x in compare(results, case, solve(case)) if not x.ok]
    assert not wrong, "\n".join(wrong)


def test_expanded_keys() -> None:
    q = torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 1, 300, 64, device="cuda", dtype=torch.bfloat16).expand(2, 4, 300, 64) for _ in range(2))
    out = flashtile.attention(q, k, v, backend="hopper")
    assert torch.equal(out, flashtile.attention(q, k.contiguous(), v.contiguous(), backend="hopper"))


def test_repeats_are_bitwise_equal() -> None:
    for shape in ((2, 5, 700, 64), (3, 3, 513, 128), (1, 16, 2048, 128)):
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        first = flashtile.attention(q, k, v, causal=True, backend="hopper")
        for _ in range(100):
            assert torch.equal(first, flashtile.attention(q, k, v, causal=True, backend="hopper"))


def test_gradients_repeat_bitwise() -> None:
    """More programs than SMs, several heads at a time. dk and dv repeat without deterministic=True."""
    dense = (((2, 5, 700, 64), True), ((3, 24, 1025, 128), True), ((2, 8, 1500, 128), False), ((2, 8, 1000, 256), True))
    for shape, causal in dense:
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        for deterministic, inputs in ((True, (q, k, v)), (False, (k, v))):
            out = flashtile.attention(q, k, v, causal=causal, deterministic=deterministic, backend="hopper")
            dout = torch.randn_like(out)
            first = torch.autograd.grad(out, inputs, dout, retain_graph=True)
            for _ in range(30):
                repeat = torch.autograd.grad(out, inputs, dout, retain_graph=True)
                assert all(map(torch.equal, first, repeat))


@pytest.mark.parametrize("name", ["sum", "transposed", "every second feature", "off by one"])
def test_strides_of_dout(name: str) -> None:
    q, k, v = (torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = flashtile.attention(q, k, v, causal=True, backend="hopper")
    wide = torch.randn(2, 4, 200, 129, device="cuda", dtype=torch.bfloat16)
    dout = {
        "sum": torch.ones((), device="cuda", dtype=torch.bfloat16).expand(out.shape),
        "transposed": torch.randn(2, 200, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2),
        "every second feature": wide[..., :128:2],
        "off by one": wide[..., 1:65],
    }[name]
    gradients = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    expected = torch.autograd.grad(out, (q, k, v), dout.contiguous())
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize(("head_dim", "dtype"), [
    (64, torch.bfloat16), (128, torch.bfloat16), (192, torch.bfloat16), (64, torch.float32),
])  # fmt: skip
def test_captured_calls_are_replayed(head_dim: int, dtype: torch.dtype) -> None:
    """Three calls in a row, whose kernels overlap."""
    given = {"device": "cuda", "dtype": dtype}
    q, k, v = (torch.randn(1, 12, 2300, head_dim, requires_grad=True, **given) for _ in range(3))
    dout = torch.randn_like(q)

    def run() -> tuple[torch.Tensor, ...]:
        out = flashtile.attention(q, k, v, backend="hopper")
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [run() for _ in range(3)]
    for _ in range(3):
        with torch.no_grad():
            for x in (q, k, v):
                x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        expected = run()
        for results in captured:
            assert torch.equal(results[0], expected[0])
            for x, y in zip(results, expected, strict=True):  # sums over programs come in any order
                torch.testing.assert_close(x, y, atol=0.01 * y.abs().max().item(), rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("form", ["bias", "split", "score_mod"])
def test_a_large_term_in_all_scores_of_rows(form: str, width: int, dtype: torch.dtype) -> None:
    """Up to 128 features one kernel has all gradients, above it two."""
    for term in large_terms.TERMS:
        given = [x.cuda() for x in large_terms.inputs(term, 300, 600, width, (dtype, torch.float32))]
        assert large_terms.failures(form, "hopper", *given, needs_bias=False) == [], term


@pytest.mark.parametrize("width", [32, 64, 80, 96, 128])
def test_a_large_term_in_tiles_of_a_bias(width: int) -> None:
    for term in (-1e4, -1e9, torch.finfo(torch.bfloat16).min, 1e6):
        given = [x.cuda() for x in large_terms.inputs(term, 300, 600, width, (torch.bfloat16, torch.bfloat16))]
        assert large_terms.failures("bias", "hopper", *given, needs_bias=False) == [], term


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_the_second_gpu_while_the_first_is_current() -> None:
    here = [torch.randn(2, 4, 300, 64, device="cuda:0", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    there = [x.detach().to("cuda:1").requires_grad_() for x in here]
    results = []
    for inputs in (here, there):
        with torch.cuda.device(0):
            out = flashtile.attention(*inputs, causal=True, backend="hopper")
            results.append((out, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
    for x, y in zip(*results, strict=True):
        assert y.device.index == 1
        assert torch.equal(x.cpu(), y.cpu())
