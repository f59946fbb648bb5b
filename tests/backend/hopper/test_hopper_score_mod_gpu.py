"""score_mod and mask functions in the Hopper kernels on a GPU:

    pytest -m gpu tests/backend/hopper/test_hopper_score_mod_gpu.py

A barrier that is never signaled hangs: a test that takes too long ends the process and prints the stack.
"""

from dataclasses import replace

import pytest
import torch
from hopper_score_mods import MASK_VARIANTS, PROBLEMS, expected, mask_case, score_mod_case
from hopper_variants import LONGER
from torch import Tensor

import flashtile
from flashtile.backend.hopper import support
from flashtile.testing.case import ScoreFunction
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(support.unusable() is not None, reason=f"{support.unusable()}"),
    pytest.mark.usefixtures("watchdog"),
]
SEEDS = 4  # problems of each


@pytest.mark.parametrize("problem", [*PROBLEMS, *MASK_VARIANTS])
def test_random_problems_are_within_the_bound(problem: str) -> None:
    failures = []
    for seed in range(SEEDS):
        case = (score_mod_case if problem in PROBLEMS else mask_case)(problem, seed, "cuda")
        if case.arguments.get("max_seqlen_q", LONGER[0]) < LONGER[0]:  # only zero-length sequences
            continue
        with poisoned_allocation():
            results = {key: x.cpu() for key, x in case.run("hopper").items()}
        failures += [f"{case.description}\n  {x}" for x in compare(results, case, expected(case)) if not x.ok]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_captured_tensors_come_from_another_backend(deterministic: bool) -> None:
    case = score_mod_case("distance_table, causal 64", 1, "cuda", (200, 300))
    case = replace(case, constant=())
    options = {"deterministic": True} if deterministic else {}
    results = {key: x.cpu() for key, x in case.run("auto", **options).items()}
    assert "dscore_mod_0" in results
    assert [str(x) for x in compare(results, case, expected(case)) if not x.ok] == []


def test_other_tables_and_lengths_compile_nothing() -> None:
    """One kernel for a formula."""
    from triton.runtime.jit import JITFunction  # pyright: ignore[reportMissingImports]

    def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, table: Tensor) -> Tensor:
        return score + 0.5 * table[h, (q_idx - k_idx).clamp(0, 5)]

    def run(seqlen: int, width: int) -> None:
        q, k, v = (
            torch.randn(2, 4, seqlen, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"
        )
        table = torch.randn(4, width, device="cuda")
        out = flashtile.attention(q, k, v, score_mod=flashtile.ScoreMod(bias, (table,)), backend="hopper")
        torch.autograd.grad(out.sum(), (q, k, v))

    compiled = []
    original = JITFunction._do_compile

    def counted(self: JITFunction, *args: object, **kwargs: object) -> object:
        compiled.append(self.fn.__name__)
        return original(self, *args, **kwargs)

    JITFunction._do_compile = counted
    try:
        run(256, 8)
        first = len(compiled)
        for seqlen, width in ((256, 16), (300, 9), (511, 6), (4000, 8)):
            run(seqlen, width)
    finally:
        JITFunction._do_compile = original
    assert first >= 2
    assert compiled[first:] == []


def test_a_captured_call_is_replayed_with_another_table() -> None:
    case = score_mod_case("distance_table, causal 64", 2, "cuda", (300,))
    q, k, v = (case.arguments[name] for name in "qkv")
    score_mod: ScoreFunction = case.arguments["score_mod"]
    table = score_mod.tensors[0].clone()

    def call() -> Tensor:
        return flashtile.attention(
            q, k, v, causal=True, score_mod=flashtile.ScoreMod(score_mod.fn, (table,)), backend="hopper"
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(3):
        table.normal_()
        graph.replay()
        assert torch.equal(out, call())


def test_repeats_are_bitwise_equal() -> None:
    for head_dim in (64, 128):
        q, k, v = (
            torch.randn(2, 8, 1025, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"
        )
        table = torch.randn(8, 257, device="cuda")
        score_mod = flashtile.score_mods.relative_table(table)
        out = flashtile.attention(q, k, v, score_mod=score_mod, deterministic=True, backend="hopper")
        dout = torch.randn_like(out)
        first = (out, *torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
        for _ in range(30):
            repeat = flashtile.attention(q, k, v, score_mod=score_mod, deterministic=True, backend="hopper")
            gradients = torch.autograd.grad(repeat, (q, k, v), dout)
            assert all(map(torch.equal, first, (repeat, *gradients)))
