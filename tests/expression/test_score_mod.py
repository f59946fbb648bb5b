"""score_mod: what a function is given, what it may read, and what is refused."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checking import BACKENDS, assert_right, dense_case, offsets, tile_size
from torch import Tensor

import flashtile
from flashtile import ArgumentError, ScoreMod
from flashtile.errors import AttentionWarning
from flashtile.testing.case import ScoreFunction

Q, K, V = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)

# What a function is given --------------------------------------------------------------------------------------------


def scores_of(fn: Callable[..., Tensor], backend: str = "tiled") -> Tensor:
    """The final scores of a call whose products are all zero, from out and lse of values that are unit vectors."""
    q, k, v = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8), torch.eye(7).expand(2, 2, 7, 7)
    with tile_size(2, 3, scores=12):
        out, lse = flashtile.attention(q, k, v, score_mod=fn, return_lse=True, backend=backend)
    return out.log() + lse[..., None]


@pytest.mark.parametrize("backend", BACKENDS)
def test_indices(backend: str) -> None:
    """Sequence, query head (not the key's), query and key: int64, global, in this order."""

    def fn(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert all(index.dtype == torch.int64 for index in (b, h, i, j))
        return score + b / 100 + h / 10 + i + 10 * j

    b, h, i, j = (torch.arange(n).view([-1 if d == dim else 1 for d in range(4)]) for dim, n in enumerate((2, 4, 5, 7)))
    # Scores of 60 below the largest are lost in out: compare where they are not.
    found, expected = scores_of(lambda *x: fn(*x) / 20, backend), (b / 100 + h / 10 + i + 10 * j) / 20
    torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_indices_are_local_to_a_packed_sequence(backend: str) -> None:
    q, k, v = torch.zeros(5, 1, 4), torch.zeros(7, 1, 4), torch.randn(7, 1, 4)
    mod = ScoreMod(lambda score, b, h, i, j: score + i + 3 * j + 5 * b)
    arguments = {"score_mod": mod, "return_lse": True, "backend": backend}
    _, lse = flashtile.attention_varlen(q, k, v, offsets(2, 3), offsets(4, 3), **arguments)
    expected = [torch.logsumexp(torch.arange(n) * 3.0, 0) + 5 * b for b, n in enumerate((4, 3))]
    positions = torch.tensor([0, 1, 0, 1, 2])
    sequence = torch.tensor([0, 0, 1, 1, 1])
    torch.testing.assert_close(lse[0], torch.stack(expected)[sequence] + positions)


def test_score_comes_after_softcap_bias_and_alibi_in_the_accumulation_dtype() -> None:
    seen = []

    def fn(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, table: Tensor) -> Tensor:
        seen.append((score.dtype, table.dtype))
        return torch.sinh(score) * score * table

    arguments = {"softcap": 2.0, "bias": torch.randn(1, 2, 7, 9), "alibi_slopes": torch.tensor([0.2, 0.4])}
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        features = {n: x.to(dtype) if isinstance(x, Tensor) else x for n, x in arguments.items()}
        score_mod = ScoreMod(fn, (torch.tensor([0.1], dtype=dtype),))
        seen.clear()
        dense_case(dtype=dtype, forward_only=True, score_mod=score_mod, **features).run("tiled")
        assert seen[-1] == (wide, wide)
        traced = ScoreFunction(lambda s, b, h, i, j, table: s * s * table[0], score_mod.tensors)
        assert_right(dense_case(dtype=dtype, score_mod=traced, **features))


@pytest.mark.parametrize(
    "fn",
    [
        lambda score, b, h, i, j: torch.tensor([0.5]),
        lambda score, b, h, i, j: 0.1 * (i - j),
        lambda score, b, h, i, j: (score > 0).half(),
        lambda score, b, h, i, j: score.detach(),
    ],
    ids=["one number", "of positions", "of another dtype", "without a gradient"],
)
def test_results_that_broadcast_or_ignore_the_score(fn: Callable[..., Tensor]) -> None:
    assert_right(dense_case(score_mod=ScoreFunction(fn)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_function_gives_for_hidden_pairs_is_dropped(backend: str) -> None:
    """It may be NaN, in forward and in its derivative."""
    weight = torch.ones(2)

    def fn(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, weight: Tensor) -> Tensor:
        return score * weight[h] + torch.sqrt((i + 2 - j).to(score.dtype)) * weight[h]

    def clamped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, weight: Tensor) -> Tensor:
        return score * weight[h] + torch.sqrt((i + 2 - j).clamp(min=0).to(score.dtype)) * weight[h]

    found, expected = (
        dense_case(causal=True, score_mod=ScoreFunction(f, (weight,))).run(backend) for f in (fn, clamped)
    )
    for name in ("out", "lse", "dq", "dk", "dv"):
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_minus_infinity_alone_passes_no_gradient(backend: str) -> None:
    """Also where the derivative by a captured tensor is a score, 0 * inf."""
    bias, q = torch.zeros(1, 1, 5, 7), Q.clone().requires_grad_()
    bias[0, 0, 1] = -torch.inf
    gradients = []
    for rows in (slice(None), [0, 2, 3, 4]):
        w = torch.rand(4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        mod = ScoreMod(lambda s, b, h, i, j, w: s * w[h], (w,))
        out = flashtile.attention(q[:, :, rows], K, V, bias=bias[:, :, rows], score_mod=mod, backend=backend)
        out.square().sum().backward()
        gradients.append(w.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    "fn",
    [
        lambda s, b, h, i, j: swallowed(torch.sinh, s), lambda s, b, h, i, j: swallowed(lambda x: x[None][0] * 2, s),
        lambda s, b, h, i, j: swallowed(lambda x: 2 * x if x > 0 else 3 * x, s),
        lambda s, b, h, i, j: swallowed(float, s) + s,
        lambda s, b, h, i, j: swallowed(lambda x: x @ x, s),
    ],
)  # fmt: skip
def test_an_error_that_a_function_catches(fn: Callable[..., Tensor]) -> None:
    """It does something else on stand-ins than on tensors, so there is no formula."""
    assert not ScoreMod(fn).traced


def swallowed(fn: Callable[..., Any], x: Tensor) -> Any:
    try:
        return fn(x)
    except Exception:
        return x


def test_stand_ins_are_tensors() -> None:
    table = torch.randn(5, 7)

    def fn(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[i, j] if torch.is_tensor(i) and isinstance(score, Tensor) else score

    assert str(ScoreMod(fn)) == "score + tensor0[q_idx, k_idx]"


def test_operations_in_place() -> None:
    """On numbers that the function has made, under all their names."""

    def fn(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x = score * 2
        y = x
        x += 1
        return x + y

    assert str(ScoreMod(fn)) == "x0 = score * 2 + 1\nx0 + x0"
    assert not ScoreMod(lambda score, b, h, i, j: operator.iadd(i + 0, 0.5) * score).traced


def test_captured_tensors_get_gradients() -> None:
    """A tensor in a closure becomes one of the ScoreMod's tensors; another tensor there is no new function."""
    weight = torch.rand(4, requires_grad=True)
    flashtile.attention(Q, K, V, score_mod=lambda score, b, h, i, j: score * weight[h]).sum().backward()
    expected = weight.detach().clone().requires_grad_()
    mod = ScoreMod(lambda score, b, h, i, j, w: score * w[h], (expected,))
    flashtile.attention(Q, K, V, score_mod=mod).sum().backward()
    torch.testing.assert_close(weight.grad, expected.grad)

    def of(weight: Tensor) -> ScoreMod:
        return ScoreMod.of(lambda score, b, h, i, j: score * weight[h])

    assert of(weight).key == of(expected).key


def test_a_global_tensor_that_comes_to_require_grad() -> None:
    """It gets its gradient; that of a function that cannot be traced would be lost, and is refused."""
    table = torch.ones(4)
    names: dict[str, Any] = {"table": table, "torch": torch}
    exec("def fn(score, b, h, i, j): return score * table[h]", names)
    exec("def other(score, b, h, i, j): return torch.sinh(score) + table[h]", names)
    for name in ("fn", "other"):
        flashtile.attention(Q, K, V, score_mod=names[name], backend="tiled")
    table.requires_grad_()
    flashtile.attention(Q, K, V, score_mod=names["fn"]).sum().backward()
    assert table.grad is not None
    assert table.grad.any()
    with pytest.raises(ArgumentError, match="`sinh` is not an operation that can be traced"):
        flashtile.attention(Q, K, V, score_mod=names["other"], backend="tiled")


def test_a_function_that_cannot_be_traced_warns() -> None:
    with pytest.warns(AttentionWarning, match=r"line \d+, `.*`: `sinh` is not an operation that can be traced"):
        flashtile.attention(Q, K, V, score_mod=lambda score, b, h, i, j: torch.sinh(score))


# What is refused -----------------------------------------------------------------------------------------------------

weight = torch.ones(4, requires_grad=True)


def reads_global(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.sinh(score) * weight[h]


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (3, "int 3"),
        ("relu", "str 'relu'"),
        (lambda: 1, "TypeError"),
        (lambda score, b, h, i: score, "TypeError"),
        (lambda score, b, h, i, j, table: score, "TypeError"),
        (lambda score, b, h, i, j: 1 / 0, "ZeroDivisionError"),
        (lambda score, b, h, i, j: None, "returned NoneType"),
        (lambda score, b, h, i, j: 1.0, "returned float"),
        (lambda score, b, h, i, j: (score,), "returned tuple"),
        (lambda score, b, h, i, j: torch.cat([score, score], -1), "for a score [1, 1, 1, 1] it returned [1, 1, 1, 2]"),
        (lambda score, b, h, i, j: score[None], "for a score [1, 1, 1, 1] it returned [1, 1, 1, 1, 1]"),
        (reads_global, "all passed as `tensors`"),
        (ScoreMod(lambda score, b, h, i, j, t: torch.sinh(score) * t[h], (torch.ones(2),)), "IndexError"),
        (ScoreMod(lambda score, b, h, i, j: score, (torch.ones(2),)), "TypeError"),
        (lambda score, b, h, i, j: score.to(torch.complex64), "complex64"),
        (lambda score, b, h, i, j: score.to("meta"), "meta"),
        (lambda score, b, h, i, j: score.to_sparse(), "sparse"),
    ],
)
@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_wrong_score_mod(fn: Any, told: str, backend: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        flashtile.attention(Q, K, V, score_mod=fn, backend=backend)
    assert raised.value.argument == "score_mod"
    assert told in str(raised.value)
    assert "a call that works: flashtile.attention(q, k, v, score_mod=flashtile.ScoreMod(" in str(raised.value)


UNIT = torch.ones(4)


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (lambda score, b, h, i, j: score > 0, "torch.where(condition, score, -torch.inf)"),
        (lambda score, b, h, i, j: i - j, "x.to(score.dtype)"),
        (lambda score, b, h, i, j: torch.tensor(0.5), "torch.full_like(score, x)"),
        (lambda score, b, h, i, j: score.sum(), "torch.full_like(score, x)"),
        (lambda score, b, h, i, j: score.mul_(2), "`score = score * 2`"),
        (lambda score, b, h, i, j: score[..., :1].zero_() + score, "aten.zero_"),
        (lambda score, b, h, i, j: score + i.add_(1), "`score = score * 2`"),
        (lambda score, b, h, i, j: torch.mul(score, 2, out=score), "aten.mul.out"),
        (lambda score, b, h, i, j: score + UNIT.add_(1)[h], "`score = score * 2`"),
        (
            functools.partial(ScoreMod, lambda score, b, h, i, j, t: score + t.mul_(2)[h], (UNIT,)),
            "`score = score * 2`",
        ),
        (lambda score, b, h, i, j: torch.nn.functional.dropout(score, 0.5), "Dropout is dropout_p=0.1"),
        (lambda score, b, h, i, j: score + torch.rand(()), "noise is drawn before the call"),
        (lambda score, b, h, i, j: score + torch.randn_like(score), "noise is drawn before the call"),
        (lambda score, b, h, i, j: score + torch.empty_like(score).normal_(), "noise is drawn before the call"),
        (lambda score, b, h, i, j: score * torch.bernoulli(0.5 + 0 * score), "noise is drawn before the call"),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
def test_impure_score_mod(fn: Any, told: str, backend: str) -> None:
    """Refused with the way to write it, and before anything has changed: generators and tensors."""
    before = torch.get_rng_state(), UNIT.clone()
    for _ in range(2):
        with pytest.raises(ArgumentError) as raised, torch.inference_mode(backend == "reference"):
            flashtile.attention(Q, K, V, score_mod=fn() if isinstance(fn, functools.partial) else fn, backend=backend)
        assert raised.value.argument == "score_mod"
        assert told in str(raised.value)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(UNIT, before[1])


def test_writing_into_what_a_function_makes_is_pure() -> None:
    def fn(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        far, half = (i - j).abs(), torch.tensor(0.5)
        far[far > 3] = 3
        new = score * half.add_(1)
        return new.sub_(far)

    assert_right(dense_case(score_mod=ScoreFunction(fn)))


def test_a_result_that_is_wrong_on_tiles_alone() -> None:
    """A single score does not tell."""

    def fn(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score if score.numel() == 1 else i - j

    with pytest.raises(ArgumentError, match=r"x\.to\(score\.dtype\)"):
        flashtile.attention(Q, K, V, score_mod=fn, backend="tiled")


@pytest.mark.parametrize("tensors", [(1.0,), [None], "ab", 3, None, torch.ones(2)])
def test_tensors_of_a_score_mod(tensors: Any) -> None:
    with pytest.raises(ArgumentError, match=r"`score_mod\.tensors` is"):
        ScoreMod(lambda score, *_: score, tensors)


def test_one_tensor_in_place_of_several() -> None:
    """`ScoreMod(fn, table)` would otherwise hand over the table's rows."""
    with pytest.raises(ArgumentError, match="score_mod"):
        flashtile.attention(
            Q, K, V, score_mod=ScoreMod(lambda score, b, h, i, j, table: score + table[h], torch.ones(4))
        )


@pytest.mark.parametrize("index", [0, 1])
def test_tensors_of_a_score_mod_are_checked_like_others(index: int) -> None:
    tensors = [torch.ones(4), torch.ones(4)]
    tensors[index] = tensors[index].to_sparse()
    mod = ScoreMod(lambda score, b, h, i, j, t, u: score, tensors)
    with pytest.raises(ArgumentError, match=rf"`score_mod\.tensors\[{index}\]` is a tensor"):
        flashtile.attention(Q, K, V, score_mod=mod)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_with_too_few_entries(backend: str) -> None:
    for name, n, mod in (
        ("h", 4, lambda score, b, h, i, j, t: score * t[h]),
        ("b", 2, lambda score, b, h, i, j, t: score * t[b]),
        ("k_idx", 7, lambda score, b, h, i, j, t: score * t[j]),
    ):
        with pytest.raises(ArgumentError, match=f"at least {n} entries in dimension 0, which {name} indexes"):
            flashtile.attention(Q, K, V, score_mod=ScoreMod(mod, (torch.ones(n - 1),)), backend=backend)
