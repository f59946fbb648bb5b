"""score_mods in the CPU kernels: gradients of tensors that tasks share, offsets of 64 bits, dtypes, threads."""

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from checking import BACKENDS, assert_right, dense_case
from torch import Tensor

import flashtile
from flashtile import BackendError
from flashtile.testing.case import Case, ScoreFunction
from flashtile.testing.score_functions import distance_table, tempered_table

arguments, host_backward = (
    importlib.import_module(f"flashtile.backend.cpu.{name}") for name in ("arguments", "host_backward")
)
SIZES: dict[str, Any] = {"num_heads_q": 4, "num_heads_kv": 2, "seqlen_q": 24, "seqlen_k": 600, "head_dim": 4}


def of_distance(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, table: Tensor) -> Tensor:
    """Another element for each row and each key."""
    return s + table[h, i - j + 600]


def of_key(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, x: Tensor) -> Tensor:
    return s * x[j]


def of_pair(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, x: Tensor) -> Tensor:
    return s + x[i, j]


def of_sequence_and_head(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(s + x[b, h])


def of_everything(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, x: Tensor) -> Tensor:
    return s * x[0]


def documents(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, x: Tensor, of: Tensor) -> Tensor:
    """Queries and keys of the same document, by a table of any dtype."""
    return torch.where(of[i] == of[j], s + x[h], -torch.inf)


FUNCTIONS = {
    of_distance: (4, 700), of_key: (600,), of_pair: (24, 600), of_sequence_and_head: (2, 4), of_everything: (1,),
}  # fmt: skip


def case_of(fn: Callable[..., Tensor], *tensors: Tensor, **keywords: Any) -> Case:
    return dense_case(**SIZES | keywords, score_mod=ScoreFunction(fn, tensors))


def tensor_for(fn: Callable[..., Tensor]) -> Tensor:
    return 1 + 0.3 * torch.randn(FUNCTIONS[fn], generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("limit", [2**26, 0], ids=["sums of tasks", "shared sums"])
def test_gradients_of_captured_tensors(fn: Callable[..., Tensor], limit: int) -> None:
    with mock.patch.object(host_backward, "MAX_CAPTURED_BYTES", limit):
        assert_right(case_of(fn, tensor_for(fn), causal=limit == 0), "cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dtypes_and_64_bit_offsets(dtype: torch.dtype) -> None:
    with mock.patch.object(arguments, "LARGEST_OFFSET", 0):
        assert_right(case_of(of_distance, tensor_for(of_distance), dtype=dtype, window=(50, 300)), "cpu")
    table = torch.randn(4, 17, generator=torch.Generator().manual_seed(0))
    assert_right(case_of(distance_table, table.t().contiguous().t().to(dtype), dtype=dtype), "cpu")


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16], ids=str)
def test_tables_of_documents(dtype: torch.dtype) -> None:
    of = (torch.arange(600) // 150 % 2).to(dtype)[::3]  # with a stride
    case = case_of(documents, torch.ones(4), of, seqlen_k=200)
    case.constant = ("score_mod_1",) if dtype.is_floating_point else ()
    assert_right(case, "cpu")


def test_gradients_do_not_depend_on_the_number_of_threads() -> None:
    case = case_of(tempered_table, torch.rand(4), torch.randn(4, 17))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(case.run("cpu"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0][name], x) for other in results[1:] for name, x in other.items())


def test_a_tensor_without_dimensions() -> None:
    score_mod = ScoreFunction(lambda s, b, h, i, j, x: s * x, (torch.tensor(1.3),))
    assert_right(dense_case(score_mod=score_mod), "cpu", *BACKENDS)


def test_a_tensor_that_is_not_read_has_a_gradient_of_zero() -> None:
    q, unread = torch.randn(1, 1, 4, 8), torch.randn(3, requires_grad=True)
    score_mod = flashtile.ScoreMod(lambda s, b, h, i, j, x: 2 * s, (unread,))
    out = flashtile.attention(q, q, q, score_mod=score_mod, backend="cpu")
    assert torch.equal(torch.autograd.grad(out.sum(), unread)[0], torch.zeros(3))


def test_what_cannot_be_traced_is_declined_with_the_reason() -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(BackendError, match=r"cpu: the score_mod cannot be traced: .*lgamma"):
        flashtile.attention(q, q, q, score_mod=lambda s, b, h, i, j: torch.lgamma(s), backend="cpu")
    assert flashtile.explain(q, q, q, score_mod=lambda s, b, h, i, j: torch.lgamma(s)).backend == "tiled"
    assert flashtile.explain(q, q, q, score_mod=lambda s, b, h, i, j: 2 * s).backend == "cpu"
