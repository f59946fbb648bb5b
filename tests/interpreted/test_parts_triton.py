"""Products that kernels of backward compute of bfloat16 parts, and those of PyTorch, in Triton's interpreter."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from float32_cases import case_of

from flashtile.backend.triton import called, configs, host_products, launches, score_blocks
from flashtile.backend.triton.configs import KernelConfig, WidthConfigs
from flashtile.backend.triton.split_rows import split_rows
from flashtile.backend.triton.support import interpreted
from flashtile.dispatch import fast_path
from flashtile.testing.case import Case
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")


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
    forward = KernelConfig(16, 16, 4, 1)
    split = forward._replace(precision="bf16x6")
    with (
        mock.patch.object(configs, "INTERPRETER", WidthConfigs(512, forward, split, split)),
        mock.patch.object(launches, "split_rows", side_effect=split_rows) as splits,
    ):
        assert failures(case) == []
    assert splits.call_count == 4  # q, k, v and dout, once for both kernels


@pytest.mark.parametrize("scores", [2**25, 2 * 64 * 128])  # one block, and blocks of two heads and 64 rows
@pytest.mark.parametrize(
    "case",
    [
        case_of((2, 2, 2, 150, 100, 24, 40), transposed=True, values="infinite"),
        case_of((1, 3, 3, 70, 16, 40, 24), scale=-0.2),
        case_of((1, 1, 1, 130, 130, 24, 24), values="far apart"),
        case_of((1, 1, 1, 16, 600, 16, 16), values="equal"),
    ],
    ids=lambda case: case.description,
)
def test_pytorch_multiplies_parts(case: Case, scores: int) -> None:
    with (
        mock.patch.object(score_blocks, "CHUNK", 64),
        mock.patch.object(score_blocks, "SCORES", scores),
        mock.patch.object(configs, "takes_products", return_value=True),
        mock.patch.object(torch, "bmm", bmm(torch.bmm)),
        mock.patch.object(torch, "baddbmm", baddbmm(torch.baddbmm)),
    ):
        assert failures(case) == []


@pytest.mark.parametrize(
    "case",
    [case_of((2, 2, 2, 150, 100, 24, 40), transposed=True, values="infinite"), case_of((1, 3, 3, 70, 16, 40, 24))],
    ids=lambda case: case.description,
)
def test_pytorch_multiplies_whole_numbers(case: Case) -> None:
    """Where one TF32 product is allowed, which on a CPU is exact; in blocks of two heads and 64 rows."""
    with (
        mock.patch.object(score_blocks, "CHUNK", 64),
        mock.patch.object(score_blocks, "SCORES", 2 * 64 * 128),
        mock.patch.object(configs, "takes_products", return_value=True),
        mock.patch.object(host_products, "allows_tf32", return_value=True),
        mock.patch.object(called, "allows_tf32", return_value=True),
        mock.patch.object(torch, "bmm", bmm(torch.bmm)),
        mock.patch.object(torch, "baddbmm", baddbmm(torch.baddbmm)),
    ):
        assert failures(case) == []


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (case_of((2, 2, 2, 150, 100, 24, 40), transposed=True, values="infinite"), torch.bfloat16),
        (case_of((1, 3, 3, 70, 150, 40, 24), scale=-0.2), torch.float16),
        (case_of((1, 1, 1, 16, 600, 16, 16), values="equal"), torch.float16),
    ],
    ids=lambda x: getattr(x, "description", str(x)),
)
def test_pytorch_multiplies_half(case: Case, dtype: torch.dtype) -> None:
    """In blocks of two heads and 64 rows, rows in blocks of 128 keys."""
    arguments = {name: x.to(dtype) if isinstance(x, torch.Tensor) else x for name, x in case.arguments.items()}
    assert case.dout is not None
    with (
        mock.patch.object(score_blocks, "CHUNK", 64),
        mock.patch.object(score_blocks, "SCORES", 2 * 64 * 128),
        mock.patch.object(host_products, "MOST_IN_REGISTERS", 128),
        mock.patch.object(configs, "takes_products", return_value=True),
        mock.patch.object(torch, "bmm", bmm(torch.bmm)),
        mock.patch.object(torch, "baddbmm", baddbmm(torch.baddbmm)),
    ):
        assert failures(Case("attention", arguments, case.dout.to(dtype), case.dlse)) == []


def bmm(multiply: Any) -> Any:
    """Matrix products of bfloat16 numbers with float32 results, which PyTorch has on GPUs only."""
    return lambda x, y, dtype, *, out: multiply(x.to(dtype), y.to(dtype), out=out)


def baddbmm(multiply: Any) -> Any:
    return lambda sums, x, y, dtype, *, out, **factors: multiply(sums, x.to(dtype), y.to(dtype), out=out, **factors)
