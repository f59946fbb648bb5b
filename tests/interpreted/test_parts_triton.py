"""Products that kernels of backward compute of bfloat16 parts, and those of PyTorch, in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import large_terms
import pytest
import torch
from float32_cases import case_of
from forced import first, forced

from flashtile.backend.triton import score_blocks, support
from flashtile.backend.triton.launch import backward_launches, called, products
from flashtile.backend.triton.launch.split_rows import split_rows
from flashtile.backend.triton.plan import candidates
from flashtile.backend.triton.tile_config import KernelConfig
from flashtile.call.device import Device
from flashtile.call.problem import Problem
from flashtile.dispatch import fast_path
from flashtile.testing.case import Case, ScoreFunction
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.skipif(not support.interpreted(), reason="needs TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def other_plans() -> Iterator[None]:
    fast_path.forget()
    yield
    fast_path.forget()


def failures(case: Case) -> list[str]:
    return [str(x) for x in compare(case.run("triton"), case) if not x.ok]


@pytest.mark.parametrize(
    "case",
    [
        case_of((1, 4, 2, 37, 50, 24, 40), causal=True),
        case_of((2, 2, 2, 33, 20, 16, 16), transposed=True, values="infinite"),
        case_of((1, 1, 1, 20, 33, 48, 16), softcap=5.0, values="far apart"),
        case_of((1, 1, 1, 16, 600, 16, 16), values="equal"),
    ],
    ids=lambda case: case.description,
)
def test_rows_are_split_ahead_of_backward(case: Case) -> None:
    split = KernelConfig(16, 16, 4, 1, precision="bf16x6")
    with (
        forced(support, backward=first(dkdv=split, dq=split)),
        mock.patch.object(backward_launches, "split_rows", side_effect=split_rows) as splits,
    ):
        assert failures(case) == []
    assert splits.call_count == 4  # q, k, v and dout, once for both kernels


@contextmanager
def by_pytorch(scores: int = 2 * 32 * 64, keys: int = 8192, *, tf32: bool = False) -> Iterator[None]:
    """Products by PyTorch: chunks of 32 rows or keys, blocks of at most so many scores, rows in blocks of `keys`. A row
    is a program of its own, and rows take the time: sizes here are a little more than one chunk or two.
    """
    score_blocks.blocks_of.cache_clear()
    with ExitStack() as patches:
        for name, value in (("CHUNK", 32), ("ROWS", 16), ("SCORES", scores), ("BLOCK_COST", 0), ("KEY_COST", 0)):
            patches.enter_context(mock.patch.object(score_blocks, name, value))
        for name, value in (("MOST_IN_REGISTERS", keys), ("LEAST_WIDTH", 32)):
            patches.enter_context(mock.patch.object(products, name, value))
        if tf32:
            patches.enter_context(mock.patch.object(products, "allows_tf32", return_value=True))
            patches.enter_context(mock.patch.object(called, "allows_tf32", return_value=True))
        patches.enter_context(mock.patch.object(candidates, "multiplies", side_effect=multiplies))
        patches.enter_context(forced(support))
        patches.enter_context(mock.patch.object(torch, "bmm", bmm(torch.bmm)))
        patches.enter_context(mock.patch.object(torch, "baddbmm", baddbmm(torch.baddbmm)))
        patches.enter_context(poisoned_allocation())
        yield
    score_blocks.blocks_of.cache_clear()


def multiplies(problem: Problem, device: Device, *, backward: bool = False) -> bool:
    return backward or problem.dtype is torch.float32


@pytest.mark.parametrize(
    ("case", "scores"),  # one block, or blocks of two heads and 32 rows
    [
        (case_of((1, 2, 2, 75, 50, 24, 40), transposed=True, values="infinite"), 2**25),
        (case_of((2, 2, 2, 38, 50, 24, 40), transposed=True, values="infinite"), 2 * 32 * 64),
        (case_of((1, 3, 3, 35, 16, 40, 24), scale=-0.2), 2 * 32 * 64),
        (case_of((1, 1, 1, 66, 66, 24, 24), values="far apart"), 2**25),
        (case_of((1, 1, 1, 16, 600, 16, 16), values="equal"), 2 * 32 * 64),
        (case_of((1, 6, 2, 36, 70, 16, 24), causal=True, values="outliers"), 2 * 32 * 64),
        (case_of((1, 5, 1, 20, 35, 16, 16), window=(15, 2), softcap=3.0), 32 * 64),
    ],
    ids=lambda x: getattr(x, "description", str(x)),
)
def test_pytorch_multiplies_parts(case: Case, scores: int) -> None:
    with by_pytorch(scores):
        assert failures(case) == []


@pytest.mark.parametrize(
    "case",
    [
        case_of((1, 2, 2, 40, 50, 24, 40), transposed=True, values="infinite"),
        case_of((2, 2, 1, 25, 35, 16, 24), transposed=True, window=(10, 3)),
    ],
    ids=lambda case: case.description,
)
def test_pytorch_multiplies_whole_numbers(case: Case) -> None:
    """Where one TF32 product is allowed, which on a CPU is exact; in blocks of at most two heads and 32 rows."""
    with by_pytorch(2 * 16 * 64, tf32=True):
        assert failures(case) == []


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("form", ["bias", "score_mod"])
def test_a_large_term_in_all_scores_of_rows(form: str, tf32: bool) -> None:
    with by_pytorch(2 * 16 * 64, tf32=tf32):
        assert large_terms.failures(form, "triton", *large_terms.inputs(-1e9, rows=20, keys=70)) == []


def test_a_row_of_minus_infinity_alone_passes_no_gradient() -> None:
    """Not 0 times the infinite derivative of a score_mod."""
    bias = torch.where(torch.arange(20)[:, None] == 1, -torch.inf, torch.zeros(20, 35))[None, None]
    square = ScoreFunction(lambda score, b, h, i, j: -0.5 * score.square())
    with by_pytorch():
        assert failures(case_of((1, 1, 1, 20, 35, 16, 16), bias=bias, score_mod=square)) == []


def pairs(rows: int, keys: int) -> torch.Tensor:
    return torch.rand(1, 1, rows, keys, generator=torch.Generator().manual_seed(1))


DROP = {"dropout_p": 0.3, "dropout_seed": 1}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (case_of((1, 2, 2, 40, 50, 24, 40), transposed=True, values="infinite"), torch.bfloat16),
        (case_of((1, 3, 3, 16, 75, 40, 24), scale=-0.2), torch.float16),
        (case_of((1, 1, 1, 16, 600, 16, 16), values="equal"), torch.float16),
        (case_of((1, 4, 2, 25, 75, 24, 40), causal=True), torch.bfloat16),
        (case_of((1, 3, 1, 40, 20, 24, 16), transposed=True, causal=True, values="outliers"), torch.float16),
        (case_of((1, 2, 2, 40, 35, 16, 24), window=(10, 5), values="equal"), torch.bfloat16),
        (case_of((1, 2, 1, 26, 30, 16, 24), attention_chunk=12, causal=True), torch.float16),
        (case_of((1, 4, 2, 20, 70, 16, 16), mask=pairs(20, 70) > 0.5, sinks=torch.randn(4)), torch.bfloat16),
        (case_of((2, 2, 1, 20, 37, 16, 16), mask=(pairs(2, 37) > 0.5).view(2, 1, 1, 37), causal=True), torch.float16),
        (
            case_of((1, 4, 2, 20, 35, 16, 16), softcap=2.0, bias=pairs(20, 35), window=(30, 5), **DROP),
            torch.bfloat16,
        ),
        (case_of((1, 4, 2, 20, 70, 16, 16), alibi_slopes=pairs(1, 4)[0, 0, 0], causal=True, **DROP), torch.float16),
    ],
    ids=lambda x: getattr(x, "description", str(x)),
)
def test_pytorch_multiplies_half(case: Case, dtype: torch.dtype) -> None:
    """In backward; in blocks of at most two heads of 16 rows and 80 keys, rows in blocks of 64 keys."""
    rows = ("q", "k", "v", "bias")
    arguments = {name: x.to(dtype) if name in rows else x for name, x in case.arguments.items()}
    assert case.dout is not None
    with by_pytorch(2 * 16 * 80, keys=64):
        assert failures(Case("attention", arguments, case.dout.to(dtype), case.dlse)) == []


@pytest.mark.parametrize(
    ("needed", "products", "sums"),  # of forward and backward
    [("bias", 1, 1), ("v", 2, 2), ("k", 3, 2), ("q", 3, 2), ("alibi_slopes", 3, 1)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_the_gradients_that_are_needed(dtype: torch.dtype, needed: str, products: int, sums: int) -> None:
    """One of scores, in float32 in both passes; one with dout, unless for v alone; a sum of each gradient."""
    case = case_of((1, 2, 1, 16, 30, 16, 16), bias=pairs(16, 30), alibi_slopes=pairs(1, 2)[0, 0, 0])
    arguments = {name: x.to(dtype) if name in "qkv" else x for name, x in case.arguments.items()}
    assert case.dout is not None
    case = Case("attention", arguments, case.dout.to(dtype), constant=tuple(case.differentiable().keys() - {needed}))
    with (
        by_pytorch(2**25),
        mock.patch.object(torch, "bmm", side_effect=torch.bmm) as multiply,
        mock.patch.object(torch, "baddbmm", side_effect=torch.baddbmm) as add,
    ):
        assert failures(case) == []
    in_forward, per_sum = (0, 3) if dtype is torch.float32 else (1, 1)  # of parts
    assert (multiply.call_count, add.call_count) == (products - in_forward, (sums - in_forward) * per_sum)


def bmm(multiply: Any) -> Any:
    """Matrix products of bfloat16 numbers with float32 results, which PyTorch has on GPUs only."""
    return lambda x, y, dtype, *, out: multiply(x.to(dtype), y.to(dtype), out=out)


def baddbmm(multiply: Any) -> Any:
    return lambda sums, x, y, dtype, *, out, **factors: multiply(sums, x.to(dtype), y.to(dtype), out=out, **factors)
