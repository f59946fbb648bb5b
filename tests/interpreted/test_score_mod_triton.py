"""score_mod in the Triton kernels, in Triton's interpreter: every operation, layout and kind of gradient."""

import math
import os
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import triton.language as tl
from checking import dense_case
from programs import INTEGERS, PAIRS, REALS
from torch import Tensor
from variants import VARIANTS

from flashtile.backend.gpu import replay
from flashtile.backend.gpu.captured import captured_pointers, captured_scalars
from flashtile.backend.gpu.formula import loads
from flashtile.backend.triton.kernels import exact_sum
from flashtile.backend.triton.kernels.kernel import Captured, Pointer, kernel, with_captured
from flashtile.backend.triton.launch.formulas import device_function
from flashtile.backend.triton.launch.gradients import new_sums, rounded_sums
from flashtile.dispatch import fast_path
from flashtile.expression.formula import Formula, formula_of
from flashtile.testing.case import Case, ScoreFunction
from flashtile.testing.oracle import solve
from flashtile.testing.score_functions import (
    batch_offset_where_even,
    distance_table,
    relative_position,
    temperature,
    tempered_table,
)
from flashtile.testing.tolerance import compare

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities that the contract allows
]


@kernel
def tile_kernel(scores: Pointer, results: Pointer, captured: Captured, score_mod: tl.constexpr, LOAD: tl.constexpr):
    """Results for a tile `[16, 16]`: the new score, then the derivative and position of a load, or the derivative."""
    rows, keys = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    at = rows * 16 + keys
    found = score_mod(tl.load(scores + at), 0, tl.program_id(0) + 2, rows, keys, captured)
    tl.store(results + at, found[0])
    tl.store(results + 256 + at, tl.broadcast_to(found[1], [16, 16]))
    if LOAD:
        tl.store(results + 512 + at, tl.broadcast_to(found[2], [16, 16]).to(tl.float32))


def results_of(fn: Any, scores: Tensor, tensors: tuple[Tensor, ...], load: int | None, accurate: bool) -> Tensor:
    traced = formula_of(fn, tensors)
    assert isinstance(traced, tuple)
    function = device_function(traced[0], accurate=accurate, partial=load is None, load=load).function
    results = torch.full((3, 16, 16), -7.0)
    launched = with_captured(tile_kernel, tuple(x.dim() for x in tensors))[(1,)]
    arguments = {
        name: x if isinstance(x, Tensor) else x.describe(x.base, x.given)
        for name, x in captured_pointers(tensors).items()
    }
    launched(
        scores=scores,
        results=results,
        score_mod=function,
        LOAD=load is not None,
        **arguments,
        **captured_scalars(tensors),
    )
    return results


def everything(
    score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, weight: Tensor, table: Tensor, even: Tensor
) -> Tensor:
    result = weight[h] * score + torch.where(even[j], table[h, i % 7], 0.5)
    for _, real in REALS:
        result = result + real(score)
    for _, pair in PAIRS:
        result = result + pair(score, score * 0.5 + 0.1)
    for n, (_, integer) in enumerate(INTEGERS):
        result = result + 0.01 * (n + 1) * integer(i, j) + integer(i - 3, h + 1) * 0.1
    return result


@pytest.mark.parametrize("accurate", [True, False])
def test_operations(accurate: bool) -> None:
    torch.manual_seed(0)
    scores = torch.randn(16, 16)
    tensors = (torch.randn(4, dtype=torch.float16), torch.randn(7, 4).t(), torch.rand(16) > 0.5)
    found = results_of(everything, scores, tensors, None, accurate)
    wide = scores.double().requires_grad_()
    indices = (torch.tensor(0), torch.tensor(2), torch.arange(16)[:, None], torch.arange(16)[None, :])
    expected = everything(wide, *indices, tensors[0].double(), tensors[1].double(), tensors[2])
    [partial] = torch.autograd.grad(expected.sum(), wide)
    torch.testing.assert_close(found[0], expected.float(), rtol=2e-6 if accurate else 2e-5, atol=1e-5)
    torch.testing.assert_close(found[1], partial.float(), rtol=2e-6 if accurate else 2e-5, atol=1e-5)


def test_elements_outside_of_a_tensor() -> None:
    """They are NaN, and have no position; a negative index counts from the end."""
    scores, table = torch.zeros(16, 16), torch.randn(2, 5).t()[:, :1]
    found = results_of(lambda s, b, h, i, j, x: s + x[i - j, 0], scores, (table,), 0, True)
    index = torch.arange(16)[:, None] - torch.arange(16)
    index = torch.where(index < 0, index + 5, index)
    inside = (index >= 0) & (index < 5)
    expected = torch.where(inside, table[index.clamp(0, 4), 0], math.nan)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found[2], torch.where(inside, index, -1).float())


def test_exponentials_of_any_number() -> None:
    x = torch.tensor([0, -0.0, 88.7, -87, -1e-30, 89, 1e30, -1e30, math.inf, -math.inf, math.nan, 50, -50, 1, -1, 0.3])
    scores = x.expand(16, 16).contiguous()
    found = results_of(lambda s, b, h, i, j: torch.exp(s), scores, (), None, True)[0, 0]
    torch.testing.assert_close(found, x.double().exp().float(), rtol=4e-7, atol=1.2e-38, equal_nan=True)


@kernel
def sum_kernel(x: Pointer, positions: Pointer, sums: Pointer):
    n = tl.arange(0, 64)
    exact_sum.add(sums, tl.load(positions + n), tl.load(x + n), n >= 0)


def test_exact_sums() -> None:
    """Also of numbers that cancel, of any size, and of infinities."""
    torch.manual_seed(0)
    x = (torch.randn(64) * torch.exp2(torch.randint(-140, 120, (64,)).float())).float()
    x[1::2] = -x[::2]
    x[1], x[2:8] = 1e-45, torch.tensor([math.inf, 1, math.inf, -math.inf, math.nan, 3])
    positions = torch.arange(64) // 2 % 4
    positions[2:8] = torch.tensor([4, 4, 5, 5, 6, 6])
    sums = new_sums(torch.empty(7))
    sum_kernel[(1,)](x=x, positions=positions, sums=sums)
    expected = [math.fsum(x[positions == n].tolist()) if n < 4 else None for n in range(7)]
    expected[4:] = [math.inf, math.nan, math.nan]
    assert expected[0] == float(x[0]) + 2.0**-149
    torch.testing.assert_close(
        rounded_sums(torch.empty(7), sums), torch.tensor(expected), rtol=0, atol=0, equal_nan=True
    )


def assert_right(case: Case) -> None:
    wrong = [str(x) for x in compare(case.run("triton"), case, solve(case)) if not x.ok]
    assert not wrong, "\n".join([case.description, *wrong])


def near_log(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, weight: Tensor) -> Tensor:
    return score + weight[h] * torch.log((i - j).clamp(min=0) + 1)


def undefined_where_hidden(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, weight: Tensor) -> Tensor:
    """As `near_log`; NaN for the keys that causal hides, and so is each derivative."""
    return score + weight[h] * torch.log(i - j + 1)


def by_row(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, weight: Tensor) -> Tensor:
    return torch.where(i != 1, score * weight[i], -math.inf)  # a row that sees nothing


def by_key(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, weight: Tensor) -> Tensor:
    return score + weight[j, h]


def squared(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return -0.5 * score.square()  # -inf of -inf, with an infinite derivative


def weighted_square(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, weight: Tensor) -> Tensor:
    return -torch.abs(weight[h]) * score.square()


TENSORS: dict[Any, tuple[tuple[int, ...], ...]] = {
    tempered_table: ((4,), (4, 17)),
    batch_offset_where_even: ((1, 4),),
    near_log: ((4,),),
    undefined_where_hidden: ((4,),),
    by_row: ((18,),),
    by_key: ((21, 4),),
    distance_table: ((4, 17),),
    relative_position: ((4,),),
    temperature: ((4,),),
    squared: (),
    weighted_square: ((4,),),
}


def score_function(fn: Any) -> ScoreFunction:
    generator = torch.Generator().manual_seed(0)
    return ScoreFunction(fn, tuple(torch.randn(shape, generator=generator) for shape in TENSORS[fn]))


@pytest.mark.parametrize("fn", [by_row, by_key, distance_table], ids=lambda fn: fn.__name__)
def test_gradients(fn: Any) -> None:
    """The gradient of a tensor that is indexed by rows, keys and pairs."""
    seqlen_k = 21 if fn is by_key else 18
    sizes = {"batch": 1, "num_heads_q": 4, "num_heads_kv": 2, "seqlen_q": 18, "seqlen_k": seqlen_k}
    assert_right(dense_case(**sizes, causal=True, score_mod=score_function(fn)))


def test_hidden_pairs_may_be_undefined() -> None:
    results = []
    for fn in (near_log, undefined_where_hidden):
        case = dense_case(batch=1, num_heads_q=4, seqlen_k=7, causal=True, score_mod=score_function(fn))
        results.append(case.run("triton"))
        if fn is near_log:
            assert_right(case)
    for name, x in results[0].items():
        assert torch.equal(x, results[1][name]), name


@pytest.mark.parametrize("seqlen_k", [9, 40])  # of one kernel for all gradients, or several
@pytest.mark.parametrize("fn", [squared, weighted_square], ids=lambda fn: fn.__name__)
def test_a_row_of_minus_infinity_alone_passes_no_gradient(fn: Any, seqlen_k: int) -> None:
    """Not 0 times an infinite derivative, by the score or by a captured tensor."""
    bias = torch.zeros(1, 1, 7, seqlen_k)
    bias[0, 0, 1] = -torch.inf
    assert_right(dense_case(batch=1, num_heads_q=4, seqlen_k=seqlen_k, bias=bias, score_mod=score_function(fn)))


def test_after_every_other_feature() -> None:
    features = {"softcap": 2.0, "bias": torch.randn(1, 4, 7, 9), "alibi_slopes": torch.rand(4), "sinks": torch.randn(4)}
    mod = score_function(tempered_table)
    assert_right(
        dense_case(batch=1, num_heads_q=4, num_heads_kv=2, **features, dropout_p=0.3, dropout_seed=3, score_mod=mod)
    )


@pytest.mark.parametrize("name", ["packed", "paged"])
def test_packed_sequences(name: str) -> None:
    case = replace(VARIANTS[name], dtype=torch.float16, head_dim=16, heads=(4, 2)).case(2, "cpu", (1, 17, 20))
    case.arguments["score_mod"] = score_function(temperature if name == "packed" else relative_position)
    assert_right(case)


def test_splits_of_packed_heads_in_a_cache() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 3, 16, generator=generator)
    k, v = (torch.randn(1, 2, 67, 16, generator=generator) for _ in range(2))
    lengths = torch.tensor([67], dtype=torch.int32)
    arguments = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths, "num_splits": 3, "causal": True}
    mod = score_function(distance_table)
    assert_right(Case("attention_with_kvcache", arguments | {"score_mod": mod}, q, forward_only=True))


def test_every_load_of_a_formula_has_a_gradient() -> None:
    traced = formula_of(tempered_table, (torch.zeros(4), torch.zeros(4, 17)))
    assert isinstance(traced, tuple)
    assert isinstance(traced[0], Formula)
    assert [load.tensor for load in loads(traced[0])] == [0, 1]


def test_a_call_with_other_tensors_is_replayed() -> None:
    """Captured tensors are arguments of the recorded launches."""
    fast_path.forget()
    sizes = {"batch": 1, "num_heads_q": 4, "seqlen_q": 3, "seqlen_k": 5}
    case = dense_case(**sizes, score_mod=score_function(temperature))
    with mock.patch("flashtile.call.device.host_readable", return_value=False):
        for _ in range(2):
            case.run("triton")
        other = dense_case(**sizes, seed=1, score_mod=ScoreFunction(temperature, (torch.rand(4),)))
        with mock.patch.object(replay, "Recorder", side_effect=AssertionError("not replayed")):
            assert_right(other)
    fast_path.forget()
