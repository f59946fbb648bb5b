"""Terms of distances that the CPU kernels read from a table, and gradients of the tensors that the terms read."""

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
from checking import assert_right, dense_case
from torch import Tensor

from flashtile import attention, score_mods
from flashtile.dispatch import fast_path
from flashtile.testing.case import Case, ScoreFunction

distance_table = importlib.import_module("flashtile.backend.cpu.distance_table")
H = 4
BUCKETS = torch.randn(16, H, generator=torch.Generator().manual_seed(0))
SIZES: dict[str, Any] = {"num_heads_q": H, "num_heads_kv": 2, "seqlen_q": 45, "seqlen_k": 70, "head_dim": 16}
T5 = score_mods.t5_buckets(BUCKETS, max_distance=20).fn


def of_both(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, table: Tensor) -> Tensor:
    """The table is read in the term, and outside of it."""
    return T5(score, b, h, q_idx, k_idx, table) * (1 + 0.1 * table[0, h])


def of_log(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, factor: Tensor) -> Tensor:
    """The derivative by the factor is infinite at distance 0, which a mask hides."""
    distance = torch.log((q_idx - k_idx).abs().clamp(max=20))
    return score + factor[h] * (distance + torch.exp(-torch.sqrt(distance.abs() + 1)))


FUNCTIONS = {
    "t5": ScoreFunction(T5, (BUCKETS,)),
    "read twice": ScoreFunction(of_both, (BUCKETS,)),
    "log": ScoreFunction(of_log, (0.2 * BUCKETS[0],)),
}
ROWS, KEYS = torch.arange(45)[:, None], torch.arange(70)
ARGUMENTS: dict[str, dict[str, Any]] = {
    "t5": {"causal": True},
    "read twice": {"mask": torch.rand(2, 1, 45, 70, generator=torch.Generator().manual_seed(1)) > 0.3},
    "log": {"mask": (ROWS != KEYS)[None, None]},
}


def case_of(name: str, dtype: torch.dtype = torch.float32) -> Case:
    function = FUNCTIONS[name]
    function = ScoreFunction(function.fn, tuple(x.to(dtype) for x in function.tensors))
    return dense_case(**SIZES | ARGUMENTS[name], score_mod=function, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["t5", "read twice"])
def test_calls_with_a_table_are_right(name: str, dtype: torch.dtype) -> None:
    with mock.patch.object(distance_table, "term_gradients", wraps=distance_table.term_gradients) as chained:
        assert_right(case_of(name, dtype), "cpu")
    assert chained.called


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_table_changes_no_bit(name: str) -> None:
    """But of the gradients of tensors, which have another order of summation."""
    results = []
    for there in (True, False):
        fast_path.forget()
        found = distance_table.distance_table if there else lambda *_: None
        with mock.patch.object(distance_table, "distance_table", found):
            results.append(case_of(name).run("cpu"))
    fast_path.forget()
    own, other = results
    for key, x in own.items():
        if "score_mod" in key:
            torch.testing.assert_close(x, other[key], atol=1e-4, rtol=1e-4)
        else:
            assert torch.equal(x, other[key]), key


def test_repeated_calls_compute_their_own_tables() -> None:
    """Recorded launches read the table of the tensors of each call."""
    q, k, v = (torch.randn(1, H, 33, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))

    def run(buckets: Tensor, backend: str) -> tuple[Tensor, ...]:
        buckets = buckets.clone().requires_grad_()
        out = attention(q, k, v, score_mod=score_mods.t5_buckets(buckets, max_distance=20), backend=backend)
        return out, *torch.autograd.grad(out.square().sum(), buckets)

    for n in range(4):
        buckets = BUCKETS * (n + 1) / 4
        for own, expected in zip(run(buckets, "cpu"), run(buckets, "tiled"), strict=True):
            torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)
