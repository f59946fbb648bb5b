"""Forward mode in the CPU backend: results and tangents of every kind of call, within the contract's bound."""

import dataclasses
import importlib
import itertools
import random
from typing import Any

import pytest
import torch
from blind import BLIND
from checking import assert_right, dense_case, features, groups_of_features, offsets

import flashtile
from flashtile.testing.case import Case
from flashtile.testing.layouts import LAYOUTS, lay_out
from flashtile.testing.moving import moving
from flashtile.testing.poison import poisoned_allocation

targets = importlib.import_module("flashtile.backend.cpu.targets")
FEATURES = features()
GROUPS = groups_of_features({name: x for name, x in FEATURES.items() if name != "mask function"}, size=7)
INF = torch.inf


def right(case: Case, *names: str) -> None:
    assert_right(moving(case, names or None), "cpu")


def of_features(*names: str) -> Case:
    return dense_case(**{key: x for name in names for key, x in FEATURES[name].items()})


@pytest.mark.parametrize("names", [("mask function",), *GROUPS], ids=", ".join)
def test_every_feature_with_every_other(names: tuple[str, ...]) -> None:
    right(of_features(*names))


def test_each_input_alone() -> None:
    """Inputs without a tangent stand still; results are those of a call without tangents."""
    plain, modified = of_features("causal", "softcap", "bias", "alibi_slopes", "sinks"), of_features("score_mod")
    for case, names in ((plain, ("q", "k", "v", "bias", "alibi_slopes", "sinks")), (modified, ("score_mod_1",))):
        still = dataclasses.replace(case, forward_only=True).run("cpu")
        for name in names:
            right(case, name)
            found = moving(case, (name,)).run("cpu")
            torch.testing.assert_close({x: found[x] for x in still}, still, atol=1e-6, rtol=1e-6)


def test_the_kernel_computes_them() -> None:
    with flashtile.calls() as counts:
        moving(dense_case()).run("cpu")
    assert [(row.direction, row.backend) for row in counts.rows] == [("tangents", "cpu")]


@pytest.mark.parametrize(
    ("dtype", "rows", "head_dim_v"),
    [
        (torch.float32, 150, 48),
        (torch.float64, 3, 7),
        (torch.float64, 150, 48),
        (torch.bfloat16, 150, 48),
        (torch.float16, 3, 7),
    ],
    ids=str,
)
def test_dtypes_and_panels(dtype: torch.dtype, rows: int, head_dim_v: int) -> None:
    """Rows of one vector or several panels, keys of several blocks, features that fill vectors and that do not."""
    shape = {"seqlen_q": rows, "seqlen_k": 230, "head_dim": 33, "head_dim_v": head_dim_v}
    right(dense_case(**shape, num_heads_q=4, num_heads_kv=2, dtype=dtype, causal=True))


@pytest.mark.parametrize("width", ["avx2", "baseline"])
def test_narrower_vectors(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if width not in targets.usable_widths():
        pytest.skip(f"this processor has no {width}")
    monkeypatch.setenv(targets.VECTORS_VARIABLE, width)
    right(dense_case(seqlen_q=70, seqlen_k=101, head_dim=33, head_dim_v=24, window=(40, 30)))


def test_tails() -> None:
    """Every remainder of rows, keys and head dimensions modulo a vector and the height of a microkernel."""
    for n in range(1, 34, 2):
        right(dense_case(batch=1, seqlen_q=n, seqlen_k=97 + n, head_dim=n, head_dim_v=34 - n, causal=True))


def test_long_rows() -> None:
    """Sums with totals, and maxima that rise from block to block, for which all four sums are rescaled."""
    for head_dim_v, sides in ((16, {"window": (2000, 50)}), (5, {"causal": True})):
        case = dense_case(batch=1, seqlen_q=70, seqlen_k=2500, head_dim=16, head_dim_v=head_dim_v, scale=1.0, **sides)
        case.arguments["k"] *= torch.linspace(0.1, 2, 2500)[:, None]
        right(case)


def test_equal_tangents_of_scores() -> None:
    """A tangent that all scores of a row share moves lse alone, however many keys there are."""
    q, k, v = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 2**17, 8), torch.randn(1, 1, 2**17, 8)
    bias = torch.zeros(1, 1, 1, 1)

    def of_bias(x: torch.Tensor) -> Any:
        return flashtile.attention(q, k, v, bias=x, return_lse=True, backend="cpu")

    (out, _), (dout, dlse) = torch.func.jvp(of_bias, (bias,), (torch.full_like(bias, 1 / 3),))[:2]
    assert (dlse - 1 / 3).abs().max() <= 12 * 2**-23 / 3
    terms = flashtile.attention(q, k, v.abs(), backend="cpu") + out.abs()
    assert (dout.abs() <= 40 * 2**-23 * terms / 3).all()


def test_rows_that_see_nothing() -> None:
    causes = ("no keys", "causal, more queries than keys", "mask of one row", "bias of -inf", "score_mod of -inf")
    for cause, sinks in itertools.product(causes, ((0.5, -INF), (INF, 0.0))):
        right(dense_case(**BLIND[cause], sinks=torch.tensor(sinks)))
    right(dense_case(**BLIND["causal, more queries than keys"]))


def test_packed_sequences_and_tokens_of_none() -> None:
    q, k, v = torch.randn(180, 4, 40), torch.randn(230, 2, 40), torch.randn(230, 2, 24)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "causal": True}
    given |= {"cu_seqlens_q": offsets(100, 0, 3, 70), "cu_seqlens_k": offsets(90, 5, 0, 130)}
    right(Case("attention_varlen", given))
    used = {"seqused_q": torch.tensor([70, 0, 2, 70]), "seqused_k": torch.tensor([33, 1, 0, 130])}
    given |= {name: x.to(torch.int32) for name, x in used.items()} | {"bias": torch.randn(1, 1, 1, 1)}
    right(Case("attention_varlen", given))


def test_pages_that_sequences_share() -> None:
    given = {"k": torch.randn(5, 4, 2, 8), "v": torch.randn(5, 4, 2, 8), "cu_seqlens_k": None, "causal": True}
    given |= {"q": torch.randn(9, 4, 8), "cu_seqlens_q": offsets(4, 5)}
    given["page_table"] = torch.tensor([[0, 3, 1], [3, 4, 0]], dtype=torch.int32)
    given["seqused_k"] = torch.tensor([11, 7], dtype=torch.int32)
    right(Case("attention_varlen", given))


def test_strides_of_inputs_and_tangents() -> None:
    """Tangents in another layout than their inputs, and expanded ones."""
    case = moving(dense_case(bias=torch.randn(2, 1, 7, 9), alibi_slopes=torch.rand(2, 2)))
    for n, layout in enumerate(LAYOUTS):
        case.tangents |= {name: lay_out(case.tangents[name], layout, random.Random(n)) for name in "qkv"}
        assert_right(case, "cpu")
    case.tangents |= {name: torch.randn(()).expand(x.shape) for name, x in case.tangents.items()}
    assert_right(case, "cpu")


def test_results_do_not_depend_on_threads_or_what_memory_held() -> None:
    cases = [
        dense_case(seqlen_q=300, seqlen_k=1700, head_dim=13, causal=True, dropout_p=0.2, dropout_seed=3),
        of_features("mask", "bias", "sinks", "alibi_slopes"),
        dense_case(seqlen_q=0),
    ]
    before = torch.get_num_threads()
    for case in map(moving, cases):
        clean = case.run("cpu")
        torch.set_num_threads(3)
        with poisoned_allocation():
            poisoned = case.run("cpu")
        torch.set_num_threads(before)
        assert all(torch.equal(clean[name], x) for name, x in poisoned.items())


def test_finite_differences() -> None:
    case = moving(dense_case(dtype=torch.float64, softcap=1.5, sinks=torch.randn(2).double(), **FEATURES["window"]))
    step, ends = 2.0**-16, []
    for h in (step, -step):
        moved = {name: x + h * case.tangents[name] for name, x in case.differentiable().items()}
        arguments: dict[str, Any] = case.arguments | moved
        ends.append(flashtile.attention(**arguments, return_lse=True, backend="cpu"))
    found = case.run("cpu")
    for plus, minus, name in zip(*ends, ("tout", "tlse"), strict=True):
        torch.testing.assert_close((plus - minus) / (2 * step), found[name], atol=1e-7, rtol=1e-7)
